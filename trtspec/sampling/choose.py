"""The most probable tokens of logits, on the host or on the device. All ties go to the lowest id."""

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
    """torch promises no order of equal values, so keys without equals are compared: the value, then the lower id."""
    vocab = logits.shape[1]
    # A float's bits order like integers once those of negative numbers are turned round; adding 0 makes -0 a 0.
    bits = (logits + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    descending_ids = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (ordered << 32) | descending_ids
    ids = (vocab - 1) - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
    values = logits.gather(1, ids)
    best = values[:, :1]
    log_probs = (values - best) - torch.logsumexp(logits - best, dim=1, keepdim=True)
    return ids.cpu().numpy(), log_probs.cpu().numpy()
