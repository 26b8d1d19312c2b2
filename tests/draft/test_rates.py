"""Acceptance rates that learn: bounds, convergence, forgetting, classes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.draft.ngram import LONGEST_MATCH
from trtspec.draft.rates import (
    DEPTHS,
    HEAD_DEPTHS,
    HEAD_LOG_PROBS,
    HEATS,
    LENGTHS,
    MEMORY,
    HeadRates,
    NgramRates,
    RateTable,
)

lengths, heats = st.integers(1, LONGEST_MATCH), st.floats(0, 1)
biases = st.floats(-4, 4)


def feed(table: RateTable, hits: Iterable[bool]) -> None:
    for hit in hits:
        table.observe((0,), hit)


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=300))
def test_rates_stay_within_0_and_1(prior: float, hits: list[bool]) -> None:
    table = RateTable(np.array([prior, 0.5]))
    feed(table, hits)
    assert 0 < table.rates[0] < 1
    assert table.rates[1] == 0.5


@pytest.mark.parametrize("hit", [False, True])
def test_rates_stay_within_0_and_1_however_long_a_run_is(hit: bool) -> None:
    table = RateTable(np.array([0.5]))
    feed(table, [hit] * 200_000)
    assert 0 < table.rates[0] < 1
    feed(table, [not hit] * 20)
    assert 0.05 < table.rates[0] < 0.95


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.7, 0.98])
@pytest.mark.parametrize("prior", [0.05, 0.95])
def test_a_rate_becomes_that_of_a_stream(prior: float, rate: float) -> None:
    chooser, table, seen = random.Random(7), RateTable(np.array([prior])), []
    for _ in range(3000):
        feed(table, [chooser.random() < rate])
        seen.append(float(table.rates[0]))
    # MEMORY observations leave a standard error.
    error = math.sqrt(rate * (1 - rate) / MEMORY)
    assert abs(float(np.mean(seen[1000:])) - rate) < error
    assert max(abs(each - rate) for each in seen[1000:]) < 5 * error


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 5000))
def test_a_rate_follows_a_change_however_old_it_is(before: int, seed: int) -> None:
    """After MEMORY observations of another rate, at most 1 / e of the old one is left."""
    table, chooser = RateTable(np.array([0.5])), random.Random(seed)
    feed(table, [chooser.random() < 0.9 for _ in range(before)])
    feed(table, [False] * int(MEMORY))
    assert table.rates[0] < 0.95 * math.exp(-1)


@given(lengths, heats, st.integers(0, 400), biases)
def test_a_paths_chances_fall_with_depth(length: int, heat: float, size: int, bias: float) -> None:
    rates = NgramRates()
    for hits in ([True, True, False], [True] * 40, [False]):
        rates.observe(length, heat, hits)
    paths = rates.path_rates(length, heat, size, bias)
    assert paths.shape == (size,)
    assert (paths > 0).all()
    assert (np.diff(paths, prepend=1.0) < 0).all()


@given(lengths, heats, biases, biases)
def test_a_bias_shifts_the_odds(length: int, heat: float, low: float, high: float) -> None:
    rates = NgramRates()
    low, high = sorted((low, high))
    assert (rates.path_rates(length, heat, 8, low) <= rates.path_rates(length, heat, 8, high) + 1e-12).all()
    [plain], [shifted] = rates.path_rates(length, heat, 1), rates.path_rates(length, heat, 1, low)
    assert math.log(shifted / (1 - shifted)) == pytest.approx(math.log(plain / (1 - plain)) + low)


def test_chances_stay_above_nothing_after_any_history() -> None:
    rates = NgramRates()
    for _ in range(3000):
        rates.observe(4, 0.5, [True] * 31 + [False])
        rates.observe(4, 0.5, [False])
        rates.observe(4, 0.5, [True, False])
    paths = rates.path_rates(4, 0.5, 64, -3.0)
    assert (paths > 0).all()
    assert np.isfinite(paths[1:] / paths[:-1]).all()


def test_classes_of_lengths_and_heats_begin_at_their_lower_ends() -> None:
    for low in LENGTHS.tolist():
        rates = NgramRates()
        before, inside = rates.path_rates(low - 1, 0.5, 1), rates.path_rates(low, 0.5, 1)
        rates.observe(low, 0.5, [False])
        assert rates.path_rates(low, 0.5, 1) < inside
        assert rates.path_rates(low - 1, 0.5, 1) == before
    for heat in HEATS:
        rates = NgramRates()
        below = rates.path_rates(5, heat - 1e-9, 1)
        rates.observe(5, heat, [False])
        assert rates.path_rates(5, heat - 1e-9, 1) == below


def test_classes_of_depths_begin_at_their_lower_ends() -> None:
    starts = [1, *DEPTHS.tolist()]
    for low, high in zip(starts, [*starts[1:], 30], strict=True):
        rates = NgramRates()
        before = np.diff(np.log(rates.path_rates(5, 0.5, 40)), prepend=0.0)
        for _ in range(50):
            rates.observe(5, 0.5, [True] * (low - 1) + [False])
        after = np.diff(np.log(rates.path_rates(5, 0.5, 40)), prepend=0.0)
        fell = np.flatnonzero(after < before - 0.2) + 1
        assert fell[0] == low
        assert fell[-1] >= high - 1


def test_priors_rise_with_length_heat_and_depth() -> None:
    rates = NgramRates()
    firsts = np.array([[float(rates.path_rates(n, heat, 1)[0]) for heat in (0.1, 0.5, 0.9)] for n in range(1, 33)])
    assert (np.diff(firsts, axis=0) >= 0).all()
    assert (np.diff(firsts, axis=1) >= 0).all()


@given(st.floats(-50, 0.001), st.integers(1, 20))
def test_a_heads_rate_is_a_chance(log_prob: float, depth: int) -> None:
    [rate] = HeadRates().rates(np.array([log_prob]), np.array([depth]))
    assert 0 < rate < 1


def test_a_heads_classes_begin_at_their_lower_ends() -> None:
    for low in HEAD_LOG_PROBS.tolist():
        rates, both = HeadRates(), np.array([low - 1e-9, low])
        before = rates.rates(both, np.array([1, 1]))
        rates.observe(low, 1, False)
        after = rates.rates(both, np.array([1, 1]))
        assert after[0] == before[0]
        assert after[1] < before[1]
    rates = HeadRates()
    for depth in range(HEAD_DEPTHS, HEAD_DEPTHS + 4):
        [before] = rates.rates(np.array([-0.3]), np.array([HEAD_DEPTHS]))
        rates.observe(-0.3, depth, False)
        assert rates.rates(np.array([-0.3]), np.array([HEAD_DEPTHS]))[0] < before
    assert rates.rates(np.array([-0.3]), np.array([HEAD_DEPTHS - 1]))[0] > before


def test_a_head_that_is_too_sure_is_calibrated() -> None:
    """Its tokens are right half as often as it says."""
    rates, numbers = HeadRates(), np.random.default_rng(3)
    for probability in numbers.uniform(0.05, 1.0, 20_000).tolist():
        rates.observe(math.log(probability), 1, bool(numbers.random() < probability / 2))
    for probability in (0.15, 0.28, 0.42, 0.58, 0.72, 0.85, 0.95):
        [rate] = rates.rates(np.array([math.log(probability)]), np.array([1]))
        assert rate == pytest.approx(probability / 2, abs=0.12)
