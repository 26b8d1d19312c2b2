"""Both drafters' tokens as one tree with chances."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from draft.trees import token_paths
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.draft.candidates import LEAST_TAIL, Candidates, candidates, tail_of, with_tail
from trtspec.draft.costs import PassCosts
from trtspec.draft.merge import union
from trtspec.draft.ngram import Match
from trtspec.draft.policy import AutoPolicy, Member
from trtspec.draft.tree import EAGLE, EMPTY, NGRAM, DraftTree, check_tree
from trtspec.sequence import Sequence

ROOM = 12
OPTIONS = SpeculationConfig(method="ngram-eagle")
NO_REPEATS = [900, 901, 902, 903]


def sequence(history: list[int], options: SpeculationConfig = OPTIONS) -> Sequence:
    return Sequence.start(0, history, 100, SamplingParams(), options)


def chain(tokens: list[int], probability: float = 0.7) -> DraftTree:
    """A head's."""
    scores = math.log(probability) * np.arange(1, len(tokens) + 1)
    return DraftTree.chain(np.array(tokens, np.int32), EAGLE, scores.astype(np.float32))


def weigh(
    lookup: list[int], head_tree: DraftTree, history: list[int] = NO_REPEATS, *, room: int = ROOM, luck: float = 0.5
) -> Candidates:
    """The candidates of a first step."""
    costs = PassCosts({1: {1: 1.0}})
    policy = AutoPolicy(costs, costs, range(1, ROOM + 2))
    match = Match(np.array(lookup, np.int32), 5) if lookup else None
    member = Member(0, policy.start(), match, room, has_head=True)
    member.state.heat = luck
    policy.begin([member], 1, 1, 1)
    return candidates(policy, member, sequence(history), head_tree)


def chances(found: Candidates) -> dict[tuple[int, ...], float]:
    return dict(zip(token_paths(found.tree), found.reached.tolist(), strict=True))


@st.composite
def head_trees(draw: st.DrawFn) -> DraftTree:
    """Chains and trees of a head with its probabilities; few tokens, so that the lookup shares some."""
    edges: list[tuple[int, int]] = []
    scores: list[float] = [0.0]
    as_chain = draw(st.booleans())
    for _ in range(draw(st.integers(0, 8))):
        parent = len(edges) if as_chain else draw(st.integers(0, len(edges)))
        edge = (parent, draw(st.integers(0, 5)))
        if edge not in edges:
            edges.append(edge)
            scores.append(scores[parent] + math.log(draw(st.floats(1e-3, 1.0))))
    return DraftTree(
        np.array([token for _, token in edges], np.int32),
        np.array([parent for parent, _ in edges], np.int32),
        np.full(len(edges), EAGLE, np.int8),
        np.array(scores[1:], np.float32),
    )


tokens = st.lists(st.integers(0, 5), max_size=10)


@settings(max_examples=400, deadline=None)
@given(tokens, head_trees(), st.lists(st.integers(0, 5), min_size=1, max_size=30), st.floats(0, 1))
def test_chances_are_those_of_a_tree(lookup: list[int], head_tree: DraftTree, history: list[int], luck: float) -> None:
    found = weigh(lookup, head_tree, history, luck=luck)
    check_tree(found.tree)
    reached = np.concatenate(([1.0], found.reached))
    assert len(reached) == found.tree.width
    assert (found.reached > 0).all()
    assert (found.reached <= reached[found.tree.parents]).all()
    for row in range(found.tree.width):
        assert found.reached[found.tree.parents == row].sum() <= reached[row] + 1e-9


@settings(max_examples=300, deadline=None)
@given(tokens, head_trees(), st.integers(0, 30))
def test_the_best_are_the_likeliest_closed_sub_tree(lookup: list[int], head_tree: DraftTree, count: int) -> None:
    found = weigh(lookup, head_tree)
    best = found.best(count)
    check_tree(best)
    assert best.size == min(count, found.tree.size)
    known = chances(found)
    total = sum(known[path] for path in token_paths(best))
    if found.tree.size <= 10:
        closed = (
            sum(known[path] for path in paths)
            for paths in itertools.combinations(known, best.size)
            if all(path[:-1] in paths for path in paths if len(path) > 1)
        )
        assert total == pytest.approx(max(closed))


