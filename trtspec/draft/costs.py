"""What passes cost on this machine: measured once, followed while decoding."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Rows per sequence at which passes are measured."""
FOLLOW_ALL, FOLLOW_ONE = 0.1, 0.03
"""Share of a deviation that moves all passes' times, and those of the widths that were run."""
LARGEST_DEVIATION = 0.7
"""Of log seconds: one pass that was interrupted must not move the estimates far."""

LEAST_SECONDS, MOST_SECONDS, MOST_ROWS = 1e-7, 1e4, 1 << 20
"""What a stored table may hold."""


class PassCosts:
    """Seconds that a pass over a batch takes, by batch and width: a grid of measurements, interpolated.

    Machines drift as a whole (clock rates, neighbours) more than one width against another, so an observation moves the
    common scale fast and its own widths slowly: widths that have not run for long stay comparable to those that have.
    """

    def __init__(self, grid: Mapping[int, Mapping[int, float]]) -> None:
        """`grid[batch][width]` is seconds; every batch has the same widths, at least one."""
        if not grid or any(not row for row in grid.values()):
            raise ValueError("costs need at least one batch with one width")
        self._batches = np.array(sorted(grid))
        self._widths = np.array(sorted(next(iter(grid.values()))))
        seconds = [[grid[batch][width] for width in self._widths.tolist()] for batch in self._batches.tolist()]
        self._log = np.log(seconds)
        self._scale = 0.0

    def seconds(self, batch: int, widths: np.ndarray) -> np.ndarray:
        """Of a pass over `batch` sequences at each of these widths, float64 `[len(widths)]`.

        Beyond the grid, widths go on at the slope of its end, and a larger batch takes in proportion.
        """
        low, weight = self._between(batch)
        row = np.exp(self._log[low] + self._scale)
        if weight:
            upper = np.exp(self._log[low + 1] + self._scale)
            row = row + weight * (upper - row)
        elif batch > self._batches[-1]:
            row = row * (batch / self._batches[-1])
        found = np.interp(widths, self._widths, row)
        if len(self._widths) > 1:
            slope = max(row[-1] - row[-2], 0.0) / (self._widths[-1] - self._widths[-2])
            found = found + slope * np.maximum(widths - self._widths[-1], 0)
        return np.asarray(found)

    def follow(self, expected: float, seconds: float) -> float:
        """Take in that passes for which `expected` seconds were estimated took `seconds`; returns the deviation.

        Passes that took no time at all say nothing: the clock is too coarse for them.
        """
        if not (0 < seconds < float("inf") and expected > 0):
            return 0.0
        deviation = float(np.clip(np.log(seconds / expected), -LARGEST_DEVIATION, LARGEST_DEVIATION))
        self._scale += FOLLOW_ALL * deviation
        return deviation

    def observe(self, batch: int, width: int, seconds: float) -> None:
        """Take in what one pass took."""
        deviation = self.follow(float(self.seconds(batch, np.array([width]))[0]), seconds)
        low, weight = self._between(batch)
        column = int(np.abs(self._widths - width).argmin())
        self._log[low + (weight > 0.5), column] += FOLLOW_ONE * deviation

    def to_json(self) -> dict[str, dict[str, float]]:
        """The grid as a JSON object: batch, width, seconds."""
        seconds = np.exp(self._log + self._scale)
        return {
            str(batch): {str(width): float(seconds[b, w]) for w, width in enumerate(self._widths.tolist())}
            for b, batch in enumerate(self._batches.tolist())
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, Any]]) -> PassCosts:
        """What `to_json` wrote.

        Raises:
            ValueError: it is no such object.
        """
        try:
            grid = {int(batch): {int(w): float(s) for w, s in row.items()} for batch, row in data.items()}
        except (AttributeError, TypeError, OverflowError) as error:
            raise ValueError(f"no table of costs: {error}") from None
        if len({tuple(sorted(row)) for row in grid.values()}) != 1 or any(
            not (LEAST_SECONDS <= s <= MOST_SECONDS and 1 <= w <= MOST_ROWS and 1 <= batch <= MOST_ROWS)
            for batch, row in grid.items()
            for w, s in row.items()
        ):
            raise ValueError("no table of costs: rows differ in widths, or numbers are beyond any pass's")
        return cls(grid)

    def _between(self, batch: int) -> tuple[int, float]:
        """The grid's last row for at most `batch`, and how far the batch lies towards the next one."""
        low = max(int(self._batches.searchsorted(batch, side="right")) - 1, 0)
        if low + 1 == len(self._batches) or batch <= self._batches[low]:
            return low, 0.0
        return low, float(batch - self._batches[low]) / float(self._batches[low + 1] - self._batches[low])


def grid_widths(limit: int) -> Seq[int]:
    """The widths of WIDTHS that passes of at most `limit` rows have, and the limit itself."""
    return sorted({width for width in WIDTHS if width <= limit} | {limit})
