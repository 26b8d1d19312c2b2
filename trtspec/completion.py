"""What a caller gets: completions, and the events of a growing one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtspec.decode.generation import Generation
from trtspec.decode.stats import Stats
from trtspec.sampling import TokenLogprob


@dataclass(frozen=True)
class Completion:
    """What was generated for one prompt.

    `token_ids` end with the token that ended the sequence: the end-of-sequence token, or the one that completed a
    stop string; `text` holds neither.
    """

    index: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    stats: Stats
    time_to_first_token_ms: float
    seconds: float
    """From the start of the request to its last token, waiting for a slot included."""
    seed: int | None = None
    """What its tokens were drawn with; None where they were not drawn."""
    logprobs: list[TokenLogprob] | None = None
    """One for each token, where they were asked for."""
    policy: Mapping[str, Any] | None = None
    """What the `auto` merge did and learned; None for other methods."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The figures of docs/metrics.md."""
        return {
            **self.stats.metrics(),
            "time_to_first_token_ms": self.time_to_first_token_ms,
            "tokens_per_second": len(self.token_ids) / self.seconds,
            **({} if self.policy is None else {"policy": dict(self.policy)}),
        }

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `trtspec run --json`."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "logprobs": None if self.logprobs is None else [each.to_json() for each in self.logprobs],
            "metrics": self.metrics,
        }


@dataclass(frozen=True)
class StreamEvent:
    """A piece of a growing completion; `finish_reason` is None until the last one."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    draft_tokens: int = 0
    """Draft tokens verified since the event before."""
    accepted_tokens: int = 0
    """Draft tokens accepted since the event before."""
    completion: Completion | None = None
    """Of the last event."""


def event_of(generation: Generation) -> StreamEvent:
    """What came since the last event of this sequence."""
    text, token_ids = generation.take()
    drafted, accepted = generation.take_counts()
    return StreamEvent(
        generation.sequence.index,
        text,
        token_ids,
        generation.sequence.finish_reason,
        drafted,
        accepted,
        _completion(generation) if generation.finished else None,
    )


def _completion(generation: Generation) -> Completion:
    sequence = generation.sequence
    assert generation.first_token_at and generation.ended_at and sequence.finish_reason
    return Completion(
        index=sequence.index,
        text="".join(generation.taken_text),
        token_ids=sequence.history[sequence.prompt_length :].tolist(),
        prompt_tokens=sequence.prompt_length,
        finish_reason=sequence.finish_reason,
        stats=generation.stats,
        time_to_first_token_ms=1000 * (generation.first_token_at - generation.started),
        seconds=generation.ended_at - generation.started,
        seed=None if sequence.sampling.is_greedy else sequence.sampling.seed,
        logprobs=None if sequence.sampling.logprobs is None else generation.logprobs,
        policy=None if generation.auto is None else generation.auto.to_json(),
    )