def test_everything_is_proposed() -> None:
    head_tree = chain([1, 2, 3])
    found = weigh([1, 5, 6], head_tree)
    expected = union(DraftTree.chain(np.array([1, 5, 6], np.int32), NGRAM), head_tree, 99)
    assert token_paths(found.tree) == token_paths(expected)
    assert found.tree.sources.tolist() == [NGRAM | EAGLE, NGRAM, NGRAM, EAGLE, EAGLE]
    assert weigh([], EMPTY).tree.size == 0
    assert weigh([], EMPTY).best(3) is EMPTY
    assert weigh([4, 5, 6], EMPTY, room=2).tree.tokens.tolist() == [4, 5]


@given(st.floats(0, 1), st.floats(0.01, 0.999))
def test_agreement_raises_and_disagreement_lowers(luck: float, probability: float) -> None:
    looked_up = chances(weigh([7], EMPTY, luck=luck))[(7,)]
    headed = chances(weigh([], chain([7], probability)))[(7,)]
    both = chances(weigh([7], chain([7], probability), luck=luck))[(7,)]
    assert both > max(looked_up, headed)
    apart = chances(weigh([8], chain([7], probability), luck=luck))
    assert apart[(8,)] < looked_up
    assert apart[(7,)] < headed


def test_a_sibling_of_what_both_propose_is_less_likely() -> None:
    head_tree = DraftTree(
        np.array([7, 8], np.int32),
        np.zeros(2, np.int32),
        np.full(2, EAGLE, np.int8),
        np.log(np.array([0.6, 0.3], np.float32)),
    )
    alone, beside = chances(weigh([], head_tree)), chances(weigh([7], head_tree))
    assert beside[(7,)] > alone[(7,)]
    assert beside[(8,)] < alone[(8,)]


def test_a_head_with_many_likely_siblings_shares_one_chance() -> None:
    head_tree = DraftTree(
        np.arange(20, dtype=np.int32),
        np.zeros(20, np.int32),
        np.full(20, EAGLE, np.int8),
        np.full(20, math.log(0.05), np.float32),
    )
    assert 0.5 < weigh([], head_tree).reached.sum() <= 1.0


HISTORY = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
"""Behind a head's 3, 4 the last four tokens stand in front of 5."""


def test_a_lookup_goes_on_behind_the_heads_path() -> None:
    found = weigh([], chain([3, 4], 0.95), HISTORY)
    assert found.tree.is_chain
    assert found.tree.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4][: found.tree.size]
    assert found.tree.size > 4
    assert found.tree.sources.tolist() == [EAGLE, EAGLE] + [NGRAM] * (found.tree.size - 2)
    assert weigh([], chain([3, 4], 0.05), HISTORY).tree.size == 2, f"less likely than {LEAST_TAIL}"
    assert weigh([], chain([3, 4], 0.95), NO_REPEATS).tree.size == 2


def test_a_tail_hangs_below_the_heads_last_token_beside_a_lookup() -> None:
    found = weigh([3, 9, 9], chain([3, 4], 0.95), HISTORY)
    paths = token_paths(found.tree)
    assert (3, 4, 5, 6) in paths
    assert not any(path[:3] == (3, 9, 9) and len(path) > 3 for path in paths)


def test_a_tail_and_a_lookup_that_differ_share_one_chance() -> None:
    known = chances(weigh([3, 4, 9, 9], chain([3, 4], 0.95), HISTORY, luck=1.0))
    assert known[(3, 4, 9)] + known[(3, 4, 5)] <= known[(3, 4)]


def test_a_tail_that_the_lookup_has_too_is_shared() -> None:
    found = weigh([3, 4, 5, 6], chain([3, 4], 0.95), HISTORY)
    assert found.tree.is_chain
    assert (np.diff(found.reached) <= 0).all()


def test_a_tail_has_room() -> None:
    history = sequence(HISTORY)
    assert len(tail_of(history, chain([3, 4]), 4).tokens) == 2
    assert len(tail_of(history, chain([3, 4]), 2).tokens) == 0
    tree = with_tail(chain([3, 4]), history, chain([3, 4]), 5)
    assert tree.tokens.tolist() == [3, 4, 5, 6, 7]


def test_nothing_is_looked_up_behind_branches() -> None:
    branches = union(chain([3, 4], 0.95), chain([5], 0.3), 9)
    assert len(tail_of(sequence(HISTORY), branches, ROOM).tokens) == 0
