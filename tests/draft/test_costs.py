"""Pass times: interpolation, what is stored, and how they follow what is observed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trtspec.draft.costs import FOLLOW_ALL, FOLLOW_ONE, LARGEST_DEVIATION, WIDTHS, PassCosts, grid_widths

Grid = dict[int, dict[int, float]]
GRID: Grid = {1: {1: 1.0, 4: 2.0, 8: 4.0}, 4: {1: 2.0, 4: 5.0, 8: 11.0}}


@st.composite
def grids(draw: st.DrawFn, rising: bool = False) -> Grid:
    """Seconds by batch and width; with `rising`, larger passes take no less."""
    batches = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True))
    widths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=6, unique=True))
    size = (len(batches), len(widths))
    flat = draw(st.lists(st.floats(1e-5, 2.0), min_size=size[0] * size[1], max_size=size[0] * size[1]))
    seconds = np.array(flat).reshape(size)
    if rising:
        seconds = seconds.cumsum(axis=0).cumsum(axis=1)
    columns = range(size[1])
    return {
        batch: {width: float(seconds[b, w]) for w, width in zip(columns, sorted(widths), strict=True)}
        for b, batch in enumerate(sorted(batches))
    }


def at(costs: PassCosts, batch: int, width: int) -> float:
    return float(costs.seconds(batch, np.array([width]))[0])


@given(grids())
def test_measured_passes_take_what_was_measured(grid: Grid) -> None:
    costs = PassCosts(grid)
    for batch, row in grid.items():
        np.testing.assert_allclose(costs.seconds(batch, np.array([*row])), [*row.values()], rtol=1e-9)


def test_between_and_beyond() -> None:
    costs = PassCosts(GRID)
    np.testing.assert_allclose(costs.seconds(1, np.array([2, 6, 10])), [4 / 3, 3.0, 5.0])
    assert at(costs, 2, 4) == pytest.approx(3.0)
    assert at(costs, 8, 4) == pytest.approx(10.0)


@given(grids(), st.integers(1, 100), st.integers(1, 200))
def test_estimates_are_positive_and_lie_between_their_neighbours(grid: Grid, batch: int, width: int) -> None:
    costs, seconds = PassCosts(grid), [second for row in grid.values() for second in row.values()]
    found = at(costs, batch, width)
    assert np.isfinite(found)
    assert found >= min(seconds) * (1 - 1e-9)
    if batch <= max(grid) and width <= max(next(iter(grid.values()))):
        assert found <= max(seconds) * (1 + 1e-9)


@given(grids(rising=True), st.integers(1, 100), st.integers(1, 200), st.integers(0, 30), st.integers(0, 60))
def test_larger_passes_take_no_less_where_the_grid_says_so(
    grid: Grid, batch: int, width: int, more: int, wider: int
) -> None:
    costs = PassCosts(grid)
    assert at(costs, batch + more, width + wider) >= at(costs, batch, width) * (1 - 1e-9)


@given(grids(), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 70), st.floats(1e-5, 2.0)), max_size=5))
def test_what_is_stored_comes_back(grid: Grid, observed: list[tuple[int, int, float]]) -> None:
    costs = PassCosts(grid)
    for each in observed:
        costs.observe(*each)
    again = PassCosts.from_json(json.loads(json.dumps(costs.to_json())))
    for batch in (1, 2, 7, 50):
        widths = np.arange(1, 80)
        np.testing.assert_allclose(again.seconds(batch, widths), costs.seconds(batch, widths), rtol=1e-9)


keys = st.one_of(st.sampled_from(["1", "2", "-1", "0", "1e3", "9" * 30, "9" * 5000, "", "width"]), st.text(max_size=3))
numbers = st.one_of(
    st.floats(), st.integers(), st.sampled_from([0.001, 10**400, -1, 5e-324]), st.text(max_size=4), st.none()
)
tables = st.dictionaries(keys, st.one_of(numbers, st.lists(numbers), st.dictionaries(keys, numbers, max_size=3)))


@settings(max_examples=400)
@given(st.one_of(tables, numbers, st.lists(tables)))
def test_nonsense_is_a_value_error(data: Any) -> None:
    try:
        costs = PassCosts.from_json(data)
    except ValueError:
        return
    seconds = costs.seconds(3, np.arange(1, 100))
    assert (seconds > 0).all()
    assert np.isfinite(seconds).all()


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"1": {}},
        {"1": {"1": 0.0}},
        {"1": {"1": -1.0}},
        {"1": {"1": float("nan")}},
        {"1": {"1": float("inf")}},
        {"1": {"1": 10**400}},
        {"1": {"0": 1.0}},
        {"0": {"1": 1.0}},
        {"1": {"1": None}},
        {"1": {"1": 0.1}, "2": {"2": 0.1}},
        {"one": {"1": 0.1}},
        {"1": 0.1},
        {"1": {str(10**30): 0.1}},
    ],
    ids=str,
)
def test_what_is_no_table(data: Any) -> None:
    with pytest.raises(ValueError):
        PassCosts.from_json(data)


@pytest.mark.parametrize("grid", [{}, {1: {}}], ids=str)
def test_a_grid_needs_a_pass(grid: Grid) -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        PassCosts(grid)


@given(grids(), st.integers(1, 40), st.integers(1, 70), st.floats(1e-6, 10.0))
def test_an_estimate_moves_towards_what_is_observed(grid: Grid, batch: int, width: int, seconds: float) -> None:
    costs = PassCosts(grid)
    before = at(costs, batch, width)
    assume(abs(np.log(seconds / before)) > 0.01)
    costs.observe(batch, width, seconds)
    after = at(costs, batch, width)
    assert abs(np.log(after / seconds)) < abs(np.log(before / seconds))
    assert (after > before) == (seconds > before)


def test_estimates_become_what_is_observed() -> None:
    costs, noise = PassCosts(GRID), np.random.default_rng(1)
    for _ in range(300):
        for width, seconds in ((1, 3.0), (4, 3.3), (8, 3.9)):
            costs.observe(1, width, seconds * float(np.exp(0.05 * noise.standard_normal())))
    np.testing.assert_allclose(costs.seconds(1, np.array([1, 4, 8])), [3.0, 3.3, 3.9], rtol=0.1)


@given(grids(), st.sampled_from([1e-9, 1e9]))
def test_one_outlier_moves_little(grid: Grid, factor: float) -> None:
    costs, widths = PassCosts(grid), np.arange(1, 1 + max(next(iter(grid.values()))))
    before = costs.seconds(1, widths)
    costs.observe(1, 3, at(costs, 1, 3) * factor)
    moved = np.abs(np.log(costs.seconds(1, widths) / before))
    assert (moved <= (FOLLOW_ALL + FOLLOW_ONE) * LARGEST_DEVIATION + 1e-9).all()


def test_a_drift_of_the_machine_moves_passes_that_never_run() -> None:
    costs, widths = PassCosts(GRID), np.array([1, 4, 8])
    right = {batch: 2 * costs.seconds(batch, widths) for batch in (1, 4)}
    for _ in range(100):
        costs.observe(1, 1, 2.0)
    np.testing.assert_allclose(costs.seconds(1, np.array([1])), 2.0, rtol=0.01)
    for batch in (1, 4):
        # All but the share that counts as the observed width's own.
        np.testing.assert_allclose(costs.seconds(batch, widths), right[batch], rtol=0.2)
    assert at(costs, 4, 8) > 1.6 * GRID[4][8]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_says_nothing(seconds: float) -> None:
    costs = PassCosts(GRID)
    for _ in range(3):
        costs.observe(1, 4, seconds)
        costs.follow(1.0, seconds)
    assert at(costs, 1, 4) == pytest.approx(2.0)


def test_estimates_stay_finite_however_long_a_clock_is_wrong() -> None:
    costs = PassCosts(GRID)
    for n in range(20_000):
        costs.observe(1, 4, 1e-12 if n < 10_000 else 1e6)
    assert 0 < at(costs, 1, 4) < float("inf")


@given(st.integers(1, 200))
def test_widths_of_a_grid(limit: int) -> None:
    widths = grid_widths(limit)
    assert list(widths) == sorted(set(widths))
    assert widths[0] == 1
    assert widths[-1] == limit
    assert set(widths) - {limit} == {width for width in WIDTHS if width < limit}
