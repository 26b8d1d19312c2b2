"""EAGLE drafts of a head with exact arithmetic, against brute force that computes every path anew."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from draft.toy_head import Elsewhere, ToyHead, committed_rows, expected_chain, expected_draft, head_rows, toy_head_cache
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.config import HEAD_CHUNK, HEAD_WIDTH, Limits, SamplingParams, SpeculationConfig
from trtspec.draft.eagle import OPEN_TOKENS, EagleDrafter, HeadAsk
from trtspec.draft.head_state import HeadState
from trtspec.draft.tree import EAGLE, DraftTree, check_tree
from trtspec.engine.base import Buckets
from trtspec.engine.draft_head import RowNoise
from trtspec.sampling import Sampler
from trtspec.sequence import Sequence

VOCAB = 13
LIMITS = Limits(max_seq_len=400, max_batch_size=4)
CHAIN = SpeculationConfig(method="eagle", eagle_tokens=4)
TREE = SpeculationConfig(method="eagle", eagle_topk=3, eagle_depth=2, tree_nodes=9)
BUCKETS = Buckets((1, 2, 4, 8, 32, 128), live_step=16, max_live=LIMITS.head_cache_rows)


def chain_of(tokens: int) -> SpeculationConfig:
    return SpeculationConfig(method="eagle", eagle_tokens=tokens)


def tree_of(top_k: int, depth: int, nodes: int) -> SpeculationConfig:
    return SpeculationConfig(method="eagle", eagle_topk=top_k, eagle_depth=depth, tree_nodes=nodes)


@dataclass
class Story:
    """A sequence that grows as the test decides, with the features that a target could have had."""

    sequence: Sequence
    state: HeadState | None
    features: list[int]
    elsewhere: bool
    sampler: Sampler | None = None

    def noise(self, level: int) -> RowNoise | None:
        """What a draft token at this level is to be perturbed with."""
        if self.sampler is None:
            return None
        params = self.sequence.sampling
        stream = Sampler(params, self.sequence.history, VOCAB)
        return RowNoise(params.temperature, stream.draft_noise(self.sequence.length + level))

    def commit(self, count: int, seed: int) -> None:
        """Commit `count` tokens and the features of as many rows: the root's, and accepted ones of a chain or tree."""
        chooser = random.Random(seed)
        width = count + chooser.randint(0, 3)
        rows = [0, *sorted(chooser.sample(range(1, width), count - 1))]
        features = [chooser.randint(0, 10**6) for _ in range(width)]
        self.push(features, rows)
        self.features += [features[row] for row in rows]
        for _ in range(count):
            self.sequence.append(chooser.randint(0, VOCAB - 1))
        self.sequence.cached += count
        if self.sampler is not None:
            self.sampler.commit(self.sequence.history[-count:].tolist())

    def push(self, features: Seq[int], rows: Seq[int] | None = None) -> None:
        """Hand the head features in a buffer that is used again at once."""
        if self.state is not None:
            buffer = torch.tensor(features, dtype=torch.float64)[:, None]
            self.state.push(buffer.as_subclass(Elsewhere) if self.elsewhere else buffer, rows)
            buffer.fill_(-1)


def tell(
    drafter: EagleDrafter,
    prompt: int,
    options: SpeculationConfig,
    *,
    uses_head: bool = True,
    temperature: float = 0,
) -> Story:
    """A sequence whose prompt has been read and whose first token is there."""
    chooser = random.Random(prompt)
    tokens = [chooser.randint(0, VOCAB - 1) for _ in range(prompt)]
    sampling = SamplingParams(temperature=temperature, seed=prompt)
    sequence = Sequence.start(0, tokens, LIMITS.max_seq_len, sampling, options)
    state = drafter.start() if uses_head else None
    features = [chooser.randint(0, 10**6) for _ in range(prompt)]
    assert isinstance(drafter.head, ToyHead)
    story = Story(sequence, state, features, drafter.head.elsewhere)
    for at in range(0, prompt, 50):
        story.push(features[at : at + 50])
    sequence.cached = prompt
    sequence.append(chooser.randint(0, VOCAB - 1))
    if temperature:
        story.sampler = Sampler(sampling, sequence.history, VOCAB)
    return story


def draft(drafter: EagleDrafter, stories: Seq[Story], rooms: Seq[int]) -> list[DraftTree]:
    asks = [
        HeadAsk(story.sequence, story.state, room, story.sampler) for story, room in zip(stories, rooms, strict=True)
    ]
    return drafter.draft(asks)


