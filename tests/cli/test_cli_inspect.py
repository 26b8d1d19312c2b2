"""`trtspec inspect` on engine directories and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from invocation import Invoke, assert_done, assert_refused, edit_json

from trtspec import engine_dir as engine_dir_module


def test_engine_directory(trtspec: Invoke, tiny_dir: Path, tiny_hf_dir: Path) -> None:
    result = trtspec("inspect", tiny_dir, "--json")
    assert_done(result)
    (found,) = result.lines
    assert found["kind"] == "engine directory"
    assert found["target"] == {"name": "tiny-llama", "origin": str(tiny_hf_dir), "architecture": "llama"}
    assert found["dtype"] == "float32"
    assert (found["limits"]["max_seq_len"], found["limits"]["max_batch_size"]) == (512, 8)
    assert found["limits"]["max_draft_tokens"] == 32
    assert found["methods"] == ["none", "ngram"]
    assert found["draft_head"] is None
    graphs = {"target": "target.onnx", "lm_head": "lm_head.onnx"}
    assert found["runtimes"] == {"onnxruntime": {"graphs": graphs, "usable_here": True}}
    files = {str(path.relative_to(tiny_dir)) for path in tiny_dir.rglob("*") if path.is_file()}
    assert set(found["file_bytes"]) == files - {"engine.json"}
    assert found["parts"]["embedding"] == "weights/model.safetensors"


def test_checkpoint(trtspec: Invoke, tiny_hf_dir: Path) -> None:
    result = trtspec("inspect", tiny_hf_dir, "--json")
    assert_done(result)
    (found,) = result.lines
    assert (found["kind"], found["name"], found["origin"]) == ("target checkpoint", "tiny-llama", str(tiny_hf_dir))
    config = found["config"]
    assert (config["architecture"], config["num_layers"], config["hidden_size"]) == ("llama", 2, 64)
    assert (config["tied"], config["eos_token_ids"]) == (True, [2])
    assert found["dtypes"] == {"float32": found["tensors"]}
    assert found["warnings"] == []


def test_text_names_what_json_names(trtspec: Invoke, tiny_dir: Path, tiny_hf_dir: Path) -> None:
    for path in (tiny_dir, tiny_hf_dir):
        found = trtspec("inspect", path, "--json").lines[0]
        text = trtspec("inspect", path)
        assert_done(text)
        assert {line.split(":")[0] for line in text.out.splitlines() if line[0] != " "} == set(found)


def test_nothing_there(trtspec: Invoke, tmp_path: Path) -> None:
    assert_refused(trtspec("inspect", tmp_path / "missing"), "missing does not exist; expected a directory")
    assert_refused(trtspec("inspect", tmp_path), "has no config.json; expected a Hugging Face model directory")


def test_unsupported_checkpoint(trtspec: Invoke, hf_copy: Path) -> None:
    edit_json(hf_copy / "config.json", model_type="gpt2")
    assert_refused(trtspec("inspect", hf_copy, "--json"), "model_type 'gpt2'", "is not supported as a target")


def test_tampered_engine_directory(trtspec: Invoke, engine_copy: Path) -> None:
    with (engine_copy / "target.onnx").open("r+b") as file:
        file.seek(1000)
        file.write(b"?!?")
    assert_refused(trtspec("inspect", engine_copy), "target.onnx was changed after the build")
    edit_json(engine_copy / "engine.json", trtspec_version="0.0")
    assert_refused(trtspec("inspect", engine_copy, "--json"), "engine.json was changed after the build")


def test_verify_reads_all_of_a_large_file(trtspec: Invoke, engine_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_dir_module, "WHOLE_HASH_BYTES", 1 << 20)
    with (engine_copy / "weights" / "model.safetensors").open("r+b") as file:
        file.seek((1 << 16) + 64)
        file.write(b"between the samples")
    assert_done(trtspec("inspect", engine_copy))
    assert_refused(trtspec("inspect", engine_copy, "--verify"), "model.safetensors was changed after the build")
