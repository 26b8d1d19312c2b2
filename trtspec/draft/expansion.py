"""A draft head going on from its own output behind the refreshed rows: chains, and EAGLE-2's dynamic trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import numpy as np
import torch

from trtspec.draft.growth import TreeGrowth
from trtspec.draft.head_state import HeadState
from trtspec.draft.hidden_rows import put_rows, view_rows, zeros
from trtspec.draft.tree import EAGLE, DraftTree
from trtspec.engine.base import CacheView
from trtspec.engine.draft_head import DraftHeadRunner, HeadOutput, Noise, RowNoise
from trtspec.engine.target import Rows
from trtspec.sampling import Sampler
from trtspec.sequence import Sequence


class ChainRule(Protocol):
    """What decides how far open chains go."""

    def go_on(self, slots: Seq[int], log_probs: np.ndarray) -> bool:
        """Whether chains should get another token.

        Args:
            slots: of those that are open.
            log_probs: of each one's newest token behind its parent, float32 `[len(slots)]`.
        """
        ...


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
    sampler: Sampler | None = None
    """What the target's tokens are chosen with; None: greedily."""
    open: bool = False
    """Whether a ChainRule may end it before it has grown so often."""

    def noise(self, level: int) -> RowNoise | None:
        """Behind its nodes of a level; the root's is 0."""
        if self.sampler is None or not self.sampler.draws:
            return None
        return RowNoise(self.sampler.temperature, self.sampler.draft_noise(self.sequence.length + level))


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
    head: DraftHeadRunner,
    cache: CacheView,
    drafts: Seq[Draft],
    starts: np.ndarray,
    last: HeadOutput,
    rule: ChainRule | None = None,
) -> list[DraftTree]:
    """The likeliest token behind the last row, the one behind that, and so on.

    Args:
        starts: rows in each slot's cache, int64 `[slots]`.
        last: the output of each draft's last refreshed row, `[drafts, hidden]`.
        rule: needed where a chain is open; all chains then have scores.
    """
    slots, growths = [draft.slot for draft in drafts], max(draft.growths for draft in drafts)
    tokens = np.empty((len(drafts), 1 + growths), dtype=np.int32)
    log_probs = np.zeros(tokens.shape, dtype=np.float32)
    choose = _best_scored if rule is not None else _best
    choose(head, last.logit_hidden, _noise(drafts, 0), tokens[:, 0], log_probs[:, 0])
    step = PassRows(starts, 1, head.buckets.live(int(starts.max()) + growths))
    hidden = zeros((len(starts), 1, last.feedback.shape[1]), last.feedback)
    for n, slot in enumerate(slots):
        put_rows(hidden[slot], last.feedback, [n])
    every_slot = np.arange(len(starts))
    for level in range(growths):
        if rule is not None and not _goes_on(rule, drafts, level, log_probs[:, level]):
            growths = level
            break
        step.tokens[slots, 0] = tokens[:, level]
        step.mask[every_slot, 0, 0, step.lengths] = True
        output = head.forward(step.rows, hidden, cache)
        rows, place = view_rows(output.logit_hidden, slots), level + 1
        choose(head, rows, _noise(drafts, place), tokens[:, place], log_probs[:, place])
        hidden.copy_(output.feedback)
        step.positions += 1
        step.lengths += 1
    sizes = [min(draft.size, 1 + min(draft.growths, growths)) for draft in drafts]
    scores = [None] * len(drafts) if rule is None else np.cumsum(log_probs, axis=1)
    return [
        DraftTree.chain(row[:size], EAGLE, None if path is None else path[:size])
        for row, path, size in zip(tokens, scores, sizes, strict=True)
    ]


def _goes_on(rule: ChainRule, drafts: Seq[Draft], level: int, log_probs: np.ndarray) -> bool:
    """Whether any chain needs another pass: the open ones are asked about first, so that they know what is drafted."""
    places = [n for n, draft in enumerate(drafts) if draft.open]
    wanted = bool(places) and rule.go_on([drafts[n].slot for n in places], log_probs[places])
    return wanted or any(draft.growths > level for draft in drafts if not draft.open)


def _noise(drafts: Seq[Draft], level: int) -> Noise:
    """Of one row per draft."""
    found = [draft.noise(level) for draft in drafts]
    return found if any(found) else ()


def _best(head: DraftHeadRunner, rows: torch.Tensor, noise: Noise, tokens: np.ndarray, log_probs: np.ndarray) -> None:
    """Set the likeliest token behind each row."""
    tokens[:] = head.best_tokens(rows, noise)


def _best_scored(
    head: DraftHeadRunner, rows: torch.Tensor, noise: Noise, tokens: np.ndarray, log_probs: np.ndarray
) -> None:
    """Set the likeliest token behind each row, and its log-probability."""
    found, scores = head.top_tokens(rows, 1, noise)
    tokens[:], log_probs[:] = found[:, 0], scores[:, 0]


def expand_trees(
    head: DraftHeadRunner, cache: CacheView, drafts: Seq[Draft], starts: np.ndarray, last: HeadOutput
) -> list[DraftTree]:
    """EAGLE-2's trees; see `expand_chains` for the arguments."""
    top_k = max(draft.top_k for draft in drafts)
    tokens, log_probs = head.top_tokens(last.logit_hidden, top_k, _noise(drafts, 0))
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
        noise = [draft.noise(level + 1) for draft, _ in growing for _ in range(draft.top_k)]
        rows = view_rows(output.logit_hidden, places)
        tokens, log_probs = head.top_tokens(rows, top_k, noise if any(noise) else ())
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