def expected(head: ToyHead, story: Story, room: int) -> DraftTree:
    rows = committed_rows(head, story.sequence.history.tolist(), story.features)
    return expected_draft(head, story.sequence.speculation, rows, room, story.noise)


def check(found: DraftTree, right: DraftTree) -> None:
    check_tree(found)
    assert (found.tokens.tolist(), found.parents.tolist()) == (right.tokens.tolist(), right.parents.tolist())
    assert found.sources.tolist() == [EAGLE] * found.size
    assert found.sources.dtype == np.int8
    if found.scores is not None:
        assert right.scores is not None
        assert found.scores.dtype == np.float32
        assert found.scores.tolist() == right.scores.tolist()
    assert found.tokens.dtype == found.parents.dtype == np.int32


def new(head: ToyHead, limits: Limits = LIMITS) -> EagleDrafter:
    return EagleDrafter(head, toy_head_cache(limits))


heads = st.builds(
    ToyHead,
    st.just(VOCAB),
    salt=st.integers(0, 10**6),
    fuses=st.booleans(),
    buckets=st.sampled_from([None, BUCKETS]),
    elsewhere=st.booleans(),
)
speculations = st.one_of(
    st.builds(chain_of, st.integers(1, 7)),
    st.builds(tree_of, st.integers(2, 8), st.integers(0, 4), st.integers(1, 20)),
)
temperatures = st.sampled_from([0, 0, 0.5, 1.5])
prompts = st.one_of(st.integers(1, 12), st.sampled_from([HEAD_WIDTH, HEAD_WIDTH + 1, HEAD_CHUNK + 1, 180]))
turns = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([32, 5, 2, 1, 0])), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    heads,
    st.lists(st.tuples(prompts, speculations, st.booleans(), temperatures), min_size=1, max_size=4),
    st.lists(turns, min_size=1, max_size=6),
)
def test_every_draft_is_the_official_one(
    head: ToyHead, members: list[tuple[int, SpeculationConfig, bool, float]], steps: list[list[tuple[int, int]]]
) -> None:
    """Batches of chains, trees and others, of any lengths, sampled or not; refreshed late or early."""
    drafter = new(head)
    stories = [
        tell(drafter, prompt, options, uses_head=uses, temperature=temperature)
        for prompt, options, uses, temperature in members
    ]
    for number, turn in enumerate(steps):
        rooms = [room for _, room in turn[: len(stories)]]
        for story, room, tree in zip(stories, rooms, draft(drafter, stories, rooms), strict=True):
            check(tree, expected(head, story, room if story.state else 0))
        for at, story in enumerate(stories):
            story.commit(turn[at][0], seed=10 * number + at)


@settings(max_examples=100, deadline=None)
@given(heads, st.integers(2, 13), st.integers(0, 5), st.integers(1, 40), st.integers(1, 9))
def test_trees(head: ToyHead, top_k: int, depth: int, nodes: int, prompt: int) -> None:
    drafter = new(head)
    story = tell(drafter, prompt, tree_of(top_k, depth, nodes))
    [tree] = draft(drafter, [story], [64])
    check(tree, expected(head, story, 64))
    top_k = min(top_k, 7)
    assert tree.size == min(nodes, top_k + depth * top_k**2)
    assert tree.depth <= depth + 1
    assert tree.scores is not None
    assert len(head.passes) == 1 + min(depth, nodes - 1)


@settings(max_examples=30, deadline=None)
@given(heads, st.one_of(st.just(CHAIN), st.just(TREE)), st.lists(st.integers(1, 4), min_size=1, max_size=25))
def test_late_refresh_gives_the_drafts_of_early_refresh(
    head: ToyHead, options: SpeculationConfig, counts: list[int]
) -> None:
    drafters = [new(head), new(head)]
    late, early = (tell(drafter, 9, options) for drafter in drafters)
    for number, count in enumerate(counts):
        draft(drafters[1], [early], [32])
        for story in (late, early):
            story.commit(count, seed=number)
    [found], [right] = draft(drafters[0], [late], [32]), draft(drafters[1], [early], [32])
    check(found, right)


