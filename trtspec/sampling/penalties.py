"""Repetition, presence and frequency penalties, for the rows of a draft tree as if they were decoded one by one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trtspec.config import SamplingParams


class TokenCounts:
    """How often each token occurs in one sequence, and what that costs it.

    First the repetition penalty for tokens of prompt and output (CTRL, Keskar et al. 2019), then the frequency and
    presence penalties for tokens of the output (OpenAI's definition): vLLM's order.
    """

    def __init__(self, params: SamplingParams, prompt: np.ndarray, vocab_size: int) -> None:
        """`prompt` is integer `[prompt]`, ids below `vocab_size`."""
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        # Occurrences in the output; -1: neither in the prompt nor in the output.
        self._counts = np.full(vocab_size, -1, dtype=np.int64)
        # The ids that have a count; work is done for these alone.
        self._ids = np.empty(vocab_size, dtype=np.int64)
        self._num_ids = 0
        # Only the repetition penalty asks for the prompt.
        if self._repetition != 1:
            ids = np.unique(prompt)
            self._counts[ids] = 0
            self._ids[: len(ids)] = ids
            self._num_ids = len(ids)

    def add(self, tokens: Iterable[int]) -> None:
        """Count output tokens that were committed."""
        for token in tokens:
            if self._counts[token] < 0:
                self._counts[token] = 0
                self._ids[self._num_ids] = token
                self._num_ids += 1
            self._counts[token] += 1

    def apply(self, logits: np.ndarray, draft_tokens: np.ndarray, mask: np.ndarray) -> None:
        """Penalise each row by the committed tokens and the draft tokens on its path.

        Args:
            logits: float32 `[rows, vocab]`, changed in place.
            draft_tokens: integer `[drafts]`.
            mask: bool `[rows, 1 + drafts]`: what a row sees of the root, which is committed already, and of the drafts.
        """
        ids = self._ids[: self._num_ids]
        draft_ids, columns = np.unique(draft_tokens, return_inverse=True)
        rows, drafts = np.nonzero(mask[:, 1:])
        size = len(logits) * len(draft_ids)
        drafted = np.bincount(rows * len(draft_ids) + columns[drafts], minlength=size)
        drafted = drafted.reshape(len(logits), len(draft_ids))
        counts = self._counts[draft_ids]
        # Draft tokens that are committed too belong to both groups: their raw values are read before any is written.
        raw = logits[:, draft_ids]
        logits[:, ids] = self._penalised(logits[:, ids], self._counts[ids])
        logits[:, draft_ids] = self._penalised(raw, np.where(drafted > 0, np.maximum(counts, 0) + drafted, counts))

    def _penalised(self, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Of logits, float32 `[rows, ids]`, and counts, `[ids]` or `[rows, ids]`."""
        repeated = np.where(values > 0, values / self._repetition, values * self._repetition)
        values = np.where(counts >= 0, repeated, values)
        outputs = np.maximum(counts, 0).astype(np.float32)
        values -= self._frequency * outputs
        values -= self._presence * (outputs > 0)
        return values
