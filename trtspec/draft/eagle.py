"""EAGLE drafting: a small head reads the target's hidden states and goes on from its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from trtspec.config import HEAD_CHUNK, HEAD_WIDTH
from trtspec.draft.expansion import ChainRule, Draft, expand_chains, expand_trees
from trtspec.draft.head_state import HeadState
from trtspec.draft.hidden_rows import join_rows, view_rows, zeros
from trtspec.draft.tree import EMPTY, DraftTree
from trtspec.engine.draft_head import DraftHeadRunner, HeadOutput
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.target import Rows
from trtspec.sampling import Sampler
from trtspec.sequence import Sequence

OPEN_TOKENS = 8
"""Draft tokens of an open chain at most."""


class HeadAsk(NamedTuple):
    """What one sequence asks of the head in a step."""

    sequence: Sequence
    state: HeadState | None
    """None: the head doesn't draft for it at all."""
    room: int
    """Draft tokens at most; 0: no draft in this step."""
    sampler: Sampler | None = None
    """What the target's tokens are chosen with; None: greedily."""
    open: bool = False
    """Whether a ChainRule says how far its chain goes, whatever eagle_tokens says."""


class Refresh(NamedTuple):
    """Queued rows of one sequence that a pass takes."""

    place: int
    """The sequence's row in the pass."""
    sequence: Sequence
    state: HeadState
    rows: int


class EagleDrafter:
    """Drafts for the sequences of a batch in common passes of the head.

    First the head is *refreshed*: it runs over the rows committed since it was last asked, with the target's own
    features; over a prompt's rows during prefill already (`absorb`). Then it *expands* from what it feeds back; the
    next refresh overwrites the KV of those rows. Sequences that take no part in a pass have rows in it, too, whose KV
    lands behind their refreshed rows.
    """

    def __init__(self, head: DraftHeadRunner, cache: KVCache) -> None:
        """`cache` is the head's own; its slots are the target's."""
        self.head = head
        self.cache = cache
        self._cache_rows = cache.block.shape[3]

    def start(self) -> HeadState:
        """The state of a new sequence."""
        # A refresh and an expansion may begin behind its last row.
        return HeadState(min(self.head.config.max_position_embeddings, self._cache_rows - HEAD_CHUNK))

    def move(self, state: HeadState, source: int, destination: int) -> None:
        """Take a sequence's KV to another slot."""
        self.cache.move(source, destination, state.refreshed)

    def absorb(self, slot: int, sequence: Sequence, state: HeadState) -> None:
        """Refresh a sequence's queued rows alone until few enough are left for a pass of the batch.

        Called for each prompt chunk, so that no decode step waits for a prompt, nor a prompt's features for the step.
        """
        while state.queued > HEAD_WIDTH:
            self._refresh_pass([Refresh(0, sequence, state, min(state.queued - 1, HEAD_CHUNK))], [state], slot)

    def draft(self, asks: Seq[HeadAsk], rule: ChainRule | None = None) -> list[DraftTree]:
        """A draft for each sequence; empty where there is no room for one, or the head has stopped.

        Args:
            asks: one for each of the slots 0, 1, ...
            rule: how far open chains go; needed where there are any.
        """
        trees = [EMPTY] * len(asks)
        states = [ask.state for ask in asks]
        drafts = [
            self._plan(slot, ask, ask.state)
            for slot, ask in enumerate(asks)
            if ask.state is not None and not ask.state.stopped and ask.room
        ]
        if not drafts:
            return trees
        last, starts = self._refresh(drafts, states), _refreshed(states)
        cache = self.cache.view(0, len(states))
        if all(draft.top_k == 1 for draft in drafts):
            found = expand_chains(self.head, cache, drafts, starts, last, rule)
        else:
            found = expand_trees(self.head, cache, drafts, starts, last)
        for draft, tree in zip(drafts, found, strict=True):
            trees[draft.slot] = tree
        return trees

    def _plan(self, slot: int, ask: HeadAsk, state: HeadState) -> Draft:
        """What the options ask for, as far as room, positions and cache rows go."""
        options, rows = ask.sequence.speculation, state.refreshed + state.queued
        top_k = min(options.eagle_topk, self.head.config.draft_vocab_size)
        longest = OPEN_TOKENS if ask.open else options.eagle_tokens
        size = min(longest if top_k == 1 else options.tree_nodes, ask.room)
        # No node lies deeper than there are nodes: a tree holds all ancestors of its nodes.
        growths = size - 1 if top_k == 1 else min(options.eagle_depth, size - 1)
        growths = min(growths, state.max_rows - rows, (self._cache_rows - HEAD_WIDTH - rows) // top_k + 1)
        return Draft(slot, ask.sequence, state, top_k, growths, size, ask.sampler, ask.open)

    def _refresh(self, drafts: Seq[Draft], states: Seq[HeadState | None]) -> HeadOutput:
        """Run the head over all queued rows; returns the output of each draft's last row, `[drafts, hidden]`."""
        for draft in drafts:
            self.absorb(draft.slot, draft.sequence, draft.state)
        parts = [Refresh(draft.slot, draft.sequence, draft.state, draft.state.queued) for draft in drafts]
        return self._refresh_pass(parts, states, 0)

    def _refresh_pass(self, parts: Seq[Refresh], states: Seq[HeadState | None], first_slot: int) -> HeadOutput:
        """Run the head over the first queued rows of some sequences; returns the outputs of each one's last row.

        Args:
            states: of all slots in the pass, the first of which is `first_slot`.
        """
        starts, buckets = _refreshed(states), self.head.buckets
        width = buckets.width(max(part.rows for part in parts))
        tokens = np.zeros((len(states), width), dtype=np.int32)
        features = []
        for part in parts:
            first = part.state.refreshed + 1
            tokens[part.place, : part.rows] = part.sequence.tokens[first : first + part.rows]
            features.append(part.state.take(part.rows))
        positions = starts[:, None] + np.arange(width)
        mask = np.arange(buckets.live(int(starts.max()) + width)) <= positions[:, None, :, None]
        hidden = _spread(self.head.first_hidden(join_rows(features)), parts, tokens.shape)
        rows = Rows(*map(torch.from_numpy, (tokens, positions, starts, mask)))
        output = self.head.forward(rows, hidden, self.cache.view(first_slot, len(states)))
        ends = [part.place * width + part.rows - 1 for part in parts]
        return HeadOutput(view_rows(output.feedback, ends), view_rows(output.logit_hidden, ends))


def _refreshed(states: Seq[HeadState | None]) -> np.ndarray:
    """Rows in the head's KV cache, int64 `[slots]`."""
    return np.array([state.refreshed if state else 0 for state in states], dtype=np.int64)


def _spread(rows: torch.Tensor, parts: Seq[Refresh], shape: tuple[int, ...]) -> torch.Tensor:
    """Rows `[sum of counts, hidden]` at the front of their places, zeros behind: `[slots, width, hidden]`."""
    slots, width = shape
    if len(rows) == slots * width:
        return rows.view(slots, width, -1)
    hidden = zeros((slots, width, rows.shape[1]), rows)
    for part, own in zip(parts, torch.split(rows, [part.rows for part in parts]), strict=True):
        hidden[part.place, : part.rows] = own
    return hidden
