"""Settings side by side on the same prompts, group by group, until it is clear which are slower."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from trtspec.config import SpeculationConfig

LEAST_DEVIATION = 0.01
"""Standard deviation that log-ratios of two speeds have at least: a few that are equal by chance prove nothing."""
LEAST_TO_DROP = 2
"""Groups from which on settings may be dropped."""
LEAST_TO_SETTLE = 4
"""Groups from which on the last settings left may have won already."""
# Student's t for a one-sided bound, by degrees of freedom from 1 on.
_T95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75, 1.75, 1.74, 1.73)
_T90 = (3.08, 1.89, 1.64, 1.53, 1.48, 1.44, 1.41, 1.40, 1.38, 1.37, 1.36, 1.36, 1.35, 1.35, 1.34, 1.34, 1.33, 1.33)


class Measured(NamedTuple):
    """One group of prompts completed once."""

    tokens: int
    seconds: float


class Measure(Protocol):
    """Completes a group of prompts with some settings; must not be called with two at once."""

    def __call__(self, settings: SpeculationConfig, group: int) -> Measured: ...


class Ratio(NamedTuple):
    """How much faster one of two settings is: the mean of log-ratios over groups of prompts."""

    mean: float
    """Of the logarithm."""
    variance: float
    """Of that mean."""
    groups: int

    @property
    def spread(self) -> float:
        """What the mean errs by at most in 95 of 100 cases, on either side counted alone."""
        return _quantile(_T95, self.groups) * math.sqrt(self.variance)

    @property
    def likely_spread(self) -> float:
        """The same in 90 of 100 cases."""
        return _quantile(_T90, self.groups) * math.sqrt(self.variance)

    @property
    def factor(self) -> float:
        """How many times as fast."""
        return math.exp(self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        """What the factor lies between, by `spread`."""
        return math.exp(self.mean - self.spread), math.exp(self.mean + self.spread)

    def times(self, other: Ratio) -> Ratio:
        """The ratio over a third one: of a to b by that of b to c."""
        return Ratio(self.mean + other.mean, self.variance + other.variance, min(self.groups, other.groups))


SAME = Ratio(0.0, 0.0, 1 << 30)
"""Of settings to themselves."""


@dataclass(eq=False)
class Runner:
    """Settings in a race."""

    settings: SpeculationConfig
    logs: list[float] = field(default_factory=list)
    """Logarithm of the tokens per second, by groups seen."""
    tokens: int = 0
    seconds: float = 0.0
    dropped: bool = False

    def add(self, measured: Measured) -> None:
        """Take in the next group."""
        self.tokens += measured.tokens
        self.seconds += measured.seconds
        self.logs.append(math.log(measured.tokens / measured.seconds))

    def over(self, other: Runner) -> Ratio:
        """How much faster than another, over the groups that both have seen; at least two."""
        ratios = [own - base for own, base in zip(self.logs, other.logs, strict=False)]
        deviation = max(statistics.stdev(ratios), LEAST_DEVIATION)
        return Ratio(statistics.fmean(ratios), deviation**2 / len(ratios), len(ratios))


class Race:
    """The settings in force against others, all on the same groups of prompts.

    The turn goes round, so that none always runs on what another left in the caches, and drift of the machine hits all
    alike. Settings that are clearly slower than the fastest so far run no further.
    """

    def __init__(self, incumbent: SpeculationConfig, others: Seq[SpeculationConfig]) -> None:
        self.incumbent = Runner(incumbent)
        self.others = [Runner(settings) for settings in others]

    @property
    def live(self) -> list[Runner]:
        """Those of the others that are not dropped."""
        return [runner for runner in self.others if not runner.dropped]

    def run(self, measure: Measure, groups: Seq[int], may_go_on: Callable[[int], bool], *, to_the_end: bool) -> bool:
        """Run until the groups are through, or until the race is decided.

        Args:
            may_go_on: asked before each group, with the number of measurements that it takes.
            to_the_end: drop none and stop at no early win.

        Returns:
            Whether it ended by itself, rather than by `may_go_on`.
        """
        for turn, group in enumerate(groups):
            runners = [self.incumbent, *self.live]
            if not may_go_on(len(runners)):
                return False
            for place in range(len(runners)):
                runner = runners[(turn + place) % len(runners)]
                runner.add(measure(runner.settings, group))
            if not to_the_end:
                self._drop()
                if not self.live or self._is_settled():
                    break
        return True

    @property
    def leader(self) -> Runner:
        """The fastest so far of those that still run, the incumbent among them."""
        return max([self.incumbent, *self.live], key=lambda runner: statistics.fmean(runner.logs))

    def winner(self) -> Runner | None:
        """What is likely faster than the incumbent, or None."""
        if len(self.incumbent.logs) < LEAST_TO_DROP or (leader := self.leader) is self.incumbent:
            return None
        ratio = leader.over(self.incumbent)
        return leader if ratio.mean > ratio.likely_spread else None

    def _drop(self) -> None:
        if len(self.incumbent.logs) < LEAST_TO_DROP:
            return
        leader = self.leader
        for runner in self.live:
            if runner is not leader:
                ratio = runner.over(leader)
                runner.dropped = ratio.mean + ratio.spread < 0

    def _is_settled(self) -> bool:
        """Whether a single one is left and clearly ahead."""
        if len(self.live) > 1 or len(self.incumbent.logs) < LEAST_TO_SETTLE:
            return False
        ratio = self.live[0].over(self.incumbent)
        return ratio.mean > ratio.spread


def _quantile(table: Seq[float], groups: int) -> float:
    """Student's t; beyond the table its last value, which is a little too large there."""
    return table[min(max(groups - 2, 0), len(table) - 1)]
