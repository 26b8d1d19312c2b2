"""Counters on the server's metrics endpoint."""

from __future__ import annotations

from typing import Any, Protocol

from trtspec.decode.stats import Stats
from trtspec.draft.tree import SOURCES


class Metric(Protocol):
    """A time series of the server's."""

    def increment(self, value: float) -> None:
        """Add a value; a gauge's may be negative."""


class Family(Protocol):
    """Time series of one name and different labels."""

    def Metric(self, labels: dict[str, str]) -> Metric:
        """One of them; instances of a model that ask for the same labels share it."""


class Families(Protocol):
    """The part of `triton_python_backend_utils` that is needed here."""

    MetricFamily: Any


class Metrics:
    """An Observer that passes on what clients are told; the metrics are defined in docs/metrics.md.

    Every instance adds to what all share, so nothing is ever set.
    """

    def __init__(self, server: Families) -> None:
        """Register the metrics with the server."""
        counter, gauge = server.MetricFamily.COUNTER, server.MetricFamily.GAUGE

        def family(name: str, text: str, kind: Any = counter) -> Family:
            made: Family = server.MetricFamily(name=f"trtspec_{name}", description=text, kind=kind)
            return made

        # The server deletes a family, and its metrics with it, once nothing refers to it.
        self._families = {
            "steps": family("decode_steps_total", "Decode steps, counted for each sequence in them"),
            "emitted": family("emitted_tokens_total", "Tokens that clients got from decode steps"),
            "drafted": family("draft_tokens_total", "Draft tokens verified"),
            "accepted": family("accepted_tokens_total", "Draft tokens accepted"),
            "positions": family(
                "accepted_tokens_per_position_total", "Drafts whose accepted path reaches this position, from 0"
            ),
            "active": family("active_sequences", "Sequences with a KV cache slot", gauge),
            "queued": family("queued_requests", "Requests that wait for a slot", gauge),
        }
        self._steps = self._families["steps"].Metric(labels={})
        self._emitted = self._families["emitted"].Metric(labels={})
        self._drafted = {source: self._families["drafted"].Metric(labels={"source": source}) for source in SOURCES}
        self._accepted = {source: self._families["accepted"].Metric(labels={"source": source}) for source in SOURCES}
        self._at_position: list[Metric] = []
        self._active = _Level(self._families["active"].Metric(labels={}))
        self._queued = _Level(self._families["queued"].Metric(labels={}))

    def stepped(self, told: Stats, active: int, queued: int) -> None:
        """See `worker.Observer`."""
        _add(self._steps, told.steps)
        _add(self._emitted, told.emitted_tokens)
        for source, counts in told.by_source.items():
            _add(self._drafted[source], counts.draft_tokens)
            _add(self._accepted[source], counts.accepted_tokens)
        for position, count in enumerate(told.accepted_at):
            if position == len(self._at_position):
                self._at_position.append(self._families["positions"].Metric(labels={"position": str(position)}))
            _add(self._at_position[position], count)
        self._active.move_to(active)
        self._queued.move_to(queued)

    def close(self) -> None:
        """Take this instance's part out of the gauges."""
        self._active.move_to(0)
        self._queued.move_to(0)


class _Level:
    """This instance's part of a gauge."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._value = 0

    def move_to(self, value: int) -> None:
        """Change the gauge by what this instance's part changes by."""
        _add(self._metric, value - self._value)
        self._value = value


def _add(metric: Metric, value: int) -> None:
    """Each call is a message to the server's process, so zeros are left out."""
    if value:
        metric.increment(value)
