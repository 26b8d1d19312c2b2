"""One sequence's way from logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from trtspec.config import SamplingParams
from trtspec.errors import ConfigError
from trtspec.sampling.filters import filter_logits
from trtspec.sampling.noise import GumbelNoise
from trtspec.sampling.penalties import TokenCounts

BLOCK = 1 << 18
"""Logits worked on at once, at least a row: larger temporary arrays would be new memory from the system each time."""


class Sampler:
    """Chooses the tokens of one sequence; decoding that is plain (`SamplingParams.is_plain`) needs none.

    The token at sequence position i, counted from the prompt's first token, is the argmax of the processed logits plus
    the noise of (seed, i). What is drafted, and what else is in the batch, therefore changes no token, and accepting
    drafts by exact match keeps the target's distribution.

    It works on the host: logits on a device come as `logits.float().cpu().numpy()`.
    """

    def __init__(self, params: SamplingParams, prompt: np.ndarray, vocab_size: int) -> None:
        """Start behind a prompt.

        Args:
            prompt: integer `[prompt]`

        Raises:
            ConfigError: the temperature is more than 0 and there is no seed.
        """
        self._params = params
        self._length = len(prompt)
        self._counts = TokenCounts(params, prompt, vocab_size) if params.has_penalties else None
        self._noise: GumbelNoise | None = None
        if not params.is_greedy:
            if params.seed is None:
                raise ConfigError(f"seed is None with temperature {params.temperature}; give an integer")
            self._noise = GumbelNoise(params.seed, vocab_size)

    @property
    def temperature(self) -> float:
        """What logits are divided by; 0: the most probable token is taken."""
        return self._params.temperature

    @property
    def draws(self) -> bool:
        """Whether the noise has a say."""
        return self._noise is not None and self._params.top_k != 1

    def commit(self, tokens: Seq[int]) -> None:
        """Take note of output tokens: those behind the ones committed so far."""
        self._length += len(tokens)
        if self._counts is not None:
            self._counts.add(tokens)
        if self._noise is not None:
            self._noise.forget(self._length)

    def choose(self, logits: np.ndarray, draft_tokens: np.ndarray, mask: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """The token behind each row of a verification: the last committed token, then the draft tokens.

        Args:
            logits: the target's, float32 `[rows, vocab]`; not changed.
            draft_tokens: int32 `[rows - 1]`
            mask: bool `[rows, rows]`: a row sees itself and its ancestors.
            depths: distance of each row to the root, integer `[rows]`.

        Returns:
            int64 `[rows]`, for each row what decoding the draft tokens on its path one by one would choose.
        """
        chosen = np.empty(len(logits), dtype=np.int64)
        size = max(BLOCK // logits.shape[1], 1)
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            chosen[rows] = self._scores(logits[rows], draft_tokens, mask[rows], depths[rows]).argmax(axis=1)
        return chosen

    def scores(self, logits: np.ndarray) -> np.ndarray:
        """What is compared for the next token, float32 `[vocab]`, from the target's logits `[vocab]`."""
        none = np.zeros(0, dtype=np.int32)
        scores = self._scores(logits[None], none, np.ones((1, 1), dtype=bool), np.zeros(1, dtype=np.int32))
        return np.asarray(scores[0])

    def _scores(self, logits: np.ndarray, draft_tokens: np.ndarray, mask: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Processed logits and noise of some rows, float32 `[rows, vocab]`."""
        scores = logits.astype(np.float32)
        if self._counts is not None:
            self._counts.apply(scores, draft_tokens, mask)
        if self._noise is not None:
            filter_logits(scores, self._params)
            for row, depth in zip(scores, depths.tolist(), strict=True):
                row += self._noise.at(self._length + depth)
        return scores

    def draft_noise(self, position: int, ids: np.ndarray | None = None) -> np.ndarray:
        """The noise of `choose` at a sequence position, for a drafter that ranks logits / temperature + noise.

        Args:
            position: the sequence's length or more.
            ids: integer `[ids]`; None: all.

        Returns:
            float32 `[ids]` or, read-only, `[vocab]`.

        Raises:
            ValueError: the temperature is 0.
        """
        if self._noise is None:
            raise ValueError("greedy decoding has no noise")
        noise = self._noise.at(position)
        return noise if ids is None else noise[ids]
