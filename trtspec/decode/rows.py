"""The rows of a pass: prompt chunks, and the roots and draft trees of a batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from trtspec.draft.tree import DraftTree
from trtspec.engine.target import Rows
from trtspec.sequence import Sequence


def verification_rows(sequences: Seq[Sequence], trees: Seq[DraftTree]) -> Rows:
    """Root and draft tokens of every sequence, padded to the widest tree.

    A row sees the committed tokens, its ancestors and itself. Padding rows repeat the root's token and position and
    see the committed tokens only; nothing sees them, and the next pass overwrites their KV.
    """
    batch, width = len(sequences), max(tree.width for tree in trees)
    live = max(sequence.cached + tree.width for sequence, tree in zip(sequences, trees, strict=True))
    tokens = np.empty((batch, width), dtype=np.int32)
    positions = np.empty((batch, width), dtype=np.int64)
    mask = np.zeros((batch, 1, width, live), dtype=bool)
    for b, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
        cached = sequence.cached
        tokens[b] = sequence.tokens[cached]
        tokens[b, 1 : tree.width] = tree.tokens
        positions[b] = cached
        positions[b, : tree.width] += tree.depths()
        mask[b, 0, :, :cached] = True
        mask[b, 0, : tree.width, cached : cached + tree.width] = tree.mask()
    return _rows(tokens, positions, [sequence.cached for sequence in sequences], mask)


def prefill_rows(sequence: Sequence, chunk: int) -> Rows:
    """The next at most `chunk` prompt tokens of one sequence, each seeing those before it."""
    start = sequence.cached
    stop = min(start + chunk, sequence.prompt_length)
    tokens = sequence.tokens[None, start:stop].copy()
    positions = np.arange(start, stop)[None]
    mask = np.tri(stop - start, stop, start, dtype=bool)[None, None]
    return _rows(tokens, positions, [start], mask)


def select_rows(hidden: torch.Tensor, trees: Seq[DraftTree]) -> torch.Tensor:
    """The hidden rows `[sum of widths, hidden]` of `[batch, width, hidden]` without the padding."""
    batch, width, size = hidden.shape
    flat = hidden.reshape(batch * width, size)
    if all(tree.width == width for tree in trees):
        return flat
    index = np.concatenate([np.arange(tree.width) + b * width for b, tree in enumerate(trees)])
    return flat.index_select(0, torch.from_numpy(index).to(hidden.device))


def _rows(tokens: np.ndarray, positions: np.ndarray, cached: list[int], mask: np.ndarray) -> Rows:
    return Rows(
        torch.from_numpy(tokens),
        torch.from_numpy(positions),
        torch.tensor(cached, dtype=torch.int64),
        torch.from_numpy(mask),
    )
