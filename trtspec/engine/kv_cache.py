"""The KV cache: one preallocated block, a slot per sequence, updated in place by the engines."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch

from trtspec.engine.base import CacheView
from trtspec.plugins.kernels import launch
from trtspec.tensors import cache_names

KvCommit = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class KeptPath(NamedTuple):
    """What one slot keeps of a tree whose rows were written at start + row."""

    slot: int
    start: int
    rows: list[int]
    """Increasing, from the root (0) on."""

    @property
    def is_in_place(self) -> bool:
        """Whether there is nothing to move: a chain's rows are where they belong."""
        return self.rows[-1] == len(self.rows) - 1


class KVCache:
    """Keys and values of all layers, `[2 * layers, slots, kv_heads, rows, head_dim]` in one allocation.

    Layer by layer, key before value. On the CPU the pages of unused rows are never touched, so they cost no memory.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        slots: int,
        num_kv_heads: int,
        rows: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block = _zeros((2 * num_layers, slots, num_kv_heads, rows, head_dim), dtype, device)
        # NumPy moves rows on the host: torch would share the copy with threads, and wait for them while the engines'
        # own threads keep the cores busy.
        self._host = self.block.numpy() if self.block.is_cpu and dtype != torch.bfloat16 else None
        # One launch for a batch; without triton, rows are moved slot by slot.
        self._commit: KvCommit | None = launch.kv_commit if self.block.is_cuda and find_spec("triton") else None
        self._names = [past for past, _ in cache_names(num_layers)]
        self._views: dict[tuple[int, int], CacheView] = {}

    @property
    def slots(self) -> int:
        """Sequences that fit."""
        return self.block.shape[1]

    def view(self, start: int, count: int) -> CacheView:
        """The cache of slots start..start+count-1; equal arguments give the same object."""
        key = (start, count)
        if key not in self._views:
            part = self.block[:, start : start + count]
            self._views[key] = CacheView(key, {name: part[i] for i, name in enumerate(self._names)})
        return self._views[key]

    def keep_paths(self, paths: Seq[KeptPath]) -> None:
        """Move the accepted rows of a batch's trees to where their paths go on; at most one path for each slot."""
        paths = [path for path in paths if not path.is_in_place]
        if not paths:
            return
        if self._commit is None:
            for path in paths:
                self.keep_path(*path)
            return
        batch = 1 + max(path.slot for path in paths)
        # Kernels are compiled for a number of rows: powers of two are few.
        nodes = 1 << (max(len(path.rows) for path in paths) - 1).bit_length()
        # Rows: start, number of accepted rows, those rows.
        table = np.zeros((2 + nodes, batch), dtype=np.int32)
        for slot, start, (_, *rows) in paths:
            table[0, slot], table[1, slot], table[2 : 2 + len(rows), slot] = start, len(rows), rows
        sent = torch.from_numpy(table).to(self.block.device)
        self._commit(self.block, sent[0], sent[2:].T.contiguous(), sent[1])

    def keep_path(self, slot: int, start: int, rows: list[int]) -> None:
        """Move the accepted rows of a tree, written at start + row, to start, start + 1, ...

        `rows` are increasing; a chain's rows are where they belong already.
        """
        in_place = next((place for place, row in enumerate(rows) if row != place), len(rows))
        sources = [start + row for row in rows[in_place:]]
        if not sources:
            return
        moved = slice(start + in_place, start + len(rows))
        if self._host is not None:
            part = self._host[:, slot]
            part[:, :, moved] = part[:, :, sources]
        else:
            index = torch.tensor(sources, device=self.block.device)
            self.block[:, slot, :, moved] = self.block[:, slot].index_select(2, index)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` rows of one slot to another."""
        self.block[:, destination, :, :length] = self.block[:, source, :, :length]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because masked rows are multiplied by an attention weight of 0, which garbage (NaN) would survive."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write every page, and huge pages would make the first token of each head cost 2 MB: map
    # anonymous memory, whose small pages are zero when they are first touched.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
