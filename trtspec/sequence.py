"""One request's tokens and state."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from trtspec.config import SamplingParams, SpeculationConfig

STOP, LENGTH, CONTEXT, CANCELLED = "stop", "length", "context", "cancelled"


@dataclass(eq=False)
class Sequence:
    """Tokens t0..t(n-1) of one request; during decoding the last one is the root, whose KV does not exist yet.

    `cached` counts the tokens whose keys and values are in the cache: n - 1 between decode steps.
    """

    index: int
    prompt_length: int
    tokens: np.ndarray
    """int32 `[capacity]`; the first `length` are committed."""
    length: int
    sampling: SamplingParams
    speculation: SpeculationConfig
    cached: int = 0
    slot: int = -1
    finish_reason: str | None = None

    @classmethod
    def start(
        cls, index: int, prompt: Seq[int], capacity: int, sampling: SamplingParams, speculation: SpeculationConfig
    ) -> Sequence:
        """A sequence that holds its prompt; `capacity` is the most tokens it may ever have."""
        tokens = np.zeros(capacity, dtype=np.int32)
        tokens[: len(prompt)] = prompt
        return cls(index, len(prompt), tokens, len(prompt), sampling, speculation)

    @property
    def history(self) -> np.ndarray:
        """The committed tokens, int32 `[length]`, a view."""
        return self.tokens[: self.length]

    @property
    def generated(self) -> int:
        """Tokens emitted so far."""
        return self.length - self.prompt_length

    @property
    def capacity(self) -> int:
        """The most tokens it may have, prompt included."""
        return len(self.tokens)

    @property
    def draft_room(self) -> int:
        """Draft tokens that can still be of use: with the bonus token behind them they must fit every limit."""
        room = min(self.capacity - self.length, self.sampling.max_new_tokens - self.generated)
        return max(room - 1, 0)

    def append(self, token: int) -> None:
        """Commit one token."""
        self.tokens[self.length] = token
        self.length += 1
