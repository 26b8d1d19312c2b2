"""The search of `trtspec tune`: steps that each change one thing, and a last run that confirms what they led to.

Nothing here knows how speeds are measured or what time it is: both are handed in.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

from trtspec.bench.tune_race import LEAST_TO_DROP, SAME, Measure, Measured, Race, Ratio, Runner
from trtspec.bench.tune_space import Space
from trtspec.config import SpeculationConfig

SWEEPS = 3
"""Times that all steps are gone through at most; after one without a change there is no other."""
RESERVE_FACTOR = 1.1
"""What is kept for the last run, by what it is expected to take."""
LEAST_GROUPS = 3
"""Groups of prompts without which noise can't be told from gains."""
_GOLDEN = (math.sqrt(5) - 1) / 2

TAKEN, DROPPED, SLOWER, NOISE = "taken", "slower, dropped", "slower", "within the noise"
FASTER, UNJUDGED, CONFIRMED = "faster, another one more so", "too little time", "faster, confirmed"


@dataclass(frozen=True)
class Tried:
    """One comparison of some settings, its speeds by those of the settings at the start."""

    step: str
    settings: SpeculationConfig
    ratio: Ratio | None
    """To the settings at the start: measured beside those in force, and by what these are known to be. None: seen too
    little."""
    tokens_per_second: float | None
    groups: int
    verdict: str


@dataclass
class Outcome:
    """What a search found."""

    start: SpeculationConfig
    best: SpeculationConfig
    """What the steps led to; perhaps the start."""
    tried: list[Tried]
    confirmation: Tried | None
    """`best` beside the start on all groups; None where they are the same."""
    in_time: bool
    """Whether all steps were gone through."""
    seconds: float

    @property
    def gain(self) -> Ratio | None:
        """Of `best` over the start, where it is faster by more than the noise."""
        last = self.confirmation
        return last.ratio if last is not None and last.verdict == CONFIRMED else None

    @property
    def noise(self) -> float | None:
        """Share of the speed by which settings must be faster to be told from the start's; None: nothing was compared.

        Of the last run where there was one, else what was usual in the steps.
        """
        if self.confirmation is not None and self.confirmation.ratio is not None:
            return math.expm1(self.confirmation.ratio.spread)
        ratios = [(each.groups, each.ratio.spread) for each in self.tried if each.ratio is not None]
        if not ratios:
            return None
        most = max(groups for groups, _ in ratios)
        return math.expm1(statistics.median(spread for groups, spread in ratios if groups == most))


