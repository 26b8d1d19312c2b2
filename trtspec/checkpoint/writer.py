"""Writing a safetensors file tensor by tensor, so that no more than one is in memory."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Protocol

import torch

from trtspec.checkpoint.shards import SAFETENSORS_DTYPES, FileRange, torch_dtype
from trtspec.errors import CheckpointError

HEADER_ALIGNMENT = 64
CHUNK_ELEMENTS = 1 << 22


class Layout(Protocol):
    """A tensor's dtype (torch's name) and shape; `TensorInfo` is one."""

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""


def write_safetensors(
    path: Path, tensors: Iterable[tuple[str, Layout]], load: Callable[[str], torch.Tensor]
) -> dict[str, FileRange]:
    """Write the tensors in the given order and return where each one's bytes lie.

    The header is padded so that the data starts at a multiple of 64 bytes; nothing lies between tensors. The file
    appears under its name only when it is complete.

    Raises:
        CheckpointError: a name comes twice, a dtype cannot be stored, a loaded tensor is not as declared or holds
            NaN or infinity, or the file cannot be written.
        OSError: the disk is full.
    """
    header, ranges = _header(path, tensors)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(header)
            for name, (layout, _) in ranges.items():
                _write(file, name, layout, load(name))
        partial.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return {name: file_range for name, (_, file_range) in ranges.items()}


def _header(path: Path, tensors: Iterable[tuple[str, Layout]]) -> tuple[bytes, dict[str, tuple[Layout, FileRange]]]:
    codes = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
    entries: dict[str, dict[str, object]] = {}
    layouts: dict[str, tuple[Layout, int, int]] = {}
    offset = 0
    for name, layout in tensors:
        if name in entries or name == "__metadata__":
            raise CheckpointError(f"{path}: tensor name {name} is taken; every tensor needs its own")
        if layout.dtype not in codes:
            raise CheckpointError(f"{path}: tensor {name} has dtype {layout.dtype}; storable: {', '.join(codes)}")
        nbytes = math.prod(layout.shape) * torch_dtype(layout.dtype).itemsize
        entries[name] = {
            "dtype": codes[layout.dtype],
            "shape": list(layout.shape),
            "data_offsets": [offset, offset + nbytes],
        }
        layouts[name] = (layout, offset, nbytes)
        offset += nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    start = 8 + len(text)
    ranges = {n: (layout, FileRange(path, start + at, nbytes)) for n, (layout, at, nbytes) in layouts.items()}
    return len(text).to_bytes(8, "little") + text, ranges


def _write(file: BinaryIO, name: str, layout: Layout, tensor: torch.Tensor) -> None:
    dtype = torch_dtype(layout.dtype)
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(layout.shape):
        raise CheckpointError(
            f"tensor {name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, "
            f"expected {layout.dtype} {list(layout.shape)}"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        chunk = flat[start : start + CHUNK_ELEMENTS]
        _check_finite(name, chunk)
        file.write(chunk.view(torch.uint8).numpy().data)


def _check_finite(name: str, chunk: torch.Tensor) -> None:
    if not chunk.is_floating_point():
        return
    # torch has no isfinite for 8-bit floats.
    values = chunk.float() if chunk.element_size() == 1 else chunk
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"tensor {name} holds NaN or infinity; the checkpoint is damaged or overflows its dtype")
