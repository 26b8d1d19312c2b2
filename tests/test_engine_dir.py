"""Engine directories: what engine.json says is what lies there, or opening refuses and names file and remedy."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trtspec import engine_dir as module
from trtspec.config import Limits
from trtspec.engine_dir import DraftHeadRecord, EngineDir, RuntimeRecord, TargetRecord, record_files
from trtspec.errors import EngineDirError
from trtspec.session import Session
from trtspec.tensors import WeightRef

PARTS = ("lm_head.onnx", "target.onnx", "tokenizer/tokenizer.json", "weights/model.safetensors")
REMEDY = "build it again with trtspec build"


@pytest.fixture
def small(tmp_path: Path) -> EngineDir:
    """An engine directory of a few bytes."""
    path = tmp_path / "engine"
    for number, name in enumerate(PARTS):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(bytes([number]) * 64)
    embedding = WeightRef("weights/model.safetensors", 16, 32, "float32", (4, 2))
    result = EngineDir(
        path=path,
        trtspec_version="0.1.0",
        dtype="float32",
        limits=Limits(64, max_batch_size=2, max_draft_tokens=5, prefill_chunk=16),
        target=TargetRecord("модель", "/where/it/was", {"architecture": "llama", "rope": {"kind": "default"}}, {}),
        embedding=embedding,
        lm_head=dataclasses.replace(embedding, offset=0, nbytes=16, shape=(2, 2)),
        runtimes={
            "onnxruntime": RuntimeRecord({"target": "target.onnx", "lm_head": "lm_head.onnx"}),
            "tensorrt-rtx": RuntimeRecord({"target": "target.onnx"}, (86, 89)),
        },
        files=record_files(path),
    )
    result.write_manifest()
    return result


def read(directory: EngineDir) -> dict[str, Any]:
    """engine.json."""
    data: dict[str, Any] = json.loads((directory.path / "engine.json").read_text(encoding="utf-8"))
    return data


def write(directory: EngineDir, data: Any) -> None:
    """Replace engine.json."""
    (directory.path / "engine.json").write_text(json.dumps(data), encoding="utf-8")


def sign(data: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the checksum that fits it, as a program would write it."""
    body = {key: value for key, value in data.items() if key != "checksum"}
    return {**body, "checksum": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}


def refusal(path: Path) -> str:
    """The message with which opening is refused."""
    with pytest.raises(EngineDirError) as raised:
        EngineDir.load(path)
    return str(raised.value)


