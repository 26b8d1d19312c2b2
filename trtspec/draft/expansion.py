"""A draft head going on from its own output behind the refreshed rows: chains, and EAGLE-2's dynamic trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from trtspec.draft.growth import TreeGrowth
from trtspec.draft.head_state import HeadState
from trtspec.draft.hidden_rows import put_rows, view_rows, zeros
from trtspec.draft.tree import EAGLE, DraftTree
from trtspec.engine.base import CacheView
from trtspec.engine.draft_head import DraftHeadRunner, HeadOutput
from trtspec.engine.target import Rows
from trtspec.sequence import Sequence


class Draft(NamedTuple):
    """What is to be drafted for one sequence."""

    slot: int
    sequence: Sequence
    state: HeadState
    top_k: int
    """Tokens proposed behind each node, and nodes that the next level grows from; 1 makes a chain."""
    growths: int
    """Levels behind the first, a pass each."""
    size: int
    """Draft tokens at most."""


class PassRows:
    """The rows of an expansion's passes over all slots, changed in place from one pass to the next.

    The shapes stay, so engines that keep bindings or graphs by shape make them once for a draft.
    """

    def __init__(self, starts: np.ndarray, width: int, live: int) -> None:
        """Rows that see what lies in front of `starts`, the rows in each slot's cache, int64 `[slots]`."""
        slots = len(starts)
        self.tokens = np.zeros((slots, width), dtype=np.int32)
        self.positions = starts[:, None].repeat(width, axis=1)
        self.lengths = starts.copy()
        self.mask = np.arange(live) < self.positions[:, None, :, None]
        self.rows = Rows(*map(torch.from_numpy, (self.tokens, self.positions, self.lengths, self.mask)))


def expand_chains(
    head: DraftHeadRunner, cache: CacheView, drafts: Seq[Draft], starts: np.ndarray, last: HeadOutput
) -> list[DraftTree]:
    """The most probable token behind the last row, the one behind that, and so on.

    Args:
        starts: rows in each slot's cache, int64 `[slots]`.
        last: the output of each draft's last refreshed row, `[drafts, hidden]`.
    """
    slots, growths = [draft.slot for draft in drafts], max(draft.growths for draft in drafts)
    tokens = np.empty((len(drafts), 1 + growths), dtype=np.int32)
    tokens[:, 0] = head.best_tokens(last.logit_hidden)
    step = PassRows(starts, 1, head.buckets.live(int(starts.max()) + growths))
    hidden = zeros((len(starts), 1, last.feedback.shape[1]), last.feedback)
    for n, slot in enumerate(slots):
        put_rows(hidden[slot], last.feedback, [n])
    every_slot = np.arange(len(starts))
    for level in range(growths):
        step.tokens[slots, 0] = tokens[:, level]
        step.mask[every_slot, 0, 0, step.lengths] = True
        output = head.forward(step.rows, hidden, cache)
        tokens[:, level + 1] = head.best_tokens(view_rows(output.logit_hidden, slots))
        hidden.copy_(output.feedback)
        step.positions += 1
        step.lengths += 1
    sizes = [min(draft.size, 1 + draft.growths) for draft in drafts]
    return [DraftTree.chain(row[:size], EAGLE) for row, size in zip(tokens, sizes, strict=True)]


def expand_trees(
    head: DraftHeadRunner, cache: CacheView, drafts: Seq[Draft], starts: np.ndarray, last: HeadOutput
) -> list[DraftTree]:
    """EAGLE-2's trees; see `expand_chains` for the arguments."""
    top_k = max(draft.top_k for draft in drafts)
    tokens, log_probs = head.top_tokens(last.logit_hidden, top_k)
    trees = [TreeGrowth(tokens[n, : draft.top_k], log_probs[n, : draft.top_k]) for n, draft in enumerate(drafts)]
    width = head.buckets.width(top_k)
    live = max(int(starts[draft.slot]) + draft.growths * draft.top_k for draft in drafts)
    step = PassRows(starts, width, head.buckets.live(live))
    # Rows that stand for nothing must see something: softmax over nothing is NaN, which would spread through the cache.
    step.mask[:, :, :, 0] = True
    hidden = zeros((len(starts), width, last.feedback.shape[1]), last.feedback)
    for n, draft in enumerate(drafts):
        put_rows(hidden[draft.slot, : draft.top_k], last.feedback, [n] * draft.top_k)
    for level in range(max(draft.growths for draft in drafts)):
        growing = [(draft, tree) for draft, tree in zip(drafts, trees, strict=True) if draft.growths > level]
        for draft, tree in growing:
            _place_beam(step, draft, tree, int(starts[draft.slot]), level)
        output = head.forward(step.rows, hidden, cache)
        places = [draft.slot * width + row for draft, _ in growing for row in range(draft.top_k)]
        tokens, log_probs = head.top_tokens(view_rows(output.logit_hidden, places), top_k)
        at = 0
        for draft, tree in growing:
            new = slice(at, at + draft.top_k)
            tree.extend(tokens[new, : draft.top_k], log_probs[new, : draft.top_k])
            put_rows(hidden[draft.slot, : draft.top_k], output.feedback[draft.slot], tree.parents)
            at += draft.top_k
    return [tree.tree(draft.size) for draft, tree in zip(drafts, trees, strict=True)]


def _place_beam(step: PassRows, draft: Draft, tree: TreeGrowth, start: int, level: int) -> None:
    """Set the beam's rows: all at one position, each sees what its parent saw and itself."""
    slot, top_k = draft.slot, draft.top_k
    step.tokens[slot, :top_k] = tree.tokens
    step.positions[slot] = start + level
    step.lengths[slot] = first = start + level * top_k
    mask = step.mask[slot, 0]
    mask[:top_k] = mask[tree.parents]
    mask[:top_k, first : first + top_k] = np.eye(top_k, dtype=bool)
