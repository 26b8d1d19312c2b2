"""Random batches that grow, in which slots change their users, and what a lookup must answer to them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.draft.device import DeviceHistory, DeviceLookup
from trtspec.draft.lookup import Lookup
from trtspec.draft.ngram import LookupAsk, Match, MergeAsk, NgramDrafter
from trtspec.draft.tree import EAGLE, EMPTY, DraftTree, check_tree
from trtspec.plugins import reference
from trtspec.sequence import Sequence

COLUMNS = 60


class Story(NamedTuple):
    """What a batch goes through; `seed` says the rest."""

    slots: int
    max_draft_tokens: int
    options: list[SpeculationConfig]
    """Of sequences, in the order in which they come, over and over."""
    steps: int
    seed: int


def speculations(**fixed: st.SearchStrategy[int]) -> st.SearchStrategy[SpeculationConfig]:
    """Options of lookups; by default of all kinds, more rarely those that only the host can answer."""
    return st.builds(
        SpeculationConfig,
        method=st.just("ngram"),
        **{
            "ngram_min": st.integers(1, 3),
            "ngram_max": st.sampled_from([3, 5, 32, 33, 40]),
            "ngram_tokens": st.integers(1, 9),
            "ngram_occurrence": st.sampled_from(["earliest", "latest"]),
            "ngram_branches": st.sampled_from([1, 1, 1, 2, 3]),
            **fixed,
        },
    )


def stories(options: st.SearchStrategy[SpeculationConfig], limits: st.SearchStrategy[int]) -> st.SearchStrategy[Story]:
    return st.builds(
        Story, st.integers(1, 3), limits, st.lists(options, min_size=1, max_size=3), st.integers(1, 6), st.integers(0)
    )


class Batch:
    """The sequences of a story."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._rng = np.random.default_rng(story.seed)
        self._count = 0
        self.sequences = [self._new() for _ in range(story.slots)]

    def go_on(self) -> None:
        """Sequences grow, end, and move into the slots that fall free, as in a scheduler."""
        for sequence in self.sequences:
            for _ in range(int(self._rng.choice([0, 1, 1, 2, 7]))):
                if sequence.length < sequence.capacity:
                    sequence.append(self._token(sequence.history.tolist()))
        if self._rng.random() < 0.4:
            slot, last = int(self._rng.integers(len(self.sequences))), self.sequences.pop()
            if slot < len(self.sequences):
                self.sequences[slot] = last
        if len(self.sequences) < self._story.slots and (not self.sequences or self._rng.random() < 0.7):
            self.sequences.append(self._new())

    def asks(self) -> list[tuple[LookupAsk, int]]:
        """What each asks for, and its room: as `auto` does, or as the other methods, or nothing."""
        asks, most = [], self._story.max_draft_tokens
        for sequence in self.sequences:
            room = int(self._rng.choice([most, self._rng.integers(most + 1)]))
            sizes = [room, min(room, sequence.speculation.ngram_tokens), 0]
            num_tokens = int(self._rng.choice(sizes, p=[0.4, 0.5, 0.1]))
            asks.append((LookupAsk(sequence, num_tokens, bool(self._rng.random() < 0.5)), room))
        return asks

    def head_tree(self, room: int) -> DraftTree:
        """A tree of the same few tokens."""
        edges: dict[tuple[int, int], None] = {}
        for _ in range(int(self._rng.integers(room + 1))):
            edges[int(self._rng.integers(len(edges) + 1)), int(self._rng.integers(3))] = None
        if not edges:
            return EMPTY
        parents, tokens = (np.array(column, np.int32) for column in zip(*edges, strict=True))
        tree = DraftTree(tokens, parents, np.full(len(edges), EAGLE, np.int8), np.zeros(len(edges), np.float32))
        check_tree(tree)
        return tree

    def _new(self) -> Sequence:
        options = self._story.options[self._count % len(self._story.options)]
        self._count += 1
        tokens: list[int] = []
        for _ in range(int(self._rng.integers(1, COLUMNS - 10))):
            tokens.append(self._token(tokens))
        return Sequence.start(self._count, tokens, COLUMNS, SamplingParams(), options)

    def _token(self, tokens: Seq[int]) -> int:
        """Mostly what stood behind the last token before."""
        before = [tokens[at + 1] for at in range(len(tokens) - 1) if tokens[at] == tokens[-1]]
        return before[-1] if before and self._rng.random() < 0.8 else int(self._rng.integers(4))


def contents(matches: Seq[Match]) -> list[tuple[list[int], int]]:
    return [(match.continuation.tolist(), match.length) for match in matches]


def nodes(tree: DraftTree) -> tuple[list[int], list[int], list[int]]:
    check_tree(tree)
    return tree.tokens.tolist(), tree.parents.tolist(), tree.sources.tolist()


def check_story(story: Story, make: Callable[[Story], Lookup]) -> None:
    """A lookup answers what the host's does; where its search ends early, perhaps more branches."""
    lookup, host, batch = make(story), NgramDrafter(), Batch(story)
    for _ in range(story.steps):
        asked = batch.asks()
        asks = [ask for ask, _ in asked]
        found = lookup.lookups(asks)
        merge_asks, right_asks = [], []
        for slot, ((ask, room), matches, right) in enumerate(zip(asked, found, host.lookups(asks), strict=True)):
            if not ask.merged or matches:
                check_matches(ask, matches, right)
            else:
                # They are to be seen in the merged tree only.
                right = all_branches(ask)
            if ask.merged:
                head_tree = batch.head_tree(room)
                merge_asks.append(MergeAsk(slot, ask.sequence, ask.num_tokens, matches, head_tree, room))
                right_asks.append(merge_asks[-1]._replace(matches=matches or right))
        for tree, right_tree in zip(lookup.merges(merge_asks), host.merges(right_asks), strict=True):
            assert nodes(tree) == nodes(right_tree)
        batch.go_on()
    lookup.close()


def all_branches(ask: LookupAsk) -> list[Match]:
    """What the host finds, and the branches that its search doesn't reach."""
    history = DeviceHistory(1, COLUMNS, torch.device("cpu"))
    found = DeviceLookup(history, max(ask.num_tokens, 1), reference).lookups([ask])[0]
    check_matches(ask, found, NgramDrafter().lookups([ask])[0])
    return found


def check_matches(ask: LookupAsk, found: Seq[Match], right: Seq[Match]) -> None:
    options = ask.sequence.speculation
    assert len(found) <= options.ngram_branches
    assert contents(found)[: len(right)] == contents(right)
    if options.ngram_branches == 1:
        assert len(found) == len(right)
    assert all(match.continuation.dtype == np.int32 for match in found)
