"""Measuring passes: which ones run, where their KV goes, and what is made of the times."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decode.toy import ToyTarget, toy_cache
from draft.toy_head import ToyHead, toy_head_cache

from trtspec.config import HEAD_WIDTH, Limits
from trtspec.decode import profile
from trtspec.decode.profile import CONTEXT, MOST_ROWS, RUNS, measure_head, measure_target
from trtspec.draft.costs import PassCosts, grid_widths
from trtspec.engine.base import Buckets, CacheView
from trtspec.engine.draft_head import HeadOutput
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.target import Pass, Rows

Seconds = Callable[[int, int], float]


class Clock:
    """A clock that passes alone move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Seconds) -> None:
        self.now, self.seconds = 0.0, seconds
        self.passes: list[tuple[int, int]] = []
        monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def run(self, rows: Rows, cache: CacheView) -> None:
        batch, width = rows.tokens.shape
        self.passes.append((batch, width))
        self.now += self.seconds(batch, width)
        assert cache.key == (0, batch)
        for tensor in cache.tensors.values():
            assert int(rows.cache_length.max()) + width <= tensor.shape[2], "beyond the cache"
        assert rows.mask.any(dim=-1).all(), "a row that sees nothing is NaN"


class TimedTarget(ToyTarget):
    def __init__(self, clock: Clock, buckets: Buckets | None = None) -> None:
        super().__init__(buckets=buckets)
        self.clock = clock

    def forward(self, rows: Rows, cache: CacheView) -> Pass:
        self.clock.run(rows, cache)
        for b, start in enumerate(rows.cache_length.tolist()):
            for tensor in cache.tensors.values():
                tensor[b, :, start : start + rows.tokens.shape[1]] = -1.0
        hidden = torch.ones((*rows.tokens.shape, 2), dtype=torch.float64)
        return Pass(hidden, hidden[..., :1])


class TimedHead(ToyHead):
    def __init__(self, clock: Clock, buckets: Buckets | None = None) -> None:
        super().__init__(11, buckets=buckets)
        self.config = FullConfig()  # type: ignore[assignment]
        self.clock = clock

    def forward(self, rows: Rows, hidden: torch.Tensor, cache: CacheView) -> HeadOutput:
        self.clock.run(rows, cache)
        assert hidden.shape == (*rows.tokens.shape, 1)
        for b, start in enumerate(rows.cache_length.tolist()):
            for tensor in cache.tensors.values():
                tensor[b, :, start : start + rows.tokens.shape[1]] = -1.0
        return HeadOutput(hidden, torch.ones_like(hidden))

    def top_tokens(self, hidden_rows: torch.Tensor, count: int, noise: object = ()) -> tuple[np.ndarray, np.ndarray]:
        assert len(hidden_rows) == self.clock.passes[-1][0]
        return np.zeros((len(hidden_rows), count)), np.zeros((len(hidden_rows), count), np.float32)


class FullConfig:
    num_features, target_hidden_size = 1, 1
    max_position_embeddings, draft_vocab_size = 10_000, 6


def additive(batch: int, width: int) -> float:
    return 0.01 + 0.001 * batch * width


def table(costs: PassCosts) -> dict[int, dict[int, float]]:
    data = costs.to_json()
    return {int(batch): {int(width): seconds for width, seconds in row.items()} for batch, row in data.items()}


def first_row(limits: Limits) -> int:
    return min(CONTEXT, limits.max_seq_len - 1)


def filled(cache: KVCache) -> torch.Tensor:
    """Something to keep in every row."""
    cache.block.copy_(torch.arange(cache.block.numel()).view(cache.block.shape) % 97 + 1)
    return cache.block.clone()


LIMITS = [
    Limits(40, max_batch_size=1),
    Limits(40, max_batch_size=5, max_draft_tokens=7),
    Limits(512, max_batch_size=1, max_draft_tokens=0),
    Limits(300, max_batch_size=8, max_draft_tokens=63),
    Limits(2, max_batch_size=3, max_draft_tokens=1),
]
every_limit = pytest.mark.parametrize("limits", LIMITS, ids=str)


@every_limit
@pytest.mark.parametrize("buckets", [Buckets(), Buckets((1, 2, 4, 8), live_step=64, max_live=10_000)], ids=["", "wide"])
def test_every_batch_and_width_is_known(limits: Limits, buckets: Buckets, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, row = limits.max_batch_size, first_row(limits)
    clock = Clock(monkeypatch, additive)
    buckets = Buckets(tuple(width for width in buckets.widths if width <= limits.max_width), buckets.live_step)
    costs = measure_target(TimedTarget(clock, buckets), toy_cache(limits), row, limits.max_width)
    found, widths = table(costs), list(grid_widths(limits.max_width))
    assert [*found] == {1: [1], 3: [1, 2, 3], 5: [1, 2, 4, 5], 8: [1, 2, 4, 8]}[slots]
    for batch, each in found.items():
        assert [*each] == widths
        for width, seconds in each.items():
            if batch * width <= MOST_ROWS:
                assert seconds == pytest.approx(additive(batch, buckets.width(width)))
    assert all(batch * width <= MOST_ROWS or width == 1 for batch, width in clock.passes)
    # The first run of each, which allocates and warms up, doesn't count.
    counts = [len([*group]) for _, group in itertools.groupby(clock.passes)]
    assert all(count % (1 + RUNS) == 0 for count in counts)


def test_what_is_too_large_to_measure_goes_on_at_the_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(300, max_batch_size=8, max_draft_tokens=63)
    costs = measure_target(TimedTarget(Clock(monkeypatch, additive)), toy_cache(limits), 256, limits.max_width)
    assert costs.seconds(8, np.array([64]))[0] == pytest.approx(additive(8, 64))
    falling = measure_target(
        TimedTarget(Clock(monkeypatch, lambda batch, width: 0.1 / width)), toy_cache(limits), 256, limits.max_width
    )
    assert (falling.seconds(8, np.arange(1, 65)) > 0).all()


@every_limit
def test_what_sequences_have_in_their_slots_stays(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, row = Clock(monkeypatch, additive), first_row(limits)
    cache, head_cache = toy_cache(limits), toy_head_cache(limits)
    before, before_head = filled(cache), filled(head_cache)
    measure_target(TimedTarget(clock), cache, row, limits.max_width)
    measure_head(TimedHead(clock), head_cache, row)
    assert torch.equal(cache.block[..., :row, :], before[..., :row, :])
    assert torch.equal(head_cache.block[..., :row, :], before_head[..., :row, :])
    assert not torch.equal(cache.block, before)


@every_limit
def test_a_heads_passes(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, additive)
    costs = table(measure_head(TimedHead(clock), toy_head_cache(limits), first_row(limits)))
    assert all([*row] == list(grid_widths(HEAD_WIDTH)) for row in costs.values())
    assert limits.max_batch_size in costs
    assert costs[1][4] == pytest.approx(additive(1, 4))
    assert max(batch * width for batch, width in clock.passes) <= MOST_ROWS


def test_neither_a_hiccup_nor_luck_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = itertools.cycle([9.0, 0.02, 5.0, 0.0001])
    limits = Limits(40, max_batch_size=1, max_draft_tokens=1)
    costs = measure_target(TimedTarget(Clock(monkeypatch, lambda *_: next(runs))), toy_cache(limits), 39, 2)
    assert table(costs) == {1: {1: pytest.approx(0.02), 2: pytest.approx(0.02)}}