@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_hundred_steps_without_the_head(options: SpeculationConfig) -> None:
    head = ToyHead(VOCAB)
    drafters = [new(head), new(head)]
    late, early = (tell(drafter, 20, options) for drafter in drafters)
    for number in range(100):
        draft(drafters[1], [early], [32])
        for story in (late, early):
            story.commit(1 + number % 3, seed=number)
    assert late.state is not None
    assert late.state.queued == late.sequence.cached == 20 + 33 * 6 + 1
    head.passes.clear()
    [found] = draft(drafters[0], [late], [32])
    assert head.passes[:3] == [(1, HEAD_CHUNK), (1, 219 - HEAD_CHUNK - 1), (1, 1)]
    check(found, expected(head, late, 32))
    check(found, draft(drafters[1], [early], [32])[0])


def test_no_draft_no_pass() -> None:
    head = ToyHead(VOCAB)
    drafter = new(head)
    stories = [tell(drafter, 5, CHAIN), tell(drafter, 6, TREE), tell(drafter, 7, CHAIN, uses_head=False)]
    assert [tree.size for tree in draft(drafter, stories, [0, 0, 9])] == [0, 0, 0]
    assert head.passes == []
    assert [tree.size for tree in draft(drafter, stories, [2, 0, 9])] == [2, 0, 0]
    # The second sequence's prompt waits; its dummy rows widen nothing.
    assert head.passes == [(3, 5), (3, 1)]


def test_one_long_queue_does_not_widen_the_pass_of_all() -> None:
    head = ToyHead(VOCAB)
    drafter = new(head)
    stories = [tell(drafter, 3, CHAIN), tell(drafter, 300, CHAIN), tell(drafter, HEAD_WIDTH, CHAIN)]
    trees = draft(drafter, stories, [1, 1, 1])
    assert head.passes == [(1, 128), (1, 128), (1, 43), (3, HEAD_WIDTH)]
    for story, tree in zip(stories, trees, strict=True):
        check(tree, expected(head, story, 1))


def test_no_more_passes_than_levels_that_can_be_used() -> None:
    head = ToyHead(VOCAB)
    drafter = new(head)
    for options, room, passes in (
        (chain_of(7), 32, 7),
        (chain_of(7), 3, 3),
        (chain_of(7), 1, 1),
        (tree_of(4, 5, 30), 32, 6),
        (tree_of(4, 5, 3), 32, 3),
        (tree_of(4, 5, 30), 2, 2),
        (tree_of(4, 5, 30), 1, 1),
        (tree_of(4, 0, 30), 32, 1),
    ):
        story = tell(drafter, 6, options)
        head.passes.clear()
        [tree] = draft(drafter, [story], [room])
        check(tree, expected(head, story, room))
        assert len(head.passes) == passes


@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_moved_sequence_drafts_as_before(options: SpeculationConfig) -> None:
    head = ToyHead(VOCAB)
    drafter = new(head)
    stories = [tell(drafter, prompt, options) for prompt in (5, 17, 9)]
    draft(drafter, stories, [32] * 3)
    for number, story in enumerate(stories):
        story.commit(2, seed=number)
    mover = stories.pop()
    assert mover.state is not None
    drafter.move(mover.state, 2, 0)
    stories[0] = mover
    for story, tree in zip(stories, draft(drafter, stories, [32] * 2), strict=True):
        check(tree, expected(head, story, 32))


def test_a_slots_next_user_starts_clean() -> None:
    head = ToyHead(VOCAB)
    drafter = new(head)
    draft(drafter, [tell(drafter, 60, TREE)], [32])
    short = tell(drafter, 2, TREE)
    [tree] = draft(drafter, [short], [32])
    check(tree, expected(head, short, 32))


def test_the_cache_holds_true_features_only() -> None:
    head = ToyHead(VOCAB, fuses=True)
    cache = toy_head_cache(LIMITS)
    drafter = EagleDrafter(head, cache)
    story = tell(drafter, 11, TREE)
    for number in range(6):
        draft(drafter, [story], [32])
        rows = committed_rows(head, story.sequence.history.tolist(), story.features)
        assert head_rows(cache.view(0, 1), 0, len(rows)) == rows
        story.commit(1 + number % 4, seed=number)


