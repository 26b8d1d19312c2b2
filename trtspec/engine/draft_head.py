"""Running an EAGLE draft head's engines."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from trtspec import sampling, tensors
from trtspec.checkpoint.draft_head import DraftHeadConfig
from trtspec.engine.base import Buckets, CacheView, Engine, EngineClock
from trtspec.engine.embedding import Embedding
from trtspec.engine.target import LmHead, Rows


class HeadOutput(NamedTuple):
    """What the head computes of its rows; both belong to the engine: valid until the head's next pass."""

    feedback: torch.Tensor
    """The hidden states that children of these rows take, `[batch, width, hidden]`."""
    logit_hidden: torch.Tensor
    """What the draft LM head reads, `[batch, width, hidden]`."""


class RowNoise(NamedTuple):
    """How the target's choice behind a row is made random: what is drafted follows the same noise."""

    temperature: float
    values: np.ndarray
    """float32 `[vocab]`: added to the target's logits / temperature."""


Noise = Seq[RowNoise | None]
"""Of each row; None where the target's choice is its most probable token."""


class DraftHeadRunner(EngineClock):
    """Runs a draft head; counts the seconds spent inside engines."""

    buckets: Buckets = Buckets()

    def __init__(
        self,
        config: DraftHeadConfig,
        embedding: Embedding,
        body: Engine,
        lm_head: LmHead,
        *,
        fuse: Engine | None = None,
        token_ids: torch.Tensor | None = None,
        owns_lm_head: bool = True,
        buckets: Buckets | None = None,
    ) -> None:
        """Nothing is copied but `token_ids`.

        Args:
            embedding: the target's, or the head's own.
            lm_head: the target's own engine where the head drafts with it.
            fuse: EAGLE-3's fc over the target's features.
            token_ids: int32 `[draft_vocab]`, the target's id of each row of the LM head; None is the identity.
            owns_lm_head: whether `close` frees it.
            buckets: sizes that passes are padded to; None: no padding.
        """
        super().__init__()
        self.config = config
        self.buckets = buckets or Buckets()
        self._embedding = embedding
        self._body = body
        self._lm_head = lm_head
        self._fuse = fuse
        self._token_ids = None if token_ids is None else token_ids.cpu().numpy().copy()
        self._owns_lm_head = owns_lm_head

    def first_hidden(self, features: torch.Tensor) -> torch.Tensor:
        """What rows with the target's features `[rows, features]` take: `[rows, hidden]`, valid until the next call."""
        if self._fuse is None:
            return features
        return self._timed(self._fuse, {tensors.FEATURES: features})[tensors.FUSED]

    def forward(self, rows: Rows, hidden: torch.Tensor, cache: CacheView) -> HeadOutput:
        """Run the head's layers; the rows' KV is written behind the cache's.

        Args:
            hidden: contiguous `[batch, width, hidden]` on the head's device, no part of its last output.
        """
        inputs = {**rows.inputs(self._embedding, self._body.device), tensors.HIDDEN_INPUT: hidden}
        outputs = self._timed(self._body, inputs, cache)
        feedback = outputs[tensors.FEEDBACK]
        return HeadOutput(feedback, outputs.get(tensors.LOGIT_HIDDEN, feedback))

    def best_tokens(self, hidden_rows: torch.Tensor, noise: Noise = ()) -> np.ndarray:
        """The target's id of the likeliest token behind each contiguous row `[rows, hidden]`: integer `[rows]`."""
        return self._target_ids(sampling.greedy(self._logits(hidden_rows, noise)))

    def top_tokens(self, hidden_rows: torch.Tensor, count: int, noise: Noise = ()) -> tuple[np.ndarray, np.ndarray]:
        """The `count` likeliest tokens behind each row, best first; of equals, the lower row of the LM head first.

        With noise, what is likely depends on it, and the log-probabilities are those of the perturbed logits.

        Args:
            hidden_rows: contiguous `[rows, hidden]`.
            count: at most draft_vocab.
            noise: of each row; empty where no row has any.

        Returns:
            The target's ids, integer `[rows, count]`, and their log-probabilities, float32 `[rows, count]`.
        """
        draft_ids, log_probs = sampling.top_k(self._logits(hidden_rows, noise), count)
        return self._target_ids(draft_ids), log_probs

    def close(self) -> None:
        """Free the engines that are the head's own."""
        for engine in (self._body, self._fuse, self._lm_head.engine if self._owns_lm_head else None):
            if engine is not None:
                engine.close()

    def _logits(self, hidden_rows: torch.Tensor, noise: Noise) -> torch.Tensor:
        """Logits `[rows, draft_vocab]`, perturbed, valid until the LM head's next run."""
        logits = self._timed(self._lm_head.engine, self._lm_head.inputs(hidden_rows))[tensors.LOGITS]
        for row, own in enumerate(noise):
            if own is not None:
                values = own.values if self._token_ids is None else own.values[self._token_ids]
                perturb(logits[row], own.temperature, values[: logits.shape[1]])
        return logits

    def _target_ids(self, draft_ids: np.ndarray) -> np.ndarray:
        return draft_ids if self._token_ids is None else self._token_ids[draft_ids]


def perturb(logits: torch.Tensor, temperature: float, noise: np.ndarray) -> None:
    """Divide one row's logits `[draft_vocab]` by the temperature and add noise, in place."""
    if logits.is_cpu:
        host = logits.numpy()
        host /= temperature
        host += noise
    else:
        logits.div_(temperature).add_(torch.from_numpy(np.ascontiguousarray(noise)).to(logits))
