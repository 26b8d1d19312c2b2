"""The decisions of the `auto` merge against brute force, what it learns, and its speed on simulated texts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from draft.simulated import ROOM, Phase, World, additive, best_fixed, plain_speed, speed
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.config import HEAD_WIDTH
from trtspec.draft.costs import PassCosts
from trtspec.draft.eagle import OPEN_TOKENS
from trtspec.draft.ngram import Match
from trtspec.draft.policy import LARGEST_BIAS, PROBE_STEPS, AutoPolicy, AutoState, Member
from trtspec.draft.tree import EAGLE, EMPTY, NGRAM, DraftTree

CHEAP, DEAR = 1e-5, 10.0
FLAT = dict.fromkeys((1, 8, 32), 0.03)
RISING = {width: 0.03 * width for width in (1, 8, 32)}


def policy_of(verify: dict[int, float], head: float | None = None) -> AutoPolicy:
    """With a head whose passes all take as long."""
    costs = None if head is None else PassCosts({1: {1: head}})
    return AutoPolicy(PassCosts({1: verify, 8: verify}), costs, range(1, ROOM + 2))


def match_of(tokens: list[int], length: int = 6) -> Match:
    return Match(np.array(tokens, np.int32), length)


def chain(tokens: list[int], probability: float = 0.6) -> DraftTree:
    scores = np.log(probability) * np.arange(1, len(tokens) + 1)
    return DraftTree.chain(np.array(tokens, np.int32), EAGLE, scores.astype(np.float32))


def member_of(policy: AutoPolicy, room: int = ROOM, match: Match | None = None, slot: int = 0) -> Member:
    return Member(slot, policy.start(), match, room, has_head=True)


@st.composite
def chances(draw: st.DrawFn) -> np.ndarray:
    """Of one sequence's candidates, falling."""
    return -np.sort(-np.array(draw(st.lists(st.floats(0.001, 1.0), max_size=20))))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(chances(), min_size=1, max_size=4),
    st.integers(0, 4),
    st.integers(1, 12),
    st.lists(st.floats(1e-4, 0.1), min_size=4, max_size=4),
    st.floats(0, 0.1),
)
def test_the_rows_are_those_with_the_most_tokens_by_second(
    paths: list[np.ndarray], others: int, width: int, seconds: list[float], host: float
) -> None:
    policy = policy_of(dict(zip((1, 4, 9, 32), seconds, strict=True)))
    policy.host_seconds = host
    members = [member_of(policy, room=len(each), slot=slot) for slot, each in enumerate(paths)]
    batch = len(members) + others
    step = policy.begin(members, batch, 1, 1)

    def rate(rows: int) -> float:
        tokens = batch + sum(float(each[: rows - 1].sum()) for each in paths)
        return tokens / float(policy.pass_seconds(batch, rows)[-1])

    rows = step.choose_rows(paths, width)
    most = max(width, *(len(each) + 1 for each in paths))
    assert width <= rows <= most
    assert rate(rows) >= max(map(rate, range(width, most + 1))) * (1 - 1e-9)


def test_what_the_head_took_is_spent_whatever_is_verified() -> None:
    """A second token that is worth nothing alone is, once a pass is paid for."""
    policy = policy_of({1: 0.010, 2: 0.013, 3: 0.020, 32: 1.0}, head=0.001)
    paths = [np.array([0.5, 0.5])]
    member = member_of(policy, room=2)
    assert policy.begin([member], 1, 1, 1).choose_rows(paths, 1) == 2
    step = policy.begin([member], 1, 1, 1)
    step._spent = 0.03
    assert step.choose_rows(paths, 1) == 3


@given(st.lists(st.floats(0.001, 0.04), max_size=20), st.integers(1, 8))
def test_a_step_is_plain_where_everything_is_improbable(unlikely: list[float], batch: int) -> None:
    policy = policy_of({1: 0.0285, 2: 0.0316, 8: 0.0416, 32: 0.104})
    members = [member_of(policy, room=len(unlikely), slot=slot) for slot in range(batch)]
    step = policy.begin(members, batch, 1, 1)
    assert step.choose_rows([-np.sort(-np.array(unlikely))] * batch, 1) == 1


def test_the_head_is_wanted_where_it_is_cheap_and_never_where_it_is_dear() -> None:
    for seconds, wanted in ((CHEAP, True), (DEAR, False)):
        policy = policy_of(FLAT, seconds)
        member = member_of(policy)
        policy.begin([member], 1, 1, 1).choose_head(False)
        assert member.wants_head is wanted