def flip(file: Path, position: int) -> None:
    """Change one byte."""
    data = bytearray(file.read_bytes())
    data[position] ^= 0x10
    file.write_bytes(data)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value, however deep."""
    for key in data if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], dict | list):
            yield from places(data[key])


def test_roundtrip(small: EngineDir) -> None:
    loaded = EngineDir.load(small.path)
    assert loaded == small
    loaded.verify()
    loaded.verify(whole=True)
    assert sorted(loaded.files) == list(PARTS)
    assert EngineDir.load(str(small.path)) == small


@pytest.fixture
def drafting(small: EngineDir) -> EngineDir:
    """The same with a draft head."""
    ref = WeightRef("weights/model.safetensors", 0, 16, "int32", (4,))
    head = DraftHeadRecord(
        name="голова",
        origin="owner/head",
        config={"kind": "eagle3", "boundaries": [2, 4, 5], "token_ids": None},
        decisions={"boundaries": {"value": [2, 4, 5], "origin": "config"}},
        lm_head="reduced",
        embedding=small.embedding,
        lm_head_weight=dataclasses.replace(small.embedding, offset=4),
        token_ids=ref,
    )
    result = dataclasses.replace(small, draft_head=head)
    result.write_manifest()
    return result


def test_roundtrip_with_a_draft_head(drafting: EngineDir) -> None:
    assert EngineDir.load(drafting.path) == drafting
    assert drafting.draft_head is not None
    shared = dataclasses.replace(drafting.draft_head, lm_head="target", embedding=None, lm_head_weight=None)
    result = dataclasses.replace(drafting, draft_head=dataclasses.replace(shared, token_ids=None))
    result.write_manifest()
    assert EngineDir.load(drafting.path) == result


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("lm_head", "int8"),
        ("lm_head", ["own"]),
        ("embedding", "weights"),
        ("embedding/extra", 1),
        ("token_ids", 3),
        ("decisions", 3),
        ("extra", 1),
        ("embedding/location", "absent"),
        ("lm_head_weight/location", "../outside"),
        ("token_ids/location", "/outside"),
    ],
)
def test_draft_head_that_does_not_fit_the_format(drafting: EngineDir, path: str, value: Any) -> None:
    data = read(drafting)
    change(f"draft_head/{path}", value)(data)
    write(drafting, sign(data))
    assert f"{drafting.path / 'engine.json'} does not fit format 1" in refusal(drafting.path)


@pytest.mark.parametrize("field", ["name", "config", "decisions", "lm_head", "embedding", "token_ids"])
def test_draft_head_that_lacks_a_field(drafting: EngineDir, field: str) -> None:
    data = read(drafting)
    del data["draft_head"][field]
    write(drafting, sign(data))
    assert "does not fit format 1" in refusal(drafting.path)


def test_can_be_moved(small: EngineDir, tmp_path: Path) -> None:
    moved = small.path.rename(tmp_path / "elsewhere")
    assert dataclasses.replace(EngineDir.load(moved), path=small.path) == small


def test_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    assert refusal(path) == f"there is no engine directory {path}; make one with: trtspec build TARGET --output {path}"


def test_no_engine_directory(tmp_path: Path) -> None:
    assert "no engine directory (it has no engine.json); make one with trtspec build" in refusal(tmp_path)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert f"there is no engine directory {file}" in refusal(file)


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5])
def test_unknown_format_version(small: EngineDir, version: Any) -> None:
    write(small, sign({**read(small), "format_version": version}))
    message = refusal(small.path)
    assert f"engine.json has format_version {version!r}, this trtspec reads 1" in message
    assert "build it again or use the trtspec version that built it" in message


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format_version": 1', b"nonsense"])
def test_damaged_manifest(small: EngineDir, content: bytes) -> None:
    (small.path / "engine.json").write_bytes(content)
    message = refusal(small.path)
    assert f"{small.path / 'engine.json'} is damaged" in message
    assert REMEDY in message


@pytest.mark.parametrize("data", [[], "text", 3, None, {}, {"dtype": "float32"}])
def test_other_json(small: EngineDir, data: Any) -> None:
    write(small, data)
    assert "engine.json has no format_version; build it again" in refusal(small.path)


def test_every_edited_field_is_noticed(small: EngineDir) -> None:
    original = read(small)
    count = sum(1 for _ in places(original))
    assert count > 50
    for number in range(count):
        data = copy.deepcopy(original)
        container, key = list(places(data))[number]
        if key == "format_version":
            continue
        container[key] = "edited"
        write(small, data)
        message = refusal(small.path)
        assert "engine.json was changed after the build (its checksum differs)" in message, key
        assert REMEDY in message


def test_every_added_or_removed_field_is_noticed(small: EngineDir) -> None:
    original = read(small)
    for number in range(sum(1 for _ in places(original))):
        removed, added = copy.deepcopy(original), copy.deepcopy(original)
        container, key = list(places(removed))[number]
        del container[key]
        container, _ = list(places(added))[number]
        if isinstance(container, dict):
            container["extra"] = 1
        else:
            container.append(1)
        for data in (removed, added):
            write(small, data)
            assert "engine.json" in refusal(small.path), key


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of the manifest at a path such as "limits/max_seq_len"; DROP removes the field."""

    def apply(data: dict[str, Any]) -> None:
        *parents, key = path.split("/")
        for parent in parents:
            data = data[parent]
        if value is DROP:
            del data[key]
        else:
            data[key] = value

    return apply


DROP = object()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("extra", 1),
        ("limits/extra", 1),
        ("target/extra", 1),
        ("embedding/extra", 1),
        ("files", []),
        ("files", None),
        ("limits", None),
        ("limits", [1, 2]),
        ("limits/max_seq_len", 1),
        ("limits/max_seq_len", "many"),
        ("limits/max_batch_size", 0),
        ("target", None),
        ("embedding", "weights"),
        ("dtype", "float8"),
        ("dtype", DROP),
        ("runtimes", {}),
        ("runtimes", []),
        ("runtimes", None),
        ("runtimes/cuda", {"graphs": {}, "compute_capabilities": []}),
        ("runtimes/onnxruntime", ["target.onnx"]),
        ("runtimes/onnxruntime/graphs", ["target.onnx"]),
        ("runtimes/onnxruntime/compute_capabilities", DROP),
        *((field, DROP) for field in ("limits", "target", "embedding", "lm_head", "runtimes", "files")),
        *((f"{field}", DROP) for field in ("trtspec_version", "target/name", "limits/max_seq_len", "embedding/offset")),
    ],
)
def test_manifest_that_does_not_fit_the_format(small: EngineDir, path: str, value: Any) -> None:
    data = read(small)
    change(path, value)(data)
    write(small, sign(data))
    message = refusal(small.path)
    assert f"{small.path / 'engine.json'} does not fit format 1" in message
    assert REMEDY in message


def test_own_signature_is_accepted(small: EngineDir) -> None:
    """The checksum of these tests is trtspec's, so what they refuse isn't refused for a wrong checksum."""
    write(small, sign({**read(small), "trtspec_version": "9.9"}))
    assert EngineDir.load(small.path).trtspec_version == "9.9"


