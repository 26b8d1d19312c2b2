"""The target's token behind every row of a verification."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from trtspec import sampling
from trtspec.decode.generation import Generation
from trtspec.decode.rows import split_rows
from trtspec.draft.tree import DraftTree


def choose_tokens(logits: torch.Tensor, batch: Seq[Generation], trees: Seq[DraftTree]) -> list[list[int]]:
    """The token that each sequence's own way of sampling chooses behind each of its rows, a list `[width]` each.

    Args:
        logits: `[sum of widths, vocab]`; not changed.
    """
    samplers = [generation.sampler_of(logits.shape[1]) for generation in batch]
    if not any(samplers):
        return split_rows(sampling.greedy(logits).tolist(), trees)
    picks = sampling.greedy(logits) if not all(samplers) else np.empty(len(logits), dtype=np.int64)
    host, start = _on_host(logits), 0
    for sampler, tree in zip(samplers, trees, strict=True):
        rows = slice(start, start + tree.width)
        if sampler is not None:
            picks[rows] = sampler.choose(host[rows], tree.tokens, tree.mask, tree.depths)
        start += tree.width
    return split_rows(picks.tolist(), trees)


def note_logprobs(
    logits: torch.Tensor, batch: Seq[Generation], trees: Seq[DraftTree], committed: Seq[Seq[int]]
) -> None:
    """Keep the log-probabilities of the tokens just committed, for the sequences that ask for them.

    Args:
        logits: those that the tokens were chosen from.
        committed: the rows behind which each sequence's new tokens stand.
    """
    start = 0
    for generation, tree, rows in zip(batch, trees, committed, strict=True):
        count = generation.sequence.sampling.logprobs
        if count is not None:
            index = [start + row for row in rows]
            tokens = generation.sequence.history[-len(rows) :]
            generation.logprobs += sampling.token_logprobs(_on_host(logits[index]), tokens.astype(np.int64), count)
        start += tree.width


def _on_host(logits: torch.Tensor) -> np.ndarray:
    return np.asarray(logits.float().cpu().numpy())