@given(st.floats(1e-4, 0.1), st.floats(0, 0.99), st.integers(1, ROOM))
def test_the_head_is_wanted_only_where_it_may_gain_more_than_it_costs(seconds: float, rate: float, room: int) -> None:
    policy = policy_of(FLAT, seconds)
    member = member_of(policy, room)
    member.state.expected[:] = rate
    policy.begin([member], 1, 1, 1).choose_head(False)
    lengths = range(1, min(OPEN_TOKENS, room) + 1)
    best = max((1 + sum(rate**n for n in range(1, k + 1))) / (0.03 + k * seconds) for k in lengths)
    if member.wants_head:
        assert best > 1 / 0.03
    elif best > 1.02 / 0.03:
        # Not every length is tried.
        tried = [k for k in (1, 2, 3, 5, OPEN_TOKENS) if k in lengths]
        assert all((1 + sum(rate**n for n in range(1, k + 1))) / (0.03 + k * seconds) <= 1 / 0.03 for k in tried)


def test_a_head_that_runs_anyway_is_free() -> None:
    policy = policy_of(FLAT, DEAR)
    member = member_of(policy)
    policy.begin([member], 2, 1, 1).choose_head(True)
    assert member.wants_head


def test_a_sure_lookup_leaves_the_head_out() -> None:
    policy = policy_of(FLAT, 0.002)
    member = member_of(policy, match=match_of(list(range(ROOM)), 32))
    member.state.heat, member.state.ngram_bias = 1.0, LARGEST_BIAS
    policy.begin([member], 1, 1, 1).choose_head(False)
    assert not member.wants_head


@pytest.mark.parametrize("reason", ["room", "head", "no_head_at_all"])
def test_the_head_is_not_wanted_where_it_cannot_draft(reason: str) -> None:
    policy = policy_of(FLAT, None if reason == "no_head_at_all" else CHEAP)
    member = member_of(policy, room=0 if reason == "room" else ROOM)
    member.has_head, member.state.idle = reason != "head", 10 * PROBE_STEPS
    policy.begin([member], 1, 1, 1).choose_head(False)
    assert not member.wants_head


def test_the_head_is_tried_again_after_a_while() -> None:
    policy = policy_of(FLAT, DEAR)
    member = member_of(policy)
    for steps in range(2 * PROBE_STEPS):
        member.wants_head = False
        policy.begin([member], 1, 1, 1).choose_head(False)
        assert member.wants_head == (steps >= PROBE_STEPS)
        policy.learn(member, EMPTY, [1])
    policy.learn(member, chain([2]), [1])
    assert member.state.idle == 0


@pytest.mark.parametrize(("room", "most"), [(1, 1), (3, 3), (ROOM, OPEN_TOKENS)])
def test_a_chain_ends_where_there_is_no_room(room: int, most: int) -> None:
    policy = policy_of(FLAT, CHEAP)
    member = member_of(policy, room)
    step = policy.begin([member], 1, 1, 1)
    step.choose_head(False)
    length = 1
    while step.go_on([0], np.array([np.log(0.99)], np.float32)):
        length += 1
    assert length == most
    assert len(member.head_paths) == most


def test_a_chain_goes_on_as_long_as_the_next_token_is_worth_its_pass() -> None:
    found = []
    for seconds in (0.0005, 0.003, 0.012, 0.05):
        policy = policy_of(FLAT, seconds)
        member = member_of(policy)
        member.wants_head = True
        step, length = policy.begin([member], 1, 1, 1), 1
        while step.go_on([0], np.array([np.log(0.6)], np.float32)):
            length += 1
        found.append(length)
    assert found == sorted(found, reverse=True)
    assert found[0] >= 4
    assert found[-1] == 1


def test_an_unlikely_token_ends_a_chain() -> None:
    policy = policy_of(FLAT, 0.003)
    for probability, goes_on in ((0.9, True), (0.02, False)):
        member = member_of(policy)
        member.wants_head = True
        step = policy.begin([member], 1, 1, 1)
        assert step.go_on([0], np.array([np.log(probability)], np.float32)) is goes_on


def test_trees_of_others_that_are_wider_than_usual() -> None:
    policy = policy_of(RISING)
    member = member_of(policy, room=2)
    assert policy.begin([member], 2, 3, 1).choose_rows([np.array([0.9, 0.8])], 20) == 20


