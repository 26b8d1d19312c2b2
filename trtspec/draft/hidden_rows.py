"""Rows of hidden states, picked, joined and put in place.

On the host NumPy does it: torch has a higher price per call, and would share larger copies with threads that it then
waits for while the engines' own threads keep the cores busy.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch


def zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Zeros of the dtype of `like`, on its device."""
    if like.is_cpu:
        return torch.from_numpy(np.zeros(shape, dtype=like.numpy().dtype))
    return like.new_zeros(shape)


def copy_rows(values: torch.Tensor, index: Seq[int]) -> torch.Tensor:
    """A copy of these rows of `[rows, hidden]`."""
    if values.is_cpu:
        return torch.from_numpy(values.numpy().take(index, axis=0))
    if _is_run(index):
        return values[index[0] : index[-1] + 1].clone()
    return values.index_select(0, torch.tensor(index, device=values.device))


def view_rows(values: torch.Tensor, index: Seq[int]) -> torch.Tensor:
    """Rows of `[slots, width, hidden]`, counted over all slots: `[rows, hidden]`, without a copy where possible."""
    flat = values.view(-1, values.shape[2])
    return flat[index[0] : index[-1] + 1] if _is_run(index) else copy_rows(flat, index)


def put_rows(target: torch.Tensor, source: torch.Tensor, index: Seq[int] | np.ndarray) -> None:
    """Write these rows of `source` `[rows, hidden]` to `target` `[len(index), hidden]`."""
    if source.is_cpu:
        # mode "clip" writes to `out` without a buffer; all indices are in range.
        source.numpy().take(index, axis=0, out=target.numpy(), mode="clip")
    else:
        torch.index_select(source, 0, torch.as_tensor(index, device=source.device), out=target)


def join_rows(parts: Seq[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts `[rows, hidden]`; of one part, the part itself."""
    if len(parts) == 1:
        return parts[0]
    return (
        torch.from_numpy(np.concatenate([part.numpy() for part in parts])) if parts[0].is_cpu else torch.cat([*parts])
    )


def _is_run(index: Seq[int]) -> bool:
    """Whether the numbers, of which there is at least one, count up."""
    return list(index) == list(range(index[0], index[0] + len(index)))
