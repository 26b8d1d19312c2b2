"""Log-probabilities of chosen tokens and of their alternatives."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from trtspec.sampling.choose import top_k


class TokenLogprob(NamedTuple):
    """How probable the target found a token, before penalties, temperature and filters."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...]
    """Ids and log-probabilities of the most probable tokens, best first, the lower id first on ties."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object: `id`, `logprob` and `top`, a list of [id, logprob]."""
        return {"id": self.token_id, "logprob": self.logprob, "top": [list(pair) for pair in self.top]}


def token_logprobs(logits: np.ndarray, chosen: np.ndarray, count: int) -> list[TokenLogprob]:
    """The log-probability of each row's chosen token and of the row's `count` most probable ones.

    Args:
        logits: the target's own, float32 `[rows, vocab]`; not changed.
        chosen: token ids, integer `[rows]`.
        count: 0 or more; the vocabulary's size is the most that come. Tokens of probability 0 are left out.
    """
    best = logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(logits - best, dtype=np.float64).sum(axis=1))
    ids = np.empty((len(logits), 0), dtype=np.int64)
    if count:
        ids, _ = top_k(torch.from_numpy(logits.copy()), min(count, logits.shape[1]))
    ids = np.concatenate([chosen[:, None], ids], axis=1)
    values = np.take_along_axis(logits, ids, axis=1).astype(np.float64)
    found = []
    for row_ids, row in zip(ids.tolist(), ((values - best) - log_sums[:, None]).tolist(), strict=True):
        top = tuple((token, logprob) for token, logprob in zip(row_ids[1:], row[1:], strict=True) if logprob > -np.inf)
        found.append(TokenLogprob(row_ids[0], row[0], top))
    return found