@dataclass
class Budget:
    """The time of a search, and what calls have taken of it."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    calls: int = 0
    in_calls: float = 0.0
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.clock()

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return self.clock() - self.begun

    def allows(self, calls: int, reserve: float) -> bool:
        """Whether so many calls can be expected to leave the reserve, in seconds."""
        usual = self.in_calls / self.calls if self.calls else 0.0
        return self.spent + calls * usual + reserve <= self.seconds

    def count(self, seconds: float) -> None:
        """Take in what a call took."""
        self.calls += 1
        self.in_calls += seconds


class Search:
    """Looks for the fastest settings."""

    def __init__(
        self,
        space: Space,
        measure: Measure,
        groups: int,
        budget: Budget,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """
        Args:
            groups: groups of prompts that `measure` knows, at least LEAST_GROUPS.
            progress: called with the step and the share of the time that is spent.
        """
        self._space = space
        self._measure = measure
        self._order = spread_order(groups)
        self._budget = budget
        self._progress = progress
        self._tried: list[Tried] = []
        self._first_seconds: dict[int, float] = {}
        """What the first call on a group took beyond what it measured: plain decoding's tokens are found there."""
        self._seconds: dict[SpeculationConfig, list[float]] = {}
        """What the settings took for each group that they completed."""

    def run(self, start: SpeculationConfig) -> Outcome:
        """Search from some settings, and confirm what was found."""
        best, in_time = self._search(start)
        confirmation = None if best == start else self._confirm(start, best)
        return Outcome(start, best, self._tried, confirmation, in_time, self._budget.spent)

    def _search(self, start: SpeculationConfig) -> tuple[SpeculationConfig, bool]:
        """The steps; returns where they led, and whether all of them were gone through."""
        incumbent, standing = start, SAME
        seen = {self._space.key(start)}
        for _ in range(SWEEPS):
            before, done = incumbent, set[str]()
            # What steps there are depends on what the ones before led to.
            while step := next((name for name in self._space.steps(incumbent) if name not in done), None):
                done.add(step)
                found = self._space.alternatives(step, incumbent)
                others = [each for each in found if self._space.key(each) not in seen]
                if not others:
                    continue
                seen.update(map(self._space.key, others))
                race = Race(incumbent, others)
                may_go_on = partial(self._may_go_on, start, incumbent)
                ended = race.run(self._timed(step), self._order, may_go_on, to_the_end=False)
                winner = race.winner()
                self._tried += [_tried(step, race, runner, standing, winner) for runner in race.others]
                if winner is not None:
                    incumbent, standing = winner.settings, winner.over(race.incumbent).times(standing)
                if not ended:
                    return incumbent, False
            if incumbent == before:
                break
        return incumbent, True

    def _confirm(self, start: SpeculationConfig, best: SpeculationConfig) -> Tried:
        """Both once more on all groups: what won several times by luck alone doesn't win here."""
        race = Race(start, [best])
        race.run(self._timed("confirmation"), self._order, lambda _: True, to_the_end=True)
        [runner] = race.others
        ratio = runner.over(race.incumbent)
        verdict = CONFIRMED if ratio.mean > ratio.spread else SLOWER if ratio.mean < -ratio.spread else NOISE
        speed = runner.tokens / runner.seconds
        return Tried("confirmation", best, ratio, speed, ratio.groups, verdict)

    def _may_go_on(self, start: SpeculationConfig, incumbent: SpeculationConfig, calls: int) -> bool:
        """Whether so many calls leave enough time for the last run, which what is faster than these may need."""
        groups = len(self._order)
        taken = [self._seconds[each] for each in (start, incumbent) if each in self._seconds]
        reserve = groups * sum(map(statistics.fmean, taken))
        if self._first_seconds:
            reserve += (groups - len(self._first_seconds)) * statistics.fmean(self._first_seconds.values())
        return self._budget.allows(calls, RESERVE_FACTOR * reserve)

    def _timed(self, step: str) -> Measure:
        """The measurement, its calls counted."""

        def measure(settings: SpeculationConfig, group: int) -> Measured:
            if self._progress:
                self._progress(step, min(self._budget.spent / self._budget.seconds, 1.0))
            before = self._budget.spent
            measured = self._measure(settings, group)
            spent = self._budget.spent - before
            self._budget.count(spent)
            self._first_seconds.setdefault(group, max(spent - measured.seconds, 0.0))
            self._seconds.setdefault(settings, []).append(measured.seconds)
            return measured

        return measure


def spread_order(count: int) -> list[int]:
    """0..count-1 in an order whose every beginning is spread over the whole: sets are often sorted by kind."""
    places = [at * _GOLDEN % 1.0 for at in range(count)]
    ranks = {place: rank for rank, place in enumerate(sorted(places))}
    return [ranks[place] for place in places]


def _tried(step: str, race: Race, runner: Runner, standing: Ratio, winner: Runner | None) -> Tried:
    groups = len(runner.logs)
    speed = runner.tokens / runner.seconds if groups else None
    if groups < LEAST_TO_DROP:
        return Tried(step, runner.settings, None, speed, groups, UNJUDGED)
    ratio = runner.over(race.incumbent)
    return Tried(step, runner.settings, ratio.times(standing), speed, groups, _verdict(runner, ratio, winner))


def _verdict(runner: Runner, ratio: Ratio, winner: Runner | None) -> str:
    if runner is winner:
        return TAKEN
    if runner.dropped:
        return DROPPED
    if ratio.mean > ratio.spread:
        return FASTER
    return SLOWER if ratio.mean < -ratio.spread else NOISE


def fill_groups(count: int, batch_size: int) -> Seq[Seq[int]]:
    """Prompts 0..count-1 in groups of `batch_size` each; the last one is filled from the first prompts.

    Part of a batch would measure another batch size.
    """
    starts = range(0, count, batch_size)
    return [[at % count for at in range(start, start + batch_size)] for start in starts]
