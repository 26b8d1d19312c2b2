"""The safetensors writer, read back with the safetensors library."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from trtspec.checkpoint import writer
from trtspec.checkpoint.shards import SAFETENSORS_DTYPES, TensorInfo, open_tensors, torch_dtype
from trtspec.checkpoint.writer import write_safetensors
from trtspec.errors import CheckpointError

DTYPES = sorted(SAFETENSORS_DTYPES.values())


def layout(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Any:
    return write_safetensors(path, [(name, layout(t)) for name, t in tensors.items()], tensors.__getitem__)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def named_tensors(draw: Callable[..., Any]) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=12).filter(lambda n: n != "__metadata__"), unique=True))
    tensors = {}
    for name in names:
        dtype = torch_dtype(draw(st.sampled_from(DTYPES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        values = torch.randint(-8 if dtype.is_signed else 0, 8, shape, generator=torch.Generator().manual_seed(1))
        tensors[name] = values.to(torch.float32).to(dtype) if dtype.is_floating_point else values.to(dtype)
    return tensors


@settings(max_examples=60, deadline=None)
@given(tensors=named_tensors())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path_factory.mktemp("written") / "model.safetensors"
    ranges = write(path, tensors)
    loaded, source = load_file(path), open_tensors(path.parent)
    assert set(loaded) == set(tensors) == set(ranges) == set(source.tensors)
    data = path.read_bytes()
    position = 8 + int.from_bytes(data[:8], "little")
    assert position % 64 == 0
    for name, tensor in tensors.items():
        for read in (loaded[name], source.load(name)):
            assert read.dtype == tensor.dtype and read.shape == tensor.shape
            assert raw_bytes(read) == raw_bytes(tensor)
        assert source.tensors[name].file_range == ranges[name]
        assert (ranges[name].path, ranges[name].offset) == (path, position)
        assert data[position : position + ranges[name].nbytes] == raw_bytes(tensor)
        position += ranges[name].nbytes
    assert position == len(data)


def test_strided_tensor(tmp_path: Path) -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
    write(tmp_path / "t.safetensors", {"w": tensor})
    assert torch.equal(load_file(tmp_path / "t.safetensors")["w"], tensor)


def test_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    loaded: list[weakref.ref[torch.Tensor]] = []

    def load(name: str) -> torch.Tensor:
        # The tensor last written may still be referred to; none before it.
        assert all(ref() is None for ref in loaded[:-1])
        tensor = torch.full((1000,), float(name))
        loaded.append(weakref.ref(tensor))
        return tensor

    info = TensorInfo("float32", (1000,))
    write_safetensors(tmp_path / "t.safetensors", [(str(n), info) for n in range(6)], load)
    assert [t[0].item() for _, t in sorted(load_file(tmp_path / "t.safetensors").items())] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "float8_e5m2"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bad: float) -> None:
    monkeypatch.setattr(writer, "CHUNK_ELEMENTS", 4)
    values = torch.ones(10)
    values[9] = bad
    with pytest.raises(CheckpointError, match=r"tensor layer\.w holds NaN or infinity"):
        write(tmp_path / "t.safetensors", {"fine": torch.ones(3), "layer.w": values.to(torch_dtype(dtype))})
    assert list(tmp_path.iterdir()) == []


def test_chunks_cover_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK_ELEMENTS", 7)
    tensor = torch.randn(5, 10)
    write(tmp_path / "t.safetensors", {"w": tensor})
    assert torch.equal(load_file(tmp_path / "t.safetensors")["w"], tensor)


@pytest.mark.parametrize("loaded", [torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float16)])
def test_loaded_tensor_must_be_as_declared(tmp_path: Path, loaded: torch.Tensor) -> None:
    declared = [("w", TensorInfo("float32", (3, 2)))]
    with pytest.raises(CheckpointError, match=r"tensor w is float(32|16) .*, expected float32 \[3, 2\]"):
        write_safetensors(tmp_path / "t.safetensors", declared, lambda _: loaded)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write(path, {"w": torch.ones(2)})
    with pytest.raises(CheckpointError):
        write(path, {"w": torch.full((2,), float("nan"))})
    assert torch.equal(load_file(path)["w"], torch.ones(2))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("w", TensorInfo("float32", (1,)))] * 2, "name w is taken"),
        ([("__metadata__", TensorInfo("float32", (1,)))], "name __metadata__ is taken"),
        ([("w", TensorInfo("Q4_1", (1,)))], "dtype Q4_1"),
    ],
)
def test_bad_declarations(tmp_path: Path, entries: list[tuple[str, TensorInfo]], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_safetensors(tmp_path / "t.safetensors", entries, lambda _: torch.zeros(1))


def test_unwritable_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        write(tmp_path / "absent" / "t.safetensors", {"w": torch.zeros(1)})
