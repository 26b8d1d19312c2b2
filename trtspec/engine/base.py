"""What every engine runtime offers: a compiled graph that runs on torch tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from trtspec.tensors import GraphSpec

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}


@dataclass(frozen=True)
class CacheView:
    """The KV cache tensors that one run binds: slots [start, start + batch)."""

    key: tuple[int, int]
    """(start, batch); engines keep one binding, or one captured graph, per key, so a key always means one memory."""
    tensors: Mapping[str, torch.Tensor]
    """Input name -> contiguous view `[batch, kv_heads, cache_rows, head_dim]` on the device, updated in place."""


@dataclass(frozen=True)
class Buckets:
    """Sizes that passes are padded to, so that few distinct shapes occur (one CUDA graph serves each)."""

    widths: tuple[int, ...] = ()
    """Ascending; a pass takes the first that fits, or its own width where none does."""
    live_step: int = 1
    """live_len is rounded up to a multiple of this, but not beyond `max_live`."""
    max_live: int = 0

    def width(self, width: int) -> int:
        """The width to run a pass of this width at."""
        return next((bucket for bucket in self.widths if bucket >= width), width)

    def live(self, length: int) -> int:
        """The live length to run a pass of this live length at."""
        if self.live_step == 1:
            return length
        return max(length, min(-(-length // self.live_step) * self.live_step, self.max_live))


class EngineClock:
    """Runs engines and counts the seconds spent inside them."""

    def __init__(self) -> None:
        self.engine_seconds = 0.0

    def _timed(
        self, engine: Engine, inputs: Mapping[str, torch.Tensor], cache: CacheView | None = None
    ) -> dict[str, torch.Tensor]:
        start = time.perf_counter()
        outputs = engine.run(inputs, cache)
        self.engine_seconds += time.perf_counter() - start
        return outputs


class Engine(Protocol):
    """A compiled graph with the inputs and outputs that `spec` declares."""

    spec: GraphSpec
    device: torch.device

    def run(self, inputs: Mapping[str, torch.Tensor], cache: CacheView | None = None) -> dict[str, torch.Tensor]:
        """Run the graph once.

        Args:
            inputs: every input that is not a KV cache tensor, by name: contiguous, on `device`, of the dtype in
                `spec`; the named axes agree with each other and with the cache.
            cache: the KV cache inputs; needed exactly when `spec.aliases` is not empty. An output that aliases a
                cache input is bound to that input's memory and not returned.

        Returns:
            The other outputs by name. They belong to the engine: valid until its next run.

        Raises:
            EngineError: an input does not fit `spec`, or the runtime failed.
        """
        ...

    def close(self) -> None:
        """Free the engine's memory; nothing may be run afterwards."""
        ...
