"""From logits to the target's tokens."""

from __future__ import annotations

import numpy as np
import torch


def greedy(logits: torch.Tensor) -> np.ndarray:
    """The most probable token of each row, the lowest id on ties: int64 `[rows]` on the host, of `[rows, vocab]`."""
    if logits.is_cpu:
        return np.asarray(logits.numpy().argmax(axis=1))
    return np.asarray(logits.argmax(dim=1).cpu().numpy())
