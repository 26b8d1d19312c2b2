"""What a run binds: sizes of the named axes, the optimisation profile that admits them, and the CUDA graphs kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from trtspec.engine.base import TORCH_DTYPES
from trtspec.errors import EngineError
from trtspec.tensors import TensorSpec

ProfileRanges = Mapping[str, tuple[int, int]]
"""(min, max) of each named axis."""

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Bucket:
    """Everything that a captured graph has fixed."""

    profile: int
    sizes: tuple[tuple[str, int], ...]
    bound: tuple[int, ...]
    """Addresses of the tensors that are bound where they lie, and the KV cache's key."""


def check_inputs(
    graph: str, declared: Iterable[TensorSpec], inputs: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, int]:
    """The size of each named axis.

    Raises:
        EngineError: an input is missing, or has another dtype, device, layout or shape than declared, or two inputs
            disagree about an axis.
    """
    sizes: dict[str, int] = {}
    for tensor in declared:
        what = f"{graph}: input {tensor.name}"
        value = inputs.get(tensor.name)
        if value is None:
            raise EngineError(f"{what} is missing")
        if value.dtype != TORCH_DTYPES[tensor.dtype] or value.device != device or not value.is_contiguous():
            layout = "contiguous" if value.is_contiguous() else "not contiguous"
            raise EngineError(
                f"{what} is {value.dtype} on {value.device}, {layout}; expected contiguous {tensor.dtype} on {device}"
            )
        if value.dim() != len(tensor.axes):
            raise EngineError(f"{what} has shape {tuple(value.shape)}, expected {tensor.axes}")
        for axis, size in zip(tensor.axes, value.shape, strict=True):
            expected = sizes.setdefault(axis, size) if isinstance(axis, str) else axis
            if size != expected:
                raise EngineError(f"{what} has shape {tuple(value.shape)}, expected {tensor.axes} with {sizes}")
    return sizes


def select_profile(graph: str, profiles: Sequence[ProfileRanges], sizes: Mapping[str, int]) -> int:
    """The first profile that admits the sizes: decode before prefill, as they were built.

    Raises:
        EngineError: none does; names the ranges.
    """
    for index, ranges in enumerate(profiles):
        if all(ranges[axis][0] <= size <= ranges[axis][1] for axis, size in sizes.items()):
            return index
    built = " or ".join(
        ", ".join(f"{axis} {low}..{high}" for axis, (low, high) in ranges.items()) for ranges in profiles
    )
    asked = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    raise EngineError(f"the engine of {graph} was built for {built}, asked for {asked}; rebuild it with larger limits")


class GraphCache(Generic[Entry]):
    """The captured graphs, least recently used first out, and a memory of the buckets seen once.

    Most shapes of a prompt's prefill never return: only a bucket's second use pays for a capture.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Bucket, Entry] = OrderedDict()
        self._seen: OrderedDict[Bucket, None] = OrderedDict()

    def get(self, bucket: Bucket) -> Entry | None:
        """The bucket's graph, which thereby is the most recently used one; None if there is none."""
        if bucket not in self._entries:
            return None
        self._entries.move_to_end(bucket)
        return self._entries[bucket]

    def comes_back(self, bucket: Bucket) -> bool:
        """Whether a graph is worth capturing: the bucket was asked about before, not too long ago."""
        if not self._capacity:
            return False
        if bucket in self._seen:
            del self._seen[bucket]
            return True
        self._seen[bucket] = None
        if len(self._seen) > 4 * self._capacity:
            self._seen.popitem(last=False)
        return False

    def put(self, bucket: Bucket, entry: Entry) -> Entry | None:
        """Keep a graph; the one that had to make room is returned and must be freed by the caller."""
        self._entries[bucket] = entry
        return self._entries.popitem(last=False)[1] if len(self._entries) > self._capacity else None

    def clear(self) -> list[Entry]:
        """Forget everything; the graphs are returned and must be freed by the caller."""
        entries = list(self._entries.values())
        self._entries.clear()
        self._seen.clear()
        return entries
