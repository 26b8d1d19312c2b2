"""Measuring what passes cost, for the `auto` merge."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from trtspec.config import HEAD_WIDTH
from trtspec.draft.costs import PassCosts, grid_widths
from trtspec.draft.hidden_rows import view_rows, zeros
from trtspec.engine.base import Buckets
from trtspec.engine.draft_head import DraftHeadRunner
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.target import Rows, Target

MOST_ROWS = 64
"""Rows of all sequences together beyond which no pass is measured: estimates go on at the slope."""
CONTEXT = 256
"""Committed tokens that each measured sequence pretends to have, where the cache has room for as many."""
RUNS = 2
"""Runs of each pass behind an untimed one; the faster counts."""


def measure_target(target: Target, cache: KVCache, first_row: int, max_width: int) -> PassCosts:
    """Time verifications of several batches and widths.

    Args:
        first_row: the passes' KV goes into the slots from this row on: behind what any sequence has there.
        max_width: rows of one sequence at most.
    """

    def run(batch: int, width: int) -> None:
        rows = _rows(batch, width, first_row, target.buckets)
        hidden = target.forward(rows, cache.view(0, batch)).hidden
        target.logits(hidden.reshape(batch * hidden.shape[1], -1))
        _wait_for(hidden.device)

    return _grid(run, _batches(cache.slots), grid_widths(max_width))


def measure_head(head: DraftHeadRunner, cache: KVCache, first_row: int) -> PassCosts:
    """Time a head's passes, the choice of the best token behind one row of each sequence included.

    Args:
        first_row: as for `measure_target`.
    """
    like, features = cache.block, head.config.num_features * head.config.target_hidden_size

    def run(batch: int, width: int) -> None:
        rows = _rows(batch, width, first_row, head.buckets)
        width = rows.tokens.shape[1]
        hidden = head.first_hidden(zeros((batch * width, features), like)).reshape(batch, width, -1)
        output = head.forward(rows, hidden.contiguous(), cache.view(0, batch))
        head.top_tokens(view_rows(output.logit_hidden, [slot * width for slot in range(batch)]), 1)

    return _grid(run, _batches(cache.slots), grid_widths(HEAD_WIDTH))


def _grid(run: Callable[[int, int], None], batches: Seq[int], widths: Seq[int]) -> PassCosts:
    """Seconds by batch and width; what was too large to measure is estimated from the largest that was."""
    grid: dict[int, dict[int, float]] = {}
    for batch in batches:
        measured = [width for width in widths if batch * width <= MOST_ROWS] or [widths[0]]
        grid[batch] = {width: _seconds(run, batch, width) for width in measured}
        first, last = measured[0], measured[-1]
        rise = (grid[batch][last] - grid[batch][first]) / (last - first) if last > first else grid[batch][last] / last
        for width in widths[len(measured) :]:
            grid[batch][width] = grid[batch][last] + max(rise, 0.0) * (width - last)
    return PassCosts(grid)


def _seconds(run: Callable[[int, int], None], batch: int, width: int) -> float:
    run(batch, width)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run(batch, width)
        times.append(time.perf_counter() - start)
    return min(times)


def _batches(slots: int) -> list[int]:
    """1, 2, 4, ... and the number of slots."""
    return sorted({1 << power for power in range(slots.bit_length()) if 1 << power <= slots} | {slots})


def _rows(batch: int, width: int, start: int, buckets: Buckets) -> Rows:
    width = buckets.width(width)
    tokens = np.zeros((batch, width), dtype=np.int32)
    positions = np.full((batch, width), start, dtype=np.int64) + np.arange(width)
    mask = np.arange(buckets.live(start + width)) <= positions[:, None, :, None]
    return Rows(*map(torch.from_numpy, (tokens, positions, np.full(batch, start, dtype=np.int64), mask)))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
