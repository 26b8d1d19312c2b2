"""From logits to tokens. All ties go to the lowest id."""

from __future__ import annotations

import numpy as np
import torch


def greedy(logits: torch.Tensor) -> np.ndarray:
    """The most probable token of each row, the lowest id on ties: int64 `[rows]` on the host, of `[rows, vocab]`."""
    if logits.is_cpu:
        return np.asarray(logits.numpy().argmax(axis=1))
    return np.asarray(logits.argmax(dim=1).cpu().numpy())


def top_k(logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` most probable tokens of each row, best first, the lower id first on ties.

    Args:
        logits: `[rows, vocab]`; on the host they are overwritten.
        count: at most vocab.

    Returns:
        Ids, int64 `[rows, count]`, and their log-probabilities, float32 `[rows, count]`; both on the host.
    """
    if logits.is_cpu:
        return _top_k_on_host(logits.numpy().astype(np.float32, copy=False), count)
    return _top_k_on_device(logits.float(), count)


def _top_k_on_host(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """One argmax after the other: the first maximum is the lowest id, and no sort of a vocabulary is faster.

    NumPy, because torch would use threads, which wait for milliseconds while the engines' threads spin.
    """
    rows = np.arange(len(logits))
    ids = np.empty((len(logits), count), dtype=np.int64)
    values = np.empty((len(logits), count), dtype=np.float32)
    for rank in range(count):
        best = ids[:, rank] = logits.argmax(axis=1)
        values[:, rank] = logits[rows, best]
        if rank == 0:
            log_sum = np.log(np.exp(logits - values[:, :1]).sum(axis=1, keepdims=True))
        logits[rows, best] = -np.inf
    return ids, (values - values[:, :1]) - log_sum


def _top_k_on_device(logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """One copy to the host; torch promises no order of equal values, so rows that have some are done there."""
    values, ids = logits.topk(min(count + 1, logits.shape[1]), dim=1)
    if bool((values[:, 1:] == values[:, :-1]).any()):
        return _top_k_on_host(logits.cpu().numpy(), count)
    best = values[:, :1]
    log_probs = (values[:, :count] - best) - torch.logsumexp(logits - best, dim=1, keepdim=True)
    return ids[:, :count].cpu().numpy(), log_probs.cpu().numpy()