def test_a_lookups_luck_moves_with_it() -> None:
    policy = policy_of(FLAT, CHEAP)
    member = member_of(policy, match=match_of([1, 2, 3]))
    state = member.state
    for tokens, up in (([1, 2, 3, 4], True), ([1, 9], True), ([9], False)):
        policy.begin([member], 1, 1, 1)
        heat, bias, first = state.heat, state.ngram_bias, member.ngram_paths[0]
        policy.learn(member, EMPTY, tokens)
        assert (state.heat > heat) == up
        if len(tokens) != 2:
            assert (state.ngram_bias > bias) == up
            policy.begin([member], 1, 1, 1)
            assert (member.ngram_paths[0] > first) == up


def test_the_odds_of_all_lookups_follow_those_that_were_seen() -> None:
    policy = policy_of(FLAT, CHEAP)
    member, other = (member_of(policy, match=match_of([1, 2, 3], length)) for length in (5, 12))
    other.state = member.state
    policy.begin([other], 1, 1, 1)
    before = other.ngram_paths[0]
    for _ in range(8):
        policy.begin([member], 1, 1, 1)
        policy.learn(member, EMPTY, [9])
    member.state.heat = 0.5
    policy.begin([other], 1, 1, 1)
    assert other.ngram_paths[0] < before - 0.05


def test_what_is_expected_of_the_head_moves_as_far_as_is_known() -> None:
    policy = policy_of(FLAT, CHEAP)
    for tokens, right, wrong in (([1, 2, 9], [0, 1], [2]), ([9], [], [0]), ([1, 2], [0, 1], []), ([1], [0], [])):
        member = member_of(policy)
        member.state.expected[:] = policy.expected[:] = 0.5
        policy.learn(member, chain([1, 2, 3, 4]), tokens)
        for expected in (member.state.expected, policy.expected):
            moved = np.sign(expected[0] - 0.5).astype(int).tolist()
            assert moved == [1 if n in right else -1 if n in wrong else 0 for n in range(OPEN_TOKENS)]
            assert (expected[1] == 0.5).all()


def test_the_head_beside_a_lookup_is_judged_where_the_lookup_is_wrong() -> None:
    policy = policy_of(FLAT, CHEAP)
    for tokens, moves in (([1, 9], True), ([5, 9], False)):
        member = member_of(policy, match=match_of([5, 6]))
        before = member.state.expected.copy()
        policy.learn(member, chain([1, 2]), tokens)
        assert (member.state.expected[0] == before[0]).all()
        assert ((member.state.expected[1] != before[1]).any()) == moves


def test_a_branch_is_judged_where_its_parent_was_reached() -> None:
    """1 and 2 behind the root, 3 behind 1, 4 behind 2; the target goes 2, 4."""
    tree = DraftTree(
        np.array([1, 2, 3, 4], np.int32),
        np.array([0, 0, 1, 2], np.int32),
        np.full(4, EAGLE, np.int8),
        np.log(np.array([0.6, 0.25, 0.3, 0.2], np.float32)),
    )
    policy = policy_of(FLAT, CHEAP)
    seen: list[tuple[float, int, bool]] = []
    policy.head_rates.observe = lambda log_prob, depth, hit: seen.append(  # type: ignore[method-assign]
        (round(float(np.exp(log_prob)), 3), depth, hit)
    )
    policy.learn(member_of(policy), tree, [2, 4, 7])
    assert seen == [(0.6, 1, False), (0.25, 1, True), (0.8, 2, True)]


def test_what_is_expected_returns_to_the_sessions_average() -> None:
    policy = policy_of(FLAT, CHEAP)
    member = member_of(policy)
    member.state.expected[:] = 0.0
    for _ in range(300):
        policy.learn(member, EMPTY, [1])
    np.testing.assert_allclose(member.state.expected, policy.expected, atol=0.01)


def test_a_draft_counts_the_more_the_longer_ago_the_last_one_was() -> None:
    policy, found = policy_of(FLAT, CHEAP), []
    for idle in (0, 10, PROBE_STEPS):
        member = member_of(policy)
        member.state.expected[:], member.state.idle = 0.2, idle
        policy.learn(member, chain([1]), [1, 2])
        found.append(float(member.state.expected[0, 0]))
    assert found == sorted(found)
    assert found[0] < 0.35 < 0.6 < found[-1] < 1.0


