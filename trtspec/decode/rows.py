"""The rows of a pass: prompt chunks, and the roots and draft trees of a batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from trtspec.draft.tree import DraftTree
from trtspec.engine.base import Buckets
from trtspec.engine.target import Rows
from trtspec.sequence import Sequence

EXACT = Buckets()


def verification_rows(sequences: Seq[Sequence], trees: Seq[DraftTree], buckets: Buckets = EXACT) -> Rows:
    """Root and draft tokens of every sequence, padded to the widest tree's bucket.

    A row sees the committed tokens, its ancestors and itself. Padding rows repeat the root's token and position and
    see the committed tokens only; nothing sees them, and the next pass overwrites their KV.
    """
    width = live = 0
    for sequence, tree in zip(sequences, trees, strict=True):
        width = max(width, tree.width)
        live = max(live, sequence.cached + tree.width)
    batch, width, live = len(sequences), buckets.width(width), buckets.live(live)
    tokens = np.empty((batch, width), dtype=np.int32)
    positions = np.empty((batch, width), dtype=np.int64)
    cached = np.empty(batch, dtype=np.int64)
    mask = np.empty((batch, 1, width, live), dtype=bool)
    mask[:] = False
    for b, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
        start = cached[b] = sequence.cached
        rows = tree.width
        tokens[b] = sequence.tokens[start]
        tokens[b, 1:rows] = tree.tokens
        positions[b] = start
        positions[b, :rows] = tree.positions(start)
        mask[b, 0, :, :start] = True
        mask[b, 0, :rows, start : start + rows] = tree.mask
    return _rows(tokens, positions, cached, mask)


def prefill_rows(sequence: Sequence, chunk: int) -> Rows:
    """The next at most `chunk` prompt tokens of one sequence, each seeing those before it."""
    start = sequence.cached
    stop = min(start + chunk, sequence.prompt_length)
    tokens = sequence.tokens[None, start:stop].copy()
    positions = np.arange(start, stop)[None]
    mask = np.tri(stop - start, stop, start, dtype=bool)[None, None]
    return _rows(tokens, positions, np.array([start]), mask)


def select_rows(hidden: torch.Tensor, trees: Seq[DraftTree]) -> torch.Tensor:
    """The hidden rows `[sum of widths, hidden]` of `[batch, width, hidden]` without the padding."""
    batch, width, size = hidden.shape
    flat = hidden.view(batch * width, size)
    if sum([tree.width for tree in trees]) == batch * width:
        return flat
    index = np.concatenate([np.arange(tree.width) + b * width for b, tree in enumerate(trees)])
    return flat.index_select(0, torch.from_numpy(index).to(hidden.device))


def split_rows(values: list[int], trees: Seq[DraftTree]) -> list[list[int]]:
    """Per-row values `[sum of widths]` as one list `[width]` per tree."""
    parts, start = [], 0
    for tree in trees:
        parts.append(values[start : start + tree.width])
        start += tree.width
    return parts


def _rows(tokens: np.ndarray, positions: np.ndarray, cached: np.ndarray, mask: np.ndarray) -> Rows:
    arrays = (tokens, positions, cached, mask)
    return Rows(*[torch.from_numpy(array) for array in arrays])
