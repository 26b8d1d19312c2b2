"""The figures of speculative decoding, counted once, after stop, end-of-sequence and length trimming."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trtspec.draft.tree import SOURCES, DraftTree

STAGES = ("prefill", "ngram", "eagle", "merge", "verify", "accept", "commit", "host")


@dataclass
class SourceCounts:
    """Counts of one drafter. What several drafters proposed counts for each, so their sum may exceed the totals."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """Accepted draft tokens that this drafter proposed, by their place on the accepted path."""

    def add(self, other: SourceCounts, times: int) -> None:
        """Add another's counts to these, as `Stats.add` does."""
        self.drafts += times * other.drafts
        self.draft_tokens += times * other.draft_tokens
        self.accepted_tokens += times * other.accepted_tokens
        _add_by_position(self.accepted_at, other.accepted_at, times)


@dataclass
class Stats:
    """Counts of one sequence, or the sum of several; the metrics are defined in docs/metrics.md."""

    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    matched_tokens: int = 0
    longest_paths: int = 0
    """Sum over steps of the longest draft path + 1: what the steps could have emitted."""
    accepted_at: list[int] = field(default_factory=list)
    by_source: dict[str, SourceCounts] = field(default_factory=lambda: {name: SourceCounts() for name in SOURCES})
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    head_seconds: float = 0.0
    """The part of the stage `eagle` that was spent inside the head's engines."""

    def count_step(self, tree: DraftTree, accepted_rows: list[int], emitted: int, matched: int) -> None:
        """Count one decode step of one sequence; `accepted_rows` and `emitted` after trimming."""
        self.steps += 1
        self.emitted_tokens += emitted
        self.longest_paths += 1 + tree.depth
        if not tree.size:
            return
        self.drafts += 1
        self.draft_tokens += tree.size
        self.accepted_tokens += len(accepted_rows)
        self.matched_tokens += matched
        _add_by_position(self.accepted_at, [1] * len(accepted_rows), 1)
        sources = tree.sources.tolist()
        accepted = [sources[row - 1] for row in accepted_rows]
        for name, flag in SOURCES.items():
            if size := _count(sources, flag):
                counts = self.by_source[name]
                counts.drafts += 1
                counts.draft_tokens += size
                counts.accepted_tokens += _count(accepted, flag)
                own = [int(bool(proposers & flag)) for proposers in accepted]
                # Up to its last accepted token: what comes behind is no place that this drafter ever reached.
                _add_by_position(counts.accepted_at, own[: len(own) - own[::-1].index(1)] if any(own) else [], 1)

    def add(self, other: Stats, times: int = 1) -> None:
        """Add another's counts and times to these; -1 times takes them off."""
        for name in (
            "steps",
            "drafts",
            "draft_tokens",
            "accepted_tokens",
            "emitted_tokens",
            "matched_tokens",
            "longest_paths",
            "head_seconds",
        ):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        _add_by_position(self.accepted_at, other.accepted_at, times)
        for source, counts in other.by_source.items():
            self.by_source[source].add(counts, times)
        for stage, seconds in other.stage_seconds.items():
            self.stage_seconds[stage] += times * seconds

    def metrics(self) -> dict[str, Any]:
        """The metrics as a JSON object; a ratio without a denominator is 0."""
        drafting = sum(self.stage_seconds[stage] for stage in ("ngram", "eagle", "merge"))
        return {
            "steps": self.steps,
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "emitted_tokens": self.emitted_tokens,
            "acceptance_length": _ratio(self.emitted_tokens, self.steps),
            "acceptance_length_per_draft": 1 + _ratio(self.accepted_tokens, self.drafts) if self.drafts else 0.0,
            "draft_acceptance_rate": _ratio(self.accepted_tokens, self.draft_tokens),
            "match_rate": _ratio(self.matched_tokens, self.draft_tokens),
            "system_efficiency": _ratio(self.emitted_tokens, self.longest_paths),
            "draft_ms_per_token": _ratio(1000 * drafting, self.draft_tokens),
            "acceptance_per_position": [_ratio(count, self.drafts) for count in self.accepted_at],
            "by_source": {
                name: {
                    "drafts": counts.drafts,
                    "draft_tokens": counts.draft_tokens,
                    "accepted_tokens": counts.accepted_tokens,
                }
                for name, counts in self.by_source.items()
            },
            "stage_ms": {stage: 1000 * seconds for stage, seconds in self.stage_seconds.items()},
        }

    def acceptance_by_source(self) -> dict[str, list[float]]:
        """For each drafter and place on the path: its accepted draft tokens there / drafts that it took part in."""
        return {
            name: [_ratio(count, counts.drafts) for count in counts.accepted_at]
            for name, counts in self.by_source.items()
        }


def _add_by_position(totals: list[int], counts: list[int], times: int) -> None:
    totals.extend([0] * (len(counts) - len(totals)))
    for position, count in enumerate(counts):
        totals[position] += times * count


def _count(sources: list[int], flag: int) -> int:
    return sum(1 for source in sources if source & flag)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
