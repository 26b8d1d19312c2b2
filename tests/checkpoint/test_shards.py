"""Reading safetensors and .bin checkpoints, whole, sharded, and damaged."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trtspec.checkpoint.shards import SafetensorsSource, TensorSource, TorchBinSource, open_tensors
from trtspec.errors import CheckpointError

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "c.bias": torch.tensor([0.25], dtype=torch.float16),
    "d.ids": torch.tensor([1, -2, 3], dtype=torch.int64),
}


def assert_holds(source: TensorSource, expected: dict[str, torch.Tensor]) -> None:
    assert set(source.tensors) == set(expected)
    for name, tensor in expected.items():
        loaded = source.load(name)
        assert source.tensors[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert source.tensors[name].shape == tuple(tensor.shape)
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor)


def write_index(directory: Path, name: str, weight_map: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save_shards(directory: Path, extension: str) -> dict[str, str]:
    """Two shards, and the map from name to file."""
    names = list(TENSORS)
    stem = "model" if extension == "safetensors" else "pytorch_model"
    weight_map = {}
    for part, chosen in enumerate((names[:2], names[2:]), start=1):
        file = f"{stem}-0000{part}-of-00002.{extension}"
        shard = {name: TENSORS[name] for name in chosen}
        if extension == "safetensors":
            save_file(shard, directory / file)
        else:
            torch.save(shard, directory / file)
        weight_map.update(dict.fromkeys(chosen, file))
    return weight_map


@pytest.mark.parametrize("file", ["model.safetensors", "head.safetensors"])
def test_one_safetensors_file(tmp_path: Path, file: str) -> None:
    save_file(TENSORS, tmp_path / file, metadata={"format": "pt"})
    source = open_tensors(tmp_path)
    assert_holds(source, TENSORS)
    for name, tensor in TENSORS.items():
        place = source.tensors[name].file_range
        assert place is not None and place.path == tmp_path / file
        with place.path.open("rb") as opened:
            opened.seek(place.offset)
            assert opened.read(place.nbytes) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_sharded_safetensors(tmp_path: Path) -> None:
    write_index(tmp_path, "model.safetensors.index.json", save_shards(tmp_path, "safetensors"))
    assert_holds(open_tensors(tmp_path), TENSORS)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old format"])
def test_bin(tmp_path: Path, zipped: bool) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    source = open_tensors(tmp_path)
    assert_holds(source, TENSORS)
    assert all(info.file_range is None for info in source.tensors.values())


def test_sharded_bin(tmp_path: Path) -> None:
    write_index(tmp_path, "pytorch_model.bin.index.json", save_shards(tmp_path, "bin"))
    assert_holds(open_tensors(tmp_path), TENSORS)


def test_safetensors_before_bin(tmp_path: Path) -> None:
    torch.save({"old": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_holds(open_tensors(tmp_path), TENSORS)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_tensors_are_mapped_not_read_at_open(tmp_path: Path, kind: str) -> None:
    """Bytes changed after opening are seen by load."""
    marker = torch.full((1024,), 3.0)
    path = tmp_path / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin")
    save_file({"w": marker}, path) if kind == "safetensors" else torch.save({"w": marker}, path)
    source = open_tensors(tmp_path)
    place = path.read_bytes().index(marker.numpy().tobytes())
    with path.open("r+b") as file:
        file.seek(place)
        file.write(struct.pack("<f", 9.0))
    assert source.load("w")[0] == 9.0


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no weights; expected \*\.safetensors or pytorch_model\.bin"):
        open_tensors(tmp_path)


def test_several_files_without_index(tmp_path: Path) -> None:
    save_shards(tmp_path, "safetensors")
    with pytest.raises(CheckpointError, match=r"00001-of-00002.*no model\.safetensors\.index\.json"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("opened", [SafetensorsSource, TorchBinSource])
def test_unknown_name(tmp_path: Path, opened: Any) -> None:
    path = tmp_path / "file"
    save_file(TENSORS, path) if opened is SafetensorsSource else torch.save(TENSORS, path)
    with pytest.raises(CheckpointError, match=r"no tensor z\.weight"):
        opened([path]).load("z.weight")


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1, -9])
def test_truncated_safetensors(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: \d+ bytes"):
        open_tensors(tmp_path)


def test_trailing_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="longer than its header says"):
        open_tensors(tmp_path)


def header_file(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "header isn't JSON"),
        (b"\xff\xfe", "header isn't JSON"),
        ([], "malformed entry"),
        ({"w": {"dtype": "F32", "shape": [1]}}, "malformed entry"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "takes 8 bytes"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "malformed entry"),
        ({"w": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, "dtype 'F4'"),
        ({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "vw"}, "damaged"),
    ],
)
def test_damaged_header(tmp_path: Path, header: Any, message: str) -> None:
    header_file(tmp_path / "model.safetensors", header, bytes(4))
    with pytest.raises(CheckpointError, match=message) as raised:
        open_tensors(tmp_path)
    assert "model.safetensors" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("extension", ["safetensors", "bin"])
def test_index_names_a_missing_file(tmp_path: Path, extension: str) -> None:
    weight_map = save_shards(tmp_path, extension)
    index = "model.safetensors.index.json" if extension == "safetensors" else "pytorch_model.bin.index.json"
    write_index(tmp_path, index, {**weight_map, "z.weight": f"gone.{extension}"})
    with pytest.raises(CheckpointError, match=rf"names gone\.{extension}, not there"):
        open_tensors(tmp_path)


def test_index_names_a_missing_tensor(tmp_path: Path) -> None:
    weight_map = save_shards(tmp_path, "safetensors")
    write_index(tmp_path, "model.safetensors.index.json", {**weight_map, "z.weight": weight_map["a.weight"]})
    with pytest.raises(CheckpointError, match=r"places z\.weight in model-00001.*no such tensor"):
        open_tensors(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    weight_map = save_shards(tmp_path, "safetensors")
    save_file({"a.weight": torch.zeros(1), "c.bias": torch.zeros(1)}, tmp_path / weight_map["c.bias"])
    write_index(tmp_path, "model.safetensors.index.json", {n: weight_map[n] for n in ("a.weight", "c.bias")})
    with pytest.raises(CheckpointError, match=r"tensor a\.weight is also in another file"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", 3])
def test_index_stays_in_its_directory(tmp_path: Path, name: Any) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(TENSORS, tmp_path / "outside.safetensors")
    write_index(directory, "model.safetensors.index.json", {"a.weight": name})
    with pytest.raises(CheckpointError, match="expected the name of a file beside it"):
        open_tensors(directory)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_tensors(tmp_path)


class Malicious:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["zip", "old format", "bare pickle"])
def test_pickled_code_is_not_run(tmp_path: Path, form: str) -> None:
    path, created = tmp_path / "pytorch_model.bin", tmp_path / "created"
    if form == "bare pickle":
        path.write_bytes(pickle.dumps({"w": Malicious(created)}, protocol=2))
    else:
        torch.save({"w": Malicious(created)}, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged or holds more than tensors") as raised:
        open_tensors(tmp_path)
    assert not created.exists()
    assert "\n" not in str(raised.value)
    torch.load(path, weights_only=False) if form != "bare pickle" else pickle.loads(path.read_bytes())
    assert created.exists(), "the file is not malicious: the test proves nothing"


@pytest.mark.parametrize("keep", [0, 3, 10, 200, -30])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old format"])
def test_damaged_bin(tmp_path: Path, keep: int, zipped: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds a list"),
        ({"state_dict": {"w": torch.zeros(1)}}, "'state_dict' is a dict"),
        ({1: torch.zeros(1)}, "1 is a Tensor"),
    ],
)
def test_bin_without_named_tensors(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        open_tensors(tmp_path)
