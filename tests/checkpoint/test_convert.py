"""Placing weights: linked where they already are what is served, written in the serving dtype otherwise."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trtspec.checkpoint.convert import place_weights, usable_in_place, written_bytes
from trtspec.checkpoint.shards import SafetensorsSource, TensorSource, TorchBinSource, torch_dtype
from trtspec.errors import CheckpointError
from trtspec.tensors import WeightRef

DTYPES = ("float32", "float16", "bfloat16")
SHAPES = {"embedding": (6, 4), "norm": (5,), "head": (2, 3)}


def make_weights(dtype: str) -> dict[str, torch.Tensor]:
    """Random weights."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(torch_dtype(dtype)) for name, shape in SHAPES.items()}


def saved(directory: Path, weights: Mapping[str, torch.Tensor], name: str = "model.safetensors") -> SafetensorsSource:
    """The weights in a safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), directory / name)
    return SafetensorsSource([directory / name])


def place(source: TensorSource, directory: Path, dtype: str) -> dict[str, WeightRef]:
    """Place all weights below `directory`/weights."""
    return place_weights(source, SHAPES, directory, "weights", "target.safetensors", dtype)


def read(directory: Path, ref: WeightRef) -> torch.Tensor:
    """The bytes a reference names."""
    data = (directory / ref.location).read_bytes()[ref.offset : ref.offset + ref.nbytes]
    return torch.frombuffer(bytearray(data), dtype=torch_dtype(ref.dtype)).reshape(ref.shape)


def check(directory: Path, refs: Mapping[str, WeightRef], weights: Mapping[str, torch.Tensor], dtype: str) -> None:
    """The references name the weights, rounded to the dtype."""
    assert set(refs) == set(SHAPES)
    for name, ref in refs.items():
        expected = weights[name].to(torch_dtype(dtype))
        assert (ref.dtype, ref.shape, ref.nbytes) == (dtype, SHAPES[name], expected.nbytes)
        assert torch.equal(read(directory, ref), expected), name


def names(directory: Path) -> list[str]:
    """Every file below a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [*DTYPES, "float64"])