@pytest.mark.parametrize("options", [chain_of(6), tree_of(3, 5, 30)], ids=["chain", "tree"])
def test_the_head_stops_where_its_positions_end(options: SpeculationConfig) -> None:
    head = ToyHead(VOCAB, max_positions=14)
    drafter = new(head)
    story = tell(drafter, 10, options)
    depths = []
    for number in range(8):
        depths.append(draft(drafter, [story], [32])[0].depth)
        story.commit(1, seed=number)
    # Rows 0..cached-1 are refreshed; a level behind the first takes one position more.
    assert depths == [5, 4, 3, 2, 1, 0, 0, 0]
    assert story.state is not None
    assert story.state.stopped
    assert (story.state.queued, story.state._queue) == (0, [])
    prompt = tell(drafter, 15, options)
    assert prompt.state is not None
    assert prompt.state.stopped
    other = tell(drafter, 4, options)
    trees = draft(drafter, [story, other], [32, 32])
    assert trees[0].size == 0
    check(trees[1], expected(head, other, 32))


@pytest.mark.parametrize(
    "options", [chain_of(HEAD_CHUNK), tree_of(32, 4, 60), tree_of(16, 8, 60), tree_of(2, 64, 60)], ids=str
)
def test_the_widest_drafts_at_the_end_of_the_context(options: SpeculationConfig) -> None:
    """Beside a sequence that makes every pass as wide as any may be; the toy refuses rows beyond the cache."""
    limits = Limits(max_seq_len=40, max_batch_size=2)
    head = ToyHead(3 * HEAD_WIDTH)
    for prompt in (20, 27, 29, 37):
        drafter = new(head, limits)
        stories = [tell(drafter, prompt, options), tell(drafter, 5, tree_of(HEAD_WIDTH, 1, 60))]
        rooms = [limits.max_seq_len - story.sequence.length - 1 for story in stories]
        for story, room, tree in zip(stories, rooms, draft(drafter, stories, rooms), strict=True):
            assert tree.size == min(room, 60 if story.sequence.speculation.eagle_topk > 1 else HEAD_CHUNK)


def test_more_tokens_behind_a_node_than_the_draft_vocabulary_has() -> None:
    head = ToyHead(4)
    drafter = new(head)
    story = tell(drafter, 6, tree_of(5, 2, 20))
    [tree] = draft(drafter, [story], [32])
    check(tree, expected(head, story, 32))
    assert set(tree.tokens.tolist()) == {3, 1}


class Budget:
    """Lets chains grow as often as it is told; what it is asked is kept."""

    def __init__(self, growths: int) -> None:
        self.growths = growths
        self.asked: list[tuple[list[int], list[float]]] = []

    def go_on(self, slots: Seq[int], log_probs: np.ndarray) -> bool:
        self.asked.append(([*slots], log_probs.tolist()))
        return len(self.asked) <= self.growths


@settings(max_examples=80, deadline=None)
@given(
    heads,
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 5), st.booleans(), st.integers(0, 12), temperatures),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 12),
)
def test_open_chains_go_as_far_as_the_rule_says(
    head: ToyHead, members: list[tuple[int, int, bool, int, float]], growths: int
) -> None:
    """Never beyond OPEN_TOKENS or their room; chains beside them are as long as their options say."""
    drafter, rule = new(head), Budget(growths)
    stories = [tell(drafter, prompt, chain_of(size), temperature=t) for prompt, size, _, _, t in members]
    asks = [
        HeadAsk(story.sequence, story.state, room, story.sampler, is_open)
        for story, (_, _, is_open, room, _) in zip(stories, members, strict=True)
    ]
    trees = drafter.draft(asks, rule)
    open_slots = [slot for slot, ask in enumerate(asks) if ask.open and ask.room]
    fixed = [min(ask.room, size) for ask, (_, size, _, _, _) in zip(asks, members, strict=True) if not ask.open]
    longest = max([min(asks[slot].room, OPEN_TOKENS) for slot in open_slots], default=0)
    granted = max([min(1 + growths, longest), *fixed])
    for slot, (story, ask, tree) in enumerate(zip(stories, asks, trees, strict=True)):
        if not ask.open:
            check(tree, expected(head, story, ask.room))
            continue
        rows = committed_rows(head, story.sequence.history.tolist(), story.features)
        right = expected_chain(head, rows, min(ask.room, OPEN_TOKENS, granted), story.noise)
        check(tree, right)
        assert (tree.scores is not None) == (slot in open_slots)
        assert right.scores is not None
        for level, (slots, log_probs) in enumerate(rule.asked[: right.size]):
            assert slots == open_slots
            before = right.scores[level - 1] if level else 0
            assert log_probs[slots.index(slot)] == right.scores[level] - before
