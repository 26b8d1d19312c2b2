"""How often draft tokens are accepted: tables that learn while decoding, for the `auto` merge.

Each table holds the chance that the target goes on to a draft token, given that it went the draft's way up to its
parent. A cell starts from a prior, learns from every step, and forgets: its memory is bounded, so it follows a text
that changes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from math import exp

import numpy as np

LENGTHS = np.array((2, 3, 4, 5, 6, 8, 12, 20, 32))
"""Lower ends of the classes of match lengths behind the first."""
HEATS = (0.35, 0.7)
"""Lower ends of the classes of a sequence's recent luck behind the first."""
DEPTHS = np.array((2, 3, 5, 9, 17))
"""Lower ends of the classes of depths behind the first."""
HEAD_LOG_PROBS = np.log((0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97))
"""Lower ends of the classes of a head's own log-probabilities behind the first."""
HEAD_DEPTHS = 4
"""Depths of a head's draft that are told apart; deeper ones count as the last."""
PRIOR_WEIGHT = 4.0
"""Observations that a prior stands for."""
MEMORY = 200.0
"""Observations that a cell remembers at most."""
LEAST_RATE = 0.002
"""No rate comes closer to 0 or 1: a path's chance stays above nothing, and a surprise possible."""


class RateTable:
    """Cells of acceptance rates."""

    def __init__(self, prior: np.ndarray) -> None:
        """`prior` holds the rates to begin with."""
        self._hits = prior.astype(np.float64) * PRIOR_WEIGHT
        self._trials = np.full(prior.shape, PRIOR_WEIGHT)
        self.rates = np.clip(prior.astype(np.float64), LEAST_RATE, 1.0 - LEAST_RATE)
        """The rates, of the prior's shape."""

    def observe(self, cell: tuple[int, ...], hit: bool) -> None:
        """Count one draft token whose parent the target reached."""
        trials, hits = self._trials[cell] + 1.0, self._hits[cell] + hit
        if trials > MEMORY:
            hits, trials = hits * MEMORY / trials, MEMORY
        self._trials[cell], self._hits[cell] = trials, hits
        self.rates[cell] = min(max(hits / trials, LEAST_RATE), 1.0 - LEAST_RATE)


class NgramRates:
    """Acceptance of lookups by match length, the sequence's recent luck with lookups (`heat`), and depth.

    A sequence that repeats its context makes even short matches good; in new text even longer ones are chance.
    """

    def __init__(self) -> None:
        self._table = RateTable(_ngram_prior())

    def path_rates(self, length: int, heat: float, size: int, bias: float = 0.0) -> np.ndarray:
        """The chance that each token of a continuation is reached and accepted, float64 `[size]`.

        Args:
            bias: what the sequence adds to the log odds of each.
        """
        row = self._table.rates[_length_class(length), _heat_class(heat)]
        row = row / (row + (1.0 - row) * exp(-bias))
        return np.cumprod(row[_depth_classes(size)])

    def observe(self, length: int, heat: float, hits: Seq[bool]) -> None:
        """Count a continuation's tokens from the first on; behind the first miss nothing is known."""
        place = _length_class(length), _heat_class(heat)
        for depth_class, hit in zip(_depth_classes(len(hits)).tolist(), hits, strict=True):
            self._table.observe((*place, depth_class), hit)


class HeadRates:
    """Acceptance of a head's tokens by its own probability of them, and depth: the head, calibrated."""

    def __init__(self) -> None:
        ends = np.concatenate(([np.log(0.03)], HEAD_LOG_PROBS, [0.0]))
        middle = np.exp((ends[:-1] + ends[1:]) / 2)
        self._table = RateTable(np.stack([0.9 * middle] * HEAD_DEPTHS, axis=1))

    def rates(self, log_probs: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """The chance that the target goes on to each token from its parent.

        Args:
            log_probs: of each token behind its parent, by the head, `[tokens]`.
            depths: counted from 1, integer `[tokens]`.
        """
        return np.asarray(self._table.rates[_head_classes(log_probs), np.minimum(depths, HEAD_DEPTHS) - 1])

    def observe(self, log_prob: float, depth: int, hit: bool) -> None:
        """Count one token whose parent the target reached."""
        self._table.observe((int(_head_classes(np.array(log_prob))), min(depth, HEAD_DEPTHS) - 1), hit)


def _length_class(length: int) -> int:
    return int(LENGTHS.searchsorted(length, side="right"))


@lru_cache(maxsize=256)
def _depth_classes(size: int) -> np.ndarray:
    """The classes of depths 1, 2, ... `size`."""
    classes = np.searchsorted(DEPTHS, np.arange(1, size + 1), side="right")
    classes.setflags(write=False)
    return classes


def _heat_class(heat: float) -> int:
    return int(heat >= HEATS[0]) + int(heat >= HEATS[1])


def _head_classes(log_probs: np.ndarray) -> np.ndarray:
    return np.asarray(HEAD_LOG_PROBS.searchsorted(log_probs, side="right"))


def _ngram_prior() -> np.ndarray:
    """Rates `[lengths, heats, depths]`, between a bad and a good first token; later tokens of a good start are good."""
    lengths, depths = len(LENGTHS) + 1, len(DEPTHS) + 1
    first = np.linspace(0.2, 0.9, lengths)[:, None] ** np.array([1.5, 1.0, 0.4])
    prior = np.empty((lengths, 3, depths))
    prior[:, :, 0] = first
    for depth in range(1, depths):
        prior[:, :, depth] = 1 - (1 - prior[:, :, depth - 1]) * 0.75
    return prior