def test_what_is_known_is_bounded() -> None:
    numbers, policy = np.random.default_rng(5), policy_of(FLAT, CHEAP)
    members = [member_of(policy, slot=slot) for slot in range(2)]
    sizes = [len(dataclasses.fields(AutoState)), policy.expected.shape, len(vars(policy))]
    for n in range(5_000):
        for member in members:
            lookup, right = numbers.integers(0, 3, 4).tolist(), numbers.integers(0, 3, 3).tolist()
            member.match = match_of(lookup, int(numbers.integers(1, 33))) if n % 3 else None
            policy.begin([member], 2, 1, 1)
            policy.learn(member, chain(numbers.integers(0, 3, 5).tolist()) if n % 2 else EMPTY, right)
        policy.clock(2, 3, float(numbers.exponential(0.03)), float(numbers.exponential(0.01)))
        policy.clock_head(2, 2, 3, float(numbers.exponential(0.003)))
    assert sizes == [len(vars(members[0].state)), policy.expected.shape, len(vars(policy))]
    for member in members:
        assert 0 < member.state.heat < 1
        assert abs(member.state.ngram_bias) <= LARGEST_BIAS
        assert ((member.state.expected > 0) & (member.state.expected < 1)).all()
    assert 0 < policy.host_seconds < 0.05
    assert np.isfinite(policy.pass_seconds(2, ROOM)).all()
    assert np.isfinite(policy.head_seconds(2, 2, OPEN_TOKENS)).all()


def test_a_pass_as_wide_as_they_get_does_not_count_for_the_heads_time() -> None:
    """More passes may have come before it."""
    policy = policy_of(FLAT, 0.002)
    for width, moves in ((HEAD_WIDTH, False), (2, True)):
        before = policy.head_seconds(1, 1, 1)
        policy.clock_head(1, width, 1, 0.02)
        assert (policy.head_seconds(1, 1, 1) > before).all() == moves


def test_steps_are_counted_by_their_drafters() -> None:
    state = policy_of(FLAT).start()
    lookup = DraftTree.chain(np.array([1], np.int32), NGRAM)
    both = DraftTree.chain(np.array([1], np.int32), NGRAM | EAGLE)
    for tree in (EMPTY, lookup, lookup, chain([1]), both):
        state.count(tree)
    shown = state.to_json()
    assert [shown[f"{name}_steps"] for name in ("plain", "ngram", "eagle", "both")] == [1, 2, 1, 1]
    assert shown["ngram_luck"] == 0.5
    assert len(shown["eagle_expected"]) == 4


RIGHT, LOOKUPS, HEAD, NEITHER = Phase(0.95, 0.8), Phase(0.95, 0.2), Phase(0.1, 0.8), Phase(0.1, 0.2)
NOTHING = Phase(0.02, 0.02)
TEXTS = [(RIGHT, NEITHER, LOOKUPS, HEAD), (HEAD, LOOKUPS, NEITHER, RIGHT), (NEITHER, HEAD, NOTHING, LOOKUPS)]


@pytest.mark.parametrize("phases", TEXTS, ids=str)
def test_a_text_that_changes_takes_little_longer_than_with_the_best_choice_of_each_phase(
    phases: tuple[Phase, ...],
) -> None:
    worlds = [World(seed) for seed in range(3)]
    for phase in phases:
        right = best_fixed(worlds[0], phase)
        runs = [world.run(phase, 300) for world in worlds]
        assert speed(step for run in runs for step in run) > 0.9 * right
        assert speed(step for run in runs for step in run[40:]) > 0.92 * right


@pytest.mark.parametrize("batch", [1, 8])
def test_where_nothing_is_right_it_is_as_fast_as_plain_decoding(batch: int) -> None:
    world = World(3, batch)
    start, later = world.run(NOTHING, 200), world.run(NOTHING, 300)
    assert speed(start) > 0.93 * plain_speed(world)
    assert speed(later) > 0.97 * plain_speed(world)


@pytest.mark.parametrize("phase", [NOTHING, NEITHER, HEAD], ids=str)
def test_where_every_row_takes_its_time_it_is_as_fast_as_plain_decoding(phase: Phase) -> None:
    world = World(4, 8, additive)
    assert speed(world.run(phase, 200)) > 0.97 * plain_speed(world)