@pytest.mark.parametrize("form", ["relative", "absolute", "roundabout"])
@pytest.mark.parametrize("where", ["files", "graph", "embedding", "lm_head"])
def test_paths_that_leave_the_directory(small: EngineDir, where: str, form: str) -> None:
    outside = small.path.parent / "outside.bin"
    shutil.copy(small.path / "target.onnx", outside)
    name = {"relative": "../outside.bin", "absolute": str(outside), "roundabout": "weights/../../outside.bin"}[form]
    data = read(small)
    if where == "files":
        data["files"][name] = data["files"]["target.onnx"]
    elif where == "graph":
        data["runtimes"]["onnxruntime"]["graphs"]["target"] = name
    else:
        data[where]["location"] = name
    write(small, sign(data))
    assert repr(name) in refusal(small.path)


@pytest.mark.parametrize("name", PARTS)
def test_missing_part(small: EngineDir, name: str) -> None:
    (small.path / name).unlink()
    assert refusal(small.path) == f"{small.path} lacks its part {name}; {REMEDY}"
    (small.path / name).mkdir()
    assert refusal(small.path) == f"{small.path} lacks its part {name}; {REMEDY}"


@pytest.mark.parametrize("size", [0, 63, 65])
@pytest.mark.parametrize("name", PARTS)
def test_part_of_another_size(small: EngineDir, name: str, size: int) -> None:
    (small.path / name).write_bytes(bytes(size))
    assert refusal(small.path) == f"{small.path / name} has {size} bytes, engine.json says 64; {REMEDY}"


@pytest.mark.parametrize("position", [0, 31, 63])
@pytest.mark.parametrize("name", PARTS)
def test_altered_part(small: EngineDir, name: str, position: int) -> None:
    flip(small.path / name, position)
    with pytest.raises(EngineDirError) as raised:
        EngineDir.load(small.path).verify()
    assert str(raised.value) == f"{small.path / name} was changed after the build (its hash differs); {REMEDY}"


def test_foreign_files_do_no_harm(small: EngineDir) -> None:
    (small.path / "notes.txt").write_text("mine")
    EngineDir.load(small.path).verify(whole=True)


@pytest.fixture
def large(small: EngineDir, monkeypatch: pytest.MonkeyPatch) -> EngineDir:
    """One file of 16 MiB, which is hashed by samples."""
    (small.path / "weights/model.safetensors").write_bytes(bytes(range(256)) * (1 << 16))
    result = dataclasses.replace(small, files=record_files(small.path))
    result.write_manifest()
    monkeypatch.setattr(module, "WHOLE_HASH_BYTES", (1 << 24) - 1)
    return result


@pytest.mark.parametrize("position", [0, (1 << 16) - 1, 30 * ((1 << 24) - (1 << 16)) // 63 + 5, (1 << 24) - 1])
def test_samples_notice_changes_at_both_ends_and_between(large: EngineDir, position: int) -> None:
    EngineDir.load(large.path).verify()
    flip(large.path / "weights/model.safetensors", position)
    with pytest.raises(EngineDirError, match=r"model\.safetensors was changed after the build"):
        EngineDir.load(large.path).verify()


def test_samples_leave_gaps_that_whole_verification_closes(large: EngineDir) -> None:
    flip(large.path / "weights/model.safetensors", (1 << 16) + 100)
    loaded = EngineDir.load(large.path)
    loaded.verify()
    with pytest.raises(EngineDirError, match=r"model\.safetensors was changed after the build"):
        loaded.verify(whole=True)


def test_small_files_are_hashed_whole_beside_large_ones(large: EngineDir) -> None:
    flip(large.path / "target.onnx", 40)
    with pytest.raises(EngineDirError, match=r"target\.onnx was changed"):
        EngineDir.load(large.path).verify()


def test_samples_cover_a_file_of_four_mebibytes(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(4 << 20))
    before = module.sample_sha256(file)
    for position in (0, 65_535, 65_536, 2_000_003, (4 << 20) - 1):
        flip(file, position)
        assert module.sample_sha256(file) != before, position
        flip(file, position)
    assert module.sample_sha256(file) == before


@pytest.mark.parametrize("name", PARTS)
def test_session_refuses_an_altered_part(tiny_dir: Path, tmp_path: Path, name: str) -> None:
    directory = shutil.copytree(tiny_dir, tmp_path / "engine")
    flip(directory / name, (directory / name).stat().st_size // 2)
    with pytest.raises(EngineDirError) as raised:
        Session.open(directory)
    assert str(raised.value) == f"{directory / name} was changed after the build (its hash differs); {REMEDY}"


def test_session_opens_an_unaltered_copy(tiny_dir: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_dir, tmp_path / "engine")
    with Session.open(directory) as session:
        assert len(session.encode("to be or not to be")) > 3
