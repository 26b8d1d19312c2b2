"""The target's parts as one object: embedding table, body, LM head."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch

from trtspec import tensors
from trtspec.engine.base import TORCH_DTYPES, Buckets, CacheView, Engine
from trtspec.engine.embedding import Embedding
from trtspec.tensors import WeightRef


class Rows(NamedTuple):
    """The rows of one pass over a batch; all tensors contiguous."""

    tokens: torch.Tensor
    """int32 `[batch, width]`"""
    positions: torch.Tensor
    """int64 `[batch, width]`"""
    cache_length: torch.Tensor
    """int64 `[batch]`"""
    mask: torch.Tensor
    """bool `[batch, 1, width, live_len]`"""

    def to(self, device: torch.device) -> Rows:
        """The same on a device."""
        return Rows(*[tensor.to(device) for tensor in (self.tokens, self.positions, self.cache_length, self.mask)])


class Pass(NamedTuple):
    """What a pass computes of its rows; both belong to the engine: valid until the target's next pass."""

    hidden: torch.Tensor
    """After the final norm, `[batch, width, hidden]`."""
    features: torch.Tensor
    """What a draft head takes, `[batch, width, features]`: the tapped residual streams, or else `hidden` itself."""


class Target:
    """Runs the target; counts the seconds spent inside engines."""

    buckets: Buckets = Buckets()

    def __init__(
        self,
        embedding: torch.Tensor,
        body: Engine,
        lm_head: Engine,
        lm_head_weight: torch.Tensor | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        """Nothing is copied.

        Args:
            embedding: the table `[vocab, hidden]`, wherever it lies.
            lm_head_weight: `[vocab, hidden]`, where the LM head's graph takes its weight as an input.
            buckets: sizes that decode passes are padded to; None: no padding.
        """
        self.buckets = buckets or Buckets()
        self.embedding = Embedding(embedding)
        self.lm_head = lm_head
        self.lm_head_weight = lm_head_weight
        self._body = body
        self._lm_head_inputs = {} if lm_head_weight is None else {tensors.LM_HEAD_WEIGHT: lm_head_weight}
        self.engine_seconds = 0.0

    def forward(self, rows: Rows, cache: CacheView) -> Pass:
        """The hidden states of rows whose KV is written behind the cache's."""
        if self._body.device.type != "cpu":
            rows = rows.to(self._body.device)
        inputs = {
            tensors.INPUTS_EMBEDS: self.embedding.rows(rows.tokens),
            tensors.POSITION_IDS: rows.positions,
            tensors.CACHE_LENGTH: rows.cache_length,
            tensors.TREE_MASK: rows.mask,
        }
        outputs = self._timed(self._body, inputs, cache)
        hidden = outputs[tensors.HIDDEN_STATES]
        return Pass(hidden, outputs.get(tensors.AUX_HIDDEN_STATES, hidden))

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, vocab]` of contiguous hidden rows `[rows, hidden]`."""
        inputs = {tensors.HIDDEN_ROWS: hidden_rows, **self._lm_head_inputs}
        return self._timed(self.lm_head, inputs)[tensors.LOGITS]

    def close(self) -> None:
        """Free the engines."""
        self._body.close()
        self.lm_head.close()

    def _timed(
        self, engine: Engine, inputs: dict[str, torch.Tensor], cache: CacheView | None = None
    ) -> dict[str, torch.Tensor]:
        start = time.perf_counter()
        outputs = engine.run(inputs, cache)
        self.engine_seconds += time.perf_counter() - start
        return outputs


def map_weight(directory: Path, ref: WeightRef) -> torch.Tensor:
    """A weight as a tensor over its memory-mapped file: no copy, pages are read when touched."""
    file = directory / ref.location
    whole = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    return whole[ref.offset : ref.offset + ref.nbytes].view(TORCH_DTYPES[ref.dtype]).view(ref.shape)
