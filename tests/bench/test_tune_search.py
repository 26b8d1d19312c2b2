"""The search of `trtspec tune` with simulated speeds: what it finds, what it leaves alone, and what it spends."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.bench.tune import Budget, Outcome, Search, fill_groups, spread_order
from trtspec.bench.tune_race import Measured, Race, Runner
from trtspec.bench.tune_space import Space
from trtspec.config import SpeculationConfig

SPACE = Space(("none", "ngram", "eagle", "ngram-eagle"), 32)
START = SpeculationConfig(method="ngram-eagle")
GROUPS, TOKENS, PLENTY = 8, 100, 1e9
Speed = Callable[[SpeculationConfig], float]


class World:
    """A machine whose only clock is the work it does."""

    def __init__(self, speed: Speed, *, noise: float = 0.0, seed: int = 0, drift: float = 0.0) -> None:
        """
        Args:
            speed: tokens per second.
            noise: standard deviation of the logarithm of a measurement.
            drift: by how much the logarithm of all speeds swings up and down.
        """
        self.now = 0.0
        self.calls: list[tuple[SpeculationConfig, int]] = []
        self._speed = speed
        self._noise = noise
        self._random = random.Random(seed)
        self._drift = drift

    def measure(self, tried: SpeculationConfig, group: int) -> Measured:
        """Some prompts are five times as fast as others."""
        self.calls.append((tried, group))
        log = self._drift * math.sin(self.now / 97) + self._noise * self._random.gauss(0, 1)
        seconds = TOKENS / (self._speed(tried) * (1 + group % 5) * math.exp(log))
        self.now += seconds
        return Measured(TOKENS, seconds)

    def search(self, seconds: float = PLENTY, start: SpeculationConfig = START, groups: int = GROUPS) -> Outcome:
        """A search in this world."""
        return Search(SPACE, self.measure, groups, Budget(seconds, lambda: self.now)).run(start)


def by_method(**speeds: float) -> Speed:
    """Speeds by method and merge, `ngram_eagle_union` for ngram-eagle:union; 40 for all others."""

    def speed(tried: SpeculationConfig) -> float:
        name = f"ngram_eagle_{tried.merge}" if tried.method == "ngram-eagle" else str(tried.method)
        return speeds.get(name, 40.0)

    return speed


def near(value: int, best: int) -> float:
    """Falls by a tenth with each doubling away from the best."""
    return 0.9 ** abs(math.log2(value / best))


def test_the_fastest_method_is_found() -> None:
    for method, merge in (("none", "auto"), ("ngram", "auto"), ("eagle", "auto"), ("ngram-eagle", "union")):
        name = f"ngram_eagle_{merge}" if method == "ngram-eagle" else method
        outcome = World(by_method(**{name: 60.0}), noise=0.02).search()
        assert (outcome.best.method, outcome.best.merge) == (method, merge)
        assert outcome.gain is not None
        assert outcome.gain.factor == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize(
    ("method", "optimum"),
    [
        ("ngram", {"ngram_tokens": 24, "ngram_min": 4, "ngram_max": 12, "ngram_branches": 3}),
        ("ngram", {"ngram_tokens": 3, "ngram_min": 1, "ngram_max": 3, "ngram_branches": 1}),
        ("eagle", {"eagle_tokens": 7}),
        ("eagle", {"eagle_tokens": 1}),
    ],
)
def test_the_fastest_sizes_are_found(method: str, optimum: dict[str, int], noise: float) -> None:
    def speed(tried: SpeculationConfig) -> float:
        if tried.method != method or tried.eagle_topk > 1:
            return 20.0
        return 50.0 * math.prod(near(getattr(tried, name), best) for name, best in optimum.items())

    outcome = World(speed, noise=noise).search()
    assert {name: getattr(outcome.best, name) for name in optimum} == optimum
    assert outcome.best.method == method
    assert outcome.in_time


def test_a_tree_is_found_and_its_shape_refined() -> None:
    def speed(tried: SpeculationConfig) -> float:
        if tried.method != "eagle" or tried.eagle_topk == 1:
            return 30.0
        return 60.0 * near(tried.eagle_topk, 8) * near(tried.eagle_depth, 6) * near(tried.tree_nodes, 10)

    best = World(speed).search(start=SpeculationConfig(method="eagle")).best
    assert (best.method, best.eagle_topk, best.eagle_depth, best.tree_nodes) == ("eagle", 8, 6, 10)


def test_a_second_sweep_finds_what_became_better_by_the_first() -> None:
    """Longer drafts pay with longer matches only, and these are tried after drafts."""

    def speed(tried: SpeculationConfig) -> float:
        if tried.method != "ngram":
            return 10.0
        best = 16 if tried.ngram_min > 2 else 10
        return 40.0 * near(tried.ngram_tokens, best) * near(tried.ngram_min, 4)

    best = World(speed).search(start=SpeculationConfig(method="ngram")).best
    assert (best.ngram_min, best.ngram_tokens) == (4, 16)


def test_equal_speeds_change_nothing() -> None:
    outcome = World(lambda _: 40.0).search()
    assert outcome.best == outcome.start == START
    assert (outcome.confirmation, outcome.gain, outcome.in_time) == (None, None, True)
    assert outcome.noise == pytest.approx(0.01, abs=0.01)
    assert {each.verdict for each in outcome.tried} == {"within the noise"}


def test_noise_alone_is_rarely_confirmed() -> None:
    found = [World(lambda _: 40.0, noise=0.08, seed=seed).search().gain is not None for seed in range(80)]
    assert sum(found) <= 8


def test_what_is_slower_is_never_confirmed() -> None:
    """The start is the best by 5 %: noise of 8 % may lead astray, but not past the last run."""

    def speed(tried: SpeculationConfig) -> float:
        return 40.0 if SPACE.key(tried) == SPACE.key(START) else 38.0

    found = [World(speed, noise=0.08, seed=seed).search().gain is not None for seed in range(40)]
    assert sum(found) <= 1


def test_drift_of_the_machine_misleads_nobody() -> None:
    outcome = World(by_method(ngram=46.0), drift=0.7).search()
    assert outcome.best.method == "ngram"
    assert outcome.gain is not None


def test_early_stopping_saves_most_of_the_work() -> None:
    groups = 40
    world = World(by_method(ngram=80.0, none=20.0, eagle=30.0), noise=0.03)
    outcome = world.search(groups=groups)
    assert outcome.best.method == "ngram"
    by_method_step = [each for each in outcome.tried if each.step == "method"]
    assert {each.verdict for each in by_method_step if each.settings.method != "ngram"} == {"slower, dropped"}
    assert max(each.groups for each in by_method_step if each.settings.method != "ngram") < 8
    assert next(each for each in by_method_step if each.settings.method == "ngram").groups < 8
    assert len([call for call in world.calls[:60] if call[0].method == "none"]) < 5


def test_dropped_settings_run_no_further() -> None:
    race = Race(START, [replace(START, method="none"), replace(START, method="ngram")])
    world = World(by_method(none=10.0, ngram=40.0))
    assert race.run(world.measure, range(12), lambda _: True, to_the_end=False)
    slow, equal = race.others
    assert (slow.dropped, equal.dropped) == (True, False)
    assert len(slow.logs) == 2
    assert len(equal.logs) == len(race.incumbent.logs) == 12
    assert race.winner() is None


def test_confirmation_runs_all_groups_and_settings_take_turns() -> None:
    world = World(by_method(ngram=80.0))
    outcome = world.search()
    assert outcome.confirmation is not None
    assert outcome.confirmation.groups == GROUPS
    last = world.calls[-2 * GROUPS :]
    assert {group for _, group in last} == set(range(GROUPS))
    assert all(last[at][1] == last[at + 1][1] for at in range(0, 2 * GROUPS, 2))
    firsts = [last[at][0] == START for at in range(0, 2 * GROUPS, 2)]
    assert firsts == [True, False] * (GROUPS // 2)


def test_nothing_is_tried_twice() -> None:
    outcome = World(by_method(ngram=80.0, eagle=70.0), noise=0.03, seed=5).search()
    keys = [SPACE.key(each.settings) for each in outcome.tried]
    assert len(set(keys)) == len(keys)
    assert SPACE.key(START) not in keys


def test_the_same_world_gives_the_same_search() -> None:
    worlds = [World(by_method(ngram=50.0), noise=0.05, seed=3) for _ in range(2)]
    first, second = (world.search() for world in worlds)
    assert first == second
    assert worlds[0].calls == worlds[1].calls


def test_ratios_are_to_the_settings_at_the_start() -> None:
    def speed(tried: SpeculationConfig) -> float:
        return 80.0 * near(tried.ngram_tokens, 24) if tried.method == "ngram" else 40.0

    outcome = World(speed).search()
    for each in outcome.tried:
        assert each.ratio is not None
        assert math.exp(each.ratio.mean) == pytest.approx(speed(each.settings) / speed(START))
        assert each.ratio.spread > 0


@given(
    seconds=st.floats(1.0, 3000.0),
    fast=st.sampled_from(["none", "ngram", "eagle", "ngram_eagle_union"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_the_time_is_kept(seconds: float, fast: str, seed: int) -> None:
    world = World(by_method(**{fast: 55.0}), noise=0.05, seed=seed)
    outcome = world.search(seconds)
    # Nothing is known before the first group is through with all methods, and groups differ by up to five times.
    first_group = 7 * TOKENS / 40
    assert world.now <= max(1.1 * seconds, 1.5 * first_group)
    assert outcome.seconds == world.now
    if not outcome.in_time and outcome.confirmation is None:
        assert outcome.best == START


def test_no_time_at_all() -> None:
    outcome = World(by_method(ngram=80.0)).search(0.001)
    assert (outcome.best, outcome.in_time, outcome.noise) == (START, False, None)
    assert {each.verdict for each in outcome.tried} == {"too little time"}


def test_more_time_tries_more() -> None:
    counts = [len(World(by_method(ngram=50.0), noise=0.02).search(seconds).tried) for seconds in (60, 200, 5000)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_spread_of_a_ratio() -> None:
    slow, fast = Runner(START), Runner(START)
    for base, factor in ((10.0, 1.1), (50.0, 1.2), (20.0, 1.15)):
        slow.add(Measured(int(10 * base), 10.0))
        fast.add(Measured(round(10 * base * factor), 10.0))
    ratio = fast.over(slow)
    logs = [math.log(factor) for factor in (1.1, 1.2, 1.15)]
    mean = sum(logs) / 3
    variance = sum((log - mean) ** 2 for log in logs) / 2 / 3
    assert (ratio.mean, ratio.variance, ratio.groups) == (pytest.approx(mean), pytest.approx(variance), 3)
    # Student's t with two degrees of freedom: 2.92 and 1.89.
    assert ratio.spread == pytest.approx(2.92 * math.sqrt(variance))
    assert ratio.likely_spread == pytest.approx(1.89 * math.sqrt(variance))
    assert ratio.factor == pytest.approx(math.exp(mean))
    assert ratio.interval == pytest.approx((math.exp(mean - ratio.spread), math.exp(mean + ratio.spread)))


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64])
def test_spread_order(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    if count >= 10:
        assert {4 * at // count for at in order[:5]} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("count", "batch", "groups"),
    [
        (3, 1, [[0], [1], [2]]),
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1], [2, 3], [4, 0]]),
        (2, 5, [[0, 1, 0, 1, 0]]),
    ],
)
def test_groups_are_all_full(count: int, batch: int, groups: list[list[int]]) -> None:
    assert fill_groups(count, batch) == groups
