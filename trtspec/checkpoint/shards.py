"""Weights by name from safetensors files or PyTorch's .bin files, read lazily."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from trtspec.errors import CheckpointError

logger = logging.getLogger(__name__)

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
SAFETENSORS_FILE, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN_FILE, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is loaded.

    `dtype` is torch's name ("bfloat16") or a GGUF quantisation ("Q4_1"). `file_range` is where the little-endian,
    row-major bytes of `shape` and `dtype` lie in a safetensors file, None where a tensor must be converted first.
    """

    dtype: str
    shape: tuple[int, ...]
    file_range: FileRange | None = None


class TensorSource(Protocol):
    """Tensors by their Hugging Face name."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor's description, read without loading any."""

    def load(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype; GGUF-quantised ones dequantised to float32. Treat it as read-only.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be read.
        """


class SafetensorsSource:
    """Tensors of one or more safetensors files; headers are read at once, tensors on demand, memory-mapped."""

    def __init__(self, paths: list[Path]) -> None:
        """Read the headers.

        Raises:
            CheckpointError: a file is missing, damaged or truncated, or a tensor is in two files.
        """
        self.tensors: dict[str, TensorInfo] = {}
        self._handles: dict[Path, Any] = {}
        for path in paths:
            _add_all(self.tensors, read_header(path), path)
            try:
                self._handles[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged ({_first_line(error)}); fetch it again") from None

    def load(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype, backed by the mapped file."""
        file_range = _find(self.tensors, name).file_range
        assert file_range is not None
        try:
            tensor: torch.Tensor = self._handles[file_range.path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file_range.path}: tensor {name} cannot be read ({_first_line(error)}); fetch the file again"
            ) from None
        return tensor


class TorchBinSource:
    """Tensors of one or more .bin files written by torch.save, memory-mapped where the file format allows it."""

    def __init__(self, paths: list[Path]) -> None:
        """Open the files; pickled code is never run.

        Raises:
            CheckpointError: a file is missing, damaged or holds anything but named tensors, or a tensor is in two.
        """
        self.tensors: dict[str, TensorInfo] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        for path in paths:
            state = _load_bin(path)
            infos = {
                name: TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in state.items()
            }
            _add_all(self.tensors, infos, path)
            self._loaded.update(state)

    def load(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype."""
        _find(self.tensors, name)
        return self._loaded[name]


def open_tensors(directory: Path) -> TensorSource:
    """The weights of a model directory: safetensors if there are any, else PyTorch's .bin files.

    Raises:
        CheckpointError: there are none, or they are damaged or incomplete.
    """
    if (directory / SAFETENSORS_FILE).exists():
        return SafetensorsSource([directory / SAFETENSORS_FILE])
    if (directory / SAFETENSORS_INDEX).exists():
        return _open_indexed(directory / SAFETENSORS_INDEX, SafetensorsSource)
    found = sorted(directory.glob("*.safetensors"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{directory} has {names} but no {SAFETENSORS_INDEX}; add the index file")
    if found:
        return SafetensorsSource(found)
    if (directory / BIN_FILE).exists():
        return TorchBinSource([directory / BIN_FILE])
    if (directory / BIN_INDEX).exists():
        return _open_indexed(directory / BIN_INDEX, TorchBinSource)
    raise CheckpointError(f"{directory} has no weights; expected *.safetensors or {BIN_FILE}")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors a safetensors file declares, and where their bytes lie.

    Raises:
        CheckpointError: the file is missing, damaged, or not as long as its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path} is truncated: {size} bytes, its header alone needs {8 + length}; fetch it again"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path} is no safetensors file: its header isn't JSON; fetch it again") from None
    try:
        infos = {name: _info(path, 8 + length, e) for name, e in header.items() if name != "__metadata__"}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: its header has a malformed entry ({error})") from None
    end = max((_end(info) for info in infos.values()), default=8 + length)
    if end != size:
        state = "truncated" if size < end else "longer than its header says"
        raise CheckpointError(f"{path} is {state}: {size} bytes, expected {end}; fetch it again")
    return infos


def _info(path: Path, data_start: int, entry: Mapping[str, Any]) -> TensorInfo:
    if entry["dtype"] not in SAFETENSORS_DTYPES:
        known = ", ".join(SAFETENSORS_DTYPES)
        raise CheckpointError(f"{path} has a tensor of dtype {entry['dtype']!r}; supported: {known}")
    dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], tuple(int(axis) for axis in entry["shape"])
    start, end = (int(offset) for offset in entry["data_offsets"])
    expected = math.prod(shape) * torch_dtype(dtype).itemsize
    if start < 0 or end - start != expected:
        raise ValueError(f"{dtype} {list(shape)} takes {expected} bytes, offsets are {start} to {end}")
    return TensorInfo(dtype, shape, FileRange(path, data_start + start, expected))


def _end(info: TensorInfo) -> int:
    assert info.file_range is not None
    return info.file_range.offset + info.file_range.nbytes


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a `TensorInfo.dtype`.

    Raises:
        CheckpointError: torch has no such dtype (a GGUF quantisation).
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is no torch dtype; expected one such as float32")
    return dtype


def _open_indexed(index: Path, open_files: Callable[[list[Path]], TensorSource]) -> TensorSource:
    """The shards an index file names, checked to hold every tensor that it promises."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensor names to files")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{index} names {file_name!r}; expected the name of a file beside it")
    paths = [index.parent / file_name for file_name in sorted(set(weight_map.values()))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(f"{index} names {', '.join(missing)}, not there; fetch the missing files")
    source = open_files(paths)
    absent = [name for name in weight_map if name not in source.tensors]
    if absent:
        raise CheckpointError(
            f"{index} places {absent[0]} in {weight_map[absent[0]]}, which has no such tensor "
            f"({len(absent)} missing in all); fetch the checkpoint again"
        )
    return source


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's object.

    Raises:
        CheckpointError: the file is missing, or holds no JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} is not there")
    # Only the zip format can be mapped; the older one must be read whole.
    with path.open("rb") as file:
        mappable = file.read(4) == b"PK\x03\x04"
    if not mappable:
        logger.info("%s has the old torch format and is read whole; safetensors would be read lazily", path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    except Exception as error:  # torch raises whatever its parsers meet: a damaged file can be any kind
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors and was not loaded ({_first_line(error)}); "
            "get a safetensors version of it"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, expected tensors by name")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: {name!r} is a {type(value).__name__}, expected tensors by name")
    return dict(state)


def _add_all(tensors: dict[str, TensorInfo], new: Mapping[str, TensorInfo], path: Path) -> None:
    for name in new:
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name} is also in another file of this checkpoint; remove one")
    tensors.update(new)


def _find(tensors: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    if name not in tensors:
        raise CheckpointError(f"the checkpoint has no tensor {name}")
    return tensors[name]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
