"""Counters: what the server's metrics add up to."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from trtspec.decode.stats import SourceCounts, Stats
from trtspec.serving.metrics import Metrics


class Server:
    """Metrics that all instances of a server share."""

    def __init__(self) -> None:
        self.values: dict[str, float] = defaultdict(float)
        self.kinds: dict[str, str] = {}
        self.calls = 0
        server = self

        class Metric:
            def __init__(self, name: str) -> None:
                self.name = name
                server.values[name] += 0

            def increment(self, value: float) -> None:
                assert value > 0 or server.kinds[self.name.partition("{")[0]] == "gauge"
                server.values[self.name] += value
                server.calls += 1

        class MetricFamily:
            COUNTER, GAUGE = "counter", "gauge"

            def __init__(self, name: str, description: str, kind: str) -> None:
                assert description
                server.kinds[name] = kind
                self.name = name

            def Metric(self, labels: dict[str, str]) -> Any:
                text = ",".join(f'{key}="{value}"' for key, value in labels.items())
                return Metric(self.name + (f"{{{text}}}" if text else ""))

        self.MetricFamily = MetricFamily


def stats(**counts: Any) -> Stats:
    return Stats(**counts)


def test_names_and_kinds_are_those_of_the_contract() -> None:
    server = Server()
    Metrics(server)
    assert server.kinds == {
        "trtspec_decode_steps_total": "counter",
        "trtspec_draft_tokens_total": "counter",
        "trtspec_accepted_tokens_total": "counter",
        "trtspec_accepted_tokens_per_position_total": "counter",
        "trtspec_emitted_tokens_total": "counter",
        "trtspec_active_sequences": "gauge",
        "trtspec_queued_requests": "gauge",
    }


def test_counts_add_up_over_steps_and_instances() -> None:
    server = Server()
    first, second = Metrics(server), Metrics(server)
    step = stats(
        steps=2,
        emitted_tokens=5,
        accepted_at=[2, 1],
        by_source={"ngram": SourceCounts(1, 4, 2), "eagle": SourceCounts(1, 3, 1)},
    )
    first.stepped(step, 3, 1)
    first.stepped(stats(steps=1, emitted_tokens=1), 2, 0)
    second.stepped(step, 1, 4)
    assert dict(server.values) == {
        "trtspec_decode_steps_total": 5,
        "trtspec_emitted_tokens_total": 11,
        'trtspec_draft_tokens_total{source="ngram"}': 8,
        'trtspec_draft_tokens_total{source="eagle"}': 6,
        'trtspec_accepted_tokens_total{source="ngram"}': 4,
        'trtspec_accepted_tokens_total{source="eagle"}': 2,
        'trtspec_accepted_tokens_per_position_total{position="0"}': 4,
        'trtspec_accepted_tokens_per_position_total{position="1"}': 2,
        "trtspec_active_sequences": 3,
        "trtspec_queued_requests": 4,
    }
    first.close()
    assert (server.values["trtspec_active_sequences"], server.values["trtspec_queued_requests"]) == (1, 4)
    second.close()
    assert (server.values["trtspec_active_sequences"], server.values["trtspec_queued_requests"]) == (0, 0)


def test_nothing_new_costs_no_message() -> None:
    server = Server()
    metrics = Metrics(server)
    metrics.stepped(stats(), 1, 0)
    assert server.calls == 1
    metrics.stepped(stats(), 1, 0)
    assert server.calls == 1