def test_written_in_the_serving_dtype(tmp_path: Path, stored: str, dtype: str) -> None:
    weights = make_weights(stored)
    source = saved(tmp_path / "hf", weights)
    refs = place(source, tmp_path / "engine", dtype)
    check(tmp_path / "engine", refs, weights, dtype)
    expected = "weights/model.safetensors" if stored == dtype else "weights/target.safetensors"
    assert names(tmp_path / "engine") == [expected]
    assert usable_in_place(source, SHAPES, dtype) == (stored == dtype)
    loaded = load_file(tmp_path / "engine" / expected)
    assert all(torch.equal(loaded[name], weights[name].to(torch_dtype(dtype))) for name in SHAPES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linked_where_the_dtype_is_the_same(tmp_path: Path, dtype: str) -> None:
    weights = make_weights(dtype)
    source = saved(tmp_path / "hf", weights)
    original = tmp_path / "hf" / "model.safetensors"
    before = original.read_bytes()
    refs = place(source, tmp_path / "engine", dtype)
    linked = tmp_path / "engine" / "weights" / "model.safetensors"
    assert linked.samefile(original)
    assert original.stat().st_nlink == 2
    assert original.read_bytes() == before
    check(tmp_path / "engine", refs, weights, dtype)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_copied_where_links_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    weights = make_weights("float32")
    source = saved(tmp_path / "hf", weights)

    def refuse(source: Path, destination: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    refs = place(source, tmp_path / "engine", "float32")
    copied, original = tmp_path / "engine" / "weights" / "model.safetensors", tmp_path / "hf" / "model.safetensors"
    assert not copied.samefile(original)
    assert copied.read_bytes() == original.read_bytes()
    check(tmp_path / "engine", refs, weights, "float32")


def test_disk_full_while_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "hf", make_weights("float32"))

    def fail(source: Path, destination: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be written: No space left on device"):
        place(source, tmp_path / "engine", "float32")


def test_every_shard_is_linked_once(tmp_path: Path) -> None:
    weights = make_weights("float16")
    shards = {"a.safetensors": ["embedding", "norm"], "b.safetensors": ["head"]}
    for name, tensors in shards.items():
        saved(tmp_path / "hf", {tensor: weights[tensor] for tensor in tensors}, name)
    source = SafetensorsSource([tmp_path / "hf" / name for name in shards])
    refs = place(source, tmp_path / "engine", "float16")
    assert names(tmp_path / "engine") == ["weights/a.safetensors", "weights/b.safetensors"]
    assert {ref.location for ref in refs.values()} == {"weights/a.safetensors", "weights/b.safetensors"}
    check(tmp_path / "engine", refs, weights, "float16")


def test_one_weight_of_another_dtype_means_writing_all(tmp_path: Path) -> None:
    weights = {**make_weights("float16"), "norm": make_weights("float32")["norm"]}
    refs = place(saved(tmp_path / "hf", weights), tmp_path / "engine", "float16")
    assert names(tmp_path / "engine") == ["weights/target.safetensors"]
    check(tmp_path / "engine", refs, weights, "float16")


def test_other_tensors_of_the_file_do_not_matter(tmp_path: Path) -> None:
    weights = {**make_weights("float32"), "rotary": torch.full((3,), float("inf"), dtype=torch.float64)}
    refs = place(saved(tmp_path / "hf", weights), tmp_path / "engine", "float32")
    assert names(tmp_path / "engine") == ["weights/model.safetensors"]
    check(tmp_path / "engine", refs, weights, "float32")


def test_offsets_that_cannot_be_mapped(tmp_path: Path) -> None:
    """Old files have headers of any length, and float32 at odd offsets can't be a tensor over mapped memory."""
    weights = make_weights("float32")
    entries, data = {}, b""
    for name, tensor in weights.items():
        raw = tensor.numpy().tobytes()
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(entries).encode()
    text += b" " * ((1 - len(text)) % 4)
    (tmp_path / "odd.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    source = SafetensorsSource([tmp_path / "odd.safetensors"])
    offset = source.tensors["embedding"].file_range
    assert offset is not None
    assert offset.offset % 4 == 1
    refs = place(source, tmp_path / "engine", "float32")
    assert names(tmp_path / "engine") == ["weights/target.safetensors"]
    assert all(ref.offset % 4 == 0 for ref in refs.values())
    check(tmp_path / "engine", refs, weights, "float32")


def test_bin_files_are_written(tmp_path: Path) -> None:
    weights = make_weights("float32")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    source = TorchBinSource([tmp_path / "pytorch_model.bin"])
    refs = place(source, tmp_path / "engine", "float32")
    assert names(tmp_path / "engine") == ["weights/target.safetensors"]
    check(tmp_path / "engine", refs, weights, "float32")


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nan_and_infinity_are_refused(tmp_path: Path, dtype: str, value: float, name: str) -> None:
    weights = make_weights("float32")
    weights[name].view(-1)[-1] = value
    source = saved(tmp_path / "hf", weights)
    with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN or infinity; the checkpoint is damaged"):
        place(source, tmp_path / "engine", dtype)
    assert "weights/target.safetensors" not in names(tmp_path / "engine")
    assert not [file for file in names(tmp_path / "engine") if file.endswith(".partial")]


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_overflow_of_float16(tmp_path: Path, stored: str) -> None:
    weights = make_weights(stored)
    weights["norm"][2] = -70000.0
    source = saved(tmp_path / "hf", weights)
    with pytest.raises(CheckpointError, match="tensor norm overflows float16; choose --dtype bfloat16 or float32"):
        place(source, tmp_path / "engine", "float16")
    assert names(tmp_path / "engine") == []
    for dtype in ("bfloat16", "float32"):
        check(tmp_path / dtype, place(source, tmp_path / dtype, dtype), weights, dtype)


def test_largest_float16_is_no_overflow(tmp_path: Path) -> None:
    weights = make_weights("float32")
    weights["norm"][2] = 65504.0
    check(tmp_path, place(saved(tmp_path / "hf", weights), tmp_path, "float16"), weights, "float16")


def test_links_of_a_hub_cache_are_resolved(tmp_path: Path) -> None:
    """ONNX Runtime follows no symbolic link out of a model's directory."""
    weights = make_weights("float32")
    saved(tmp_path / "blobs", weights, "0a1b2c")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/0a1b2c"))
    source = SafetensorsSource([snapshot / "model.safetensors"])
    refs = place(source, tmp_path / "engine", "float32")
    linked = tmp_path / "engine" / "weights" / "model.safetensors"
    assert not linked.is_symlink()
    assert linked.samefile(tmp_path / "blobs" / "0a1b2c")
    check(tmp_path / "engine", refs, weights, "float32")


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_written_bytes(dtype: str, size: int) -> None:
    assert written_bytes(SHAPES, dtype) == (24 + 5 + 6) * size
