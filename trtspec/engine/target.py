"""The target's parts as one object: embedding table, body, LM head."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from trtspec import tensors
from trtspec.engine.base import TORCH_DTYPES, Buckets, CacheView, Engine, EngineClock
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

    def inputs(self, embedding: Embedding, device: torch.device) -> dict[str, torch.Tensor]:
        """What a graph of decoder layers on a device takes of them."""
        rows = self if device.type == "cpu" else Rows(*[tensor.to(device) for tensor in self])
        return {
            tensors.INPUTS_EMBEDS: embedding.rows(rows.tokens),
            tensors.POSITION_IDS: rows.positions,
            tensors.CACHE_LENGTH: rows.cache_length,
            tensors.TREE_MASK: rows.mask,
        }


class LmHead(NamedTuple):
    """An LM head's engine, and its weight `[vocab, hidden]` where the graph takes that as an input."""

    engine: Engine
    weight: torch.Tensor | None = None

    def inputs(self, hidden_rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the engine takes of contiguous hidden rows `[rows, hidden]`."""
        weight = {} if self.weight is None else {tensors.LM_HEAD_WEIGHT: self.weight}
        return {tensors.HIDDEN_ROWS: hidden_rows, **weight}


class Pass(NamedTuple):
    """What a pass computes of its rows; both belong to the engine: valid until the target's next pass."""

    hidden: torch.Tensor
    """After the final norm, `[batch, width, hidden]`."""
    features: torch.Tensor
    """What a draft head takes, `[batch, width, features]`: the tapped residual streams, or else `hidden` itself."""


class Target(EngineClock):
    """Runs the target; counts the seconds spent inside engines."""

    buckets: Buckets = Buckets()

    def __init__(
        self,
        embedding: torch.Tensor,
        body: Engine,
        lm_head: LmHead,
        buckets: Buckets | None = None,
    ) -> None:
        """Nothing is copied.

        Args:
            embedding: the table `[vocab, hidden]`, wherever it lies.
            buckets: sizes that decode passes are padded to; None: no padding.
        """
        super().__init__()
        self.buckets = buckets or Buckets()
        self.embedding = Embedding(embedding)
        self.lm_head = lm_head
        self._body = body

    def forward(self, rows: Rows, cache: CacheView) -> Pass:
        """The hidden states of rows whose KV is written behind the cache's."""
        outputs = self._timed(self._body, rows.inputs(self.embedding, self._body.device), cache)
        hidden = outputs[tensors.HIDDEN_STATES]
        return Pass(hidden, outputs.get(tensors.AUX_HIDDEN_STATES, hidden))

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, vocab]` of contiguous hidden rows `[rows, hidden]`."""
        return self._timed(self.lm_head.engine, self.lm_head.inputs(hidden_rows))[tensors.LOGITS]

    def close(self) -> None:
        """Free the engines."""
        self._body.close()
        self.lm_head.engine.close()


def map_weight(directory: Path, ref: WeightRef) -> torch.Tensor:
    """A weight as a tensor over its memory-mapped file: no copy, pages are read when touched."""
    file = directory / ref.location
    whole = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    return whole[ref.offset : ref.offset + ref.nbytes].view(TORCH_DTYPES[ref.dtype]).view(ref.shape)
