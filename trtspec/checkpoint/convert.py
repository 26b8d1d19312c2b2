"""Putting a checkpoint's weights into an engine directory: once, in the serving dtype, or referenced in place."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from trtspec.checkpoint.shards import FileRange, TensorInfo, TensorSource, torch_dtype
from trtspec.checkpoint.writer import write_safetensors
from trtspec.errors import CheckpointError
from trtspec.tensors import ITEM_SIZES, WeightRef

logger = logging.getLogger(__name__)


def place_weights(
    source: TensorSource,
    shapes: Mapping[str, tuple[int, ...]],
    directory: Path,
    folder: str,
    name: str,
    dtype: str,
    *,
    link: bool = True,
) -> dict[str, WeightRef]:
    """Make the named weights available below `directory`/`folder` in `dtype`.

    Safetensors files that hold them in that dtype already are hard-linked (copied where the file system can't link);
    everything else is written to `folder`/`name`, one tensor at a time.

    Args:
        link: False writes them even where they could be linked, for files that hold much else.

    Raises:
        CheckpointError: a weight holds NaN or infinity, or overflows `dtype`; the files cannot be written.
    """
    (directory / folder).mkdir(parents=True, exist_ok=True)
    if link and usable_in_place(source, shapes, dtype):
        return _link(source, shapes, directory, folder)
    layout = [(weight, TensorInfo(dtype, shape)) for weight, shape in shapes.items()]
    ranges = write_safetensors(
        directory / folder / name, layout, lambda weight: convert(weight, source.load(weight), dtype)
    )
    return {
        weight: WeightRef(f"{folder}/{name}", at.offset, at.nbytes, dtype, shapes[weight])
        for weight, at in ranges.items()
    }


def convert(weight: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A weight in another dtype.

    Raises:
        CheckpointError: a value overflows it.
    """
    converted = tensor.to(torch_dtype(dtype))
    if converted.dtype != tensor.dtype and converted.isinf().any() and not tensor.isinf().any():
        raise CheckpointError(f"tensor {weight} overflows {dtype}; choose --dtype bfloat16 or float32")
    return converted


def usable_in_place(source: TensorSource, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bool:
    """Whether all these weights lie in safetensors files, in `dtype`, at offsets a tensor can be mapped at."""
    size = ITEM_SIZES[dtype]
    infos = [source.tensors[weight] for weight in shapes]
    return all(
        info.dtype == dtype and info.file_range is not None and info.file_range.offset % size == 0 for info in infos
    )


def written_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    """Bytes these weights take in `dtype`."""
    return sum(math.prod(shape) for shape in shapes.values()) * ITEM_SIZES[dtype]


def _link(
    source: TensorSource, shapes: Mapping[str, tuple[int, ...]], directory: Path, folder: str
) -> dict[str, WeightRef]:
    refs: dict[str, WeightRef] = {}
    for weight, shape in shapes.items():
        if not torch.isfinite(source.load(weight)).all():
            raise CheckpointError(f"tensor {weight} holds NaN or infinity; the checkpoint is damaged")
        info = source.tensors[weight]
        at = info.file_range
        assert at is not None
        _link_file(at, directory / folder)
        refs[weight] = WeightRef(f"{folder}/{at.path.name}", at.offset, at.nbytes, info.dtype, shape)
    return refs


def _link_file(at: FileRange, folder: Path) -> None:
    destination = folder / at.path.name
    if destination.exists():
        return
    # Hub caches hold symbolic links, which ONNX Runtime refuses to follow out of a model's directory.
    original = at.path.resolve()
    try:
        os.link(original, destination)
    except OSError as error:
        logger.info("%s cannot be linked (%s) and is copied", original, error.strerror)
        try:
            shutil.copyfile(original, destination)
        except OSError as failure:
            raise CheckpointError(f"{destination} cannot be written: {failure.strerror or failure}") from None
