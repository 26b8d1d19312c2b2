"""`trtspec build`: what is wrong is named, and nothing half-written stays."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from invocation import Builder, Invoke, assert_done, assert_refused, edit_json, names
from safetensors.torch import load_file, save_file

from trtspec.engine_build import plan_build
from trtspec.engine_dir import EngineDir


def spoil_weights(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace one tensor, or leave it out."""
    weights = load_file(directory / "model.safetensors")
    weights.pop(name)
    if tensor is not None:
        weights[name] = tensor
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_build(builder: Builder) -> None:
    result = builder.build()
    assert_done(result)
    assert str(builder.output) in result.out
    assert EngineDir.load(builder.output).limits.max_seq_len == 512
    assert names(builder.hf.parent) == ["hf", "out"]


def test_missing_directory(builder: Builder) -> None:
    missing = builder.hf.parent / "missing"
    builder.refused(f"{missing} does not exist; expected a directory, a .gguf file", target=missing)


def test_file_in_place_of_a_directory(builder: Builder) -> None:
    builder.refused("is a file but no .gguf; give the directory", target=builder.hf / "config.json")


def test_directory_without_config(builder: Builder) -> None:
    (builder.hf / "config.json").unlink()
    builder.refused("hf has no config.json; expected a Hugging Face model directory")


def test_engine_directory_in_place_of_a_target(builder: Builder, tiny_dir: Path) -> None:
    builder.refused("it is an engine directory, built already", target=tiny_dir)


def test_directory_without_weights(builder: Builder) -> None:
    (builder.hf / "model.safetensors").unlink()
    builder.refused("hf has no weights; expected *.safetensors")


@pytest.mark.parametrize("size", [0, 7, 100, 5_000_000])
def test_truncated_weights(builder: Builder, size: int) -> None:
    os.truncate(builder.hf / "model.safetensors", size)
    builder.refused("model.safetensors is truncated", "fetch it again")


def test_truncated_gguf(builder: Builder) -> None:
    (builder.hf / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    builder.refused("model.gguf", target=builder.hf / "model.gguf")


def test_wrong_shape(builder: Builder) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    spoil_weights(builder.hf, name, torch.zeros(64, 64))
    builder.refused(f"tensor {name} has shape [64, 64], expected [32, 64]")


def test_missing_tensor(builder: Builder) -> None:
    spoil_weights(builder.hf, "model.norm.weight", None)
    builder.refused("the checkpoint has no tensor model.norm.weight, expected [64]")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_weights(builder: Builder, value: float, dtype: str) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = load_file(builder.hf / "model.safetensors")[name]
    tensor[3, 5] = value
    spoil_weights(builder.hf, name, tensor)
    builder.refused(f"tensor {name} holds NaN or infinity", args=("--dtype", dtype))


def test_weights_that_overflow_float16(builder: Builder) -> None:
    spoil_weights(builder.hf, "model.norm.weight", torch.full((64,), 1e6))
    builder.refused("model.norm.weight overflows float16; choose --dtype", args=("--dtype", "float16"))


def test_unknown_architecture(builder: Builder) -> None:
    edit_json(builder.hf / "config.json", model_type="mamba", architectures=["MambaForCausalLM"])
    builder.refused("model_type 'mamba' (MambaForCausalLM) is not supported", "supported: llama")


def test_sliding_window_that_is_used(builder: Builder) -> None:
    edit_json(builder.hf / "config.json", model_type="mistral", sliding_window=64)
    builder.refused("sliding window of 64 tokens, which is not supported; --max-seq-len 64 or less never reaches it")
    assert_done(builder.build("--max-seq-len", 64))


def test_more_positions_than_the_model_has(builder: Builder) -> None:
    builder.refused("--max-seq-len 513 is more than the model's 512", args=("--max-seq-len", 513))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-seq-len", 0),
        ("--max-seq-len", 1),
        ("--max-seq-len", -4),
        ("--max-batch-size", 0),
        ("--max-draft-tokens", -1),
    ],
)
def test_sizes_out_of_range(builder: Builder, option: str, value: int) -> None:
    builder.refused(option[2:].replace("-", "_"), f"is {value}; give an integer of at least", args=(option, value))


def test_bfloat16_with_onnxruntime(builder: Builder) -> None:
    builder.refused("no bfloat16; choose --dtype float32 or float16", args=("--dtype", "bfloat16"))


def test_compute_capability_without_tensorrt_rtx(builder: Builder) -> None:
    builder.refused("--compute-capability is for --runtime tensorrt-rtx", args=("--compute-capability", 89))


def test_unknown_compute_capability(builder: Builder) -> None:
    pytest.importorskip("tensorrt_rtx")
    builder.refused("89", "not for 33", args=("--runtime", "tensorrt-rtx", "--compute-capability", 33))


@pytest.mark.parametrize("text", ["8.9", "89"])
def test_compute_capability_in_either_spelling(builder: Builder, text: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    options = ("--runtime", "tensorrt-rtx", "--dtype", "float16", "--dry-run", "--compute-capability")
    assert_done(builder.build(*options, text))
    result = builder.build(*options, f"{text}x")
    assert result.code == 2
    assert f"'{text}x' is no compute capability; give one such as 89, for 8.9" in result.err


def test_tensorrt_without_package_or_gpu(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    builder.refused("tensorrt", "pip install 'trtspec[tensorrt]'", args=("--runtime", "tensorrt"))


def test_missing_tokenizer(builder: Builder) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (builder.hf / name).unlink()
    builder.refused("hf has no tokenizer", "expected tokenizer.json or tokenizer.model beside config.json")


def test_damaged_tokenizer(builder: Builder) -> None:
    os.truncate(builder.hf / "tokenizer.json", 1000)
    builder.refused("hf has no tokenizer that transformers can read")


class Malicious:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_malicious_pickle_is_not_run(builder: Builder, zipped: bool) -> None:
    weights = load_file(builder.hf / "model.safetensors")
    (builder.hf / "model.safetensors").unlink()
    trap = builder.hf.parent / "executed"
    state = {**weights, "extra": Malicious(trap)}
    torch.save(state, builder.hf / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    builder.refused("pytorch_model.bin is damaged or holds more than tensors and was not loaded", "safetensors")
    assert not trap.exists()
    torch.load(builder.hf / "pytorch_model.bin", weights_only=False)
    assert trap.exists(), "the trap does not work"


def test_bin_without_malice(builder: Builder) -> None:
    weights = load_file(builder.hf / "model.safetensors")
    (builder.hf / "model.safetensors").unlink()
    torch.save(weights, builder.hf / "pytorch_model.bin")
    assert_done(builder.build())


def test_dry_run_writes_nothing(builder: Builder) -> None:
    before = names(builder.hf.parent)
    result = builder.build("--dry-run", "--max-seq-len", 100, "--max-batch-size", 3, "--max-draft-tokens", 7)
    assert_done(result)
    assert names(builder.hf.parent) == before
    rows = {line.split()[0]: line for line in result.out.splitlines()}
    assert "13 MB of weights linked" in rows["disk"]
    assert "100 tokens per sequence, 3 sequences, 7 draft tokens" in rows["limits"]
    # 2 layers of 2 KV heads of 16, keys and values, float32, 100 + 8 rows
    per_sequence = 2 * 2 * 2 * 16 * 4 * 108
    assert (
        f"KV cache {per_sequence / 1e6:.1f} MB per sequence ({3 * per_sequence / 1e6:.0f} MB for 3)" in rows["memory"]
    )
    assert "weights 13 MB" in rows["memory"]
    assert "workspace" in rows["memory"]
    assert rows["draft"] == "draft head        none: methods none and ngram"


def test_dry_run_of_weights_that_are_converted(builder: Builder) -> None:
    result = builder.build("--dry-run", "--dtype", "float16")
    assert_done(result)
    rows = {line.split()[0]: line for line in result.out.splitlines()}
    assert rows["disk"].split() == ["disk", "6", "MB"]
    assert rows["precision"].split() == ["precision", "float16"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("runtimes", [("tensorrt-rtx",), ("tensorrt-rtx", "onnxruntime")])
def test_dry_run_estimates_what_is_built(builder: Builder, runtimes: tuple[str, ...], dtype: str) -> None:
    """The checkpoint is in float32, so that its weights are linked for float32."""
    pytest.importorskip("tensorrt_rtx")
    options = [option for runtime in runtimes for option in ("--runtime", runtime)]
    options += ["--dtype", dtype, "--compute-capability", "89"]
    assert_done(builder.build(*options))
    tokenizer = builder.output / "tokenizer"
    files = [path for path in builder.output.rglob("*") if path.is_file() and tokenizer not in path.parents]
    plan = plan_build(builder.hf, runtimes=runtimes, dtype=dtype, compute_capabilities=(89,))
    size = sum(path.stat().st_size for path in files) - plan.linked_bytes
    assert (plan.linked_bytes > 0) == (dtype == "float32")
    # An engine's code takes some megabytes whatever the model.
    assert size - 8e6 < plan.disk_bytes < size
    assert (plan.peak_disk_bytes > plan.disk_bytes) == ("onnxruntime" not in runtimes)


def test_dry_run_refuses_like_a_build(builder: Builder) -> None:
    builder.output.mkdir()
    (builder.output / "mine").write_text("mine")
    assert_refused(builder.build("--dry-run"), "exists and is not empty")
    spoil_weights(builder.hf, "model.norm.weight", None)
    builder.output = builder.hf.parent / "other"
    builder.refused("no tensor model.norm.weight", args=("--dry-run",))


def test_limits_and_dtype_are_kept(builder: Builder) -> None:
    options = ("--max-seq-len", 100, "--max-batch-size", 3, "--max-draft-tokens", 7, "--dtype", "float16")
    assert_done(builder.build(*options))
    made = EngineDir.load(builder.output)
    assert (made.limits.max_seq_len, made.limits.max_batch_size, made.limits.max_draft_tokens) == (100, 3, 7)
    assert made.dtype == "float16"
    embedding = load_file(builder.hf / "model.safetensors")["model.embed_tokens.weight"]
    at = made.embedding
    data = (builder.output / at.location).read_bytes()[at.offset : at.offset + at.nbytes]
    assert np.array_equal(np.frombuffer(data, np.float16).reshape(at.shape), embedding.numpy().astype(np.float16))


def test_weights_are_linked_not_copied(builder: Builder) -> None:
    assert_done(builder.build())
    assert (builder.output / "weights" / "model.safetensors").samefile(builder.hf / "model.safetensors")


def test_manifest_is_json(builder: Builder) -> None:
    assert_done(builder.build())
    assert json.loads((builder.output / "engine.json").read_text())["format_version"] == 1


def test_tensorrt_rtx_is_built_here_and_refused_where_it_cannot_run(
    builder: Builder, trtspec: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx")
    from trtspec.engine import tensorrt_engine

    small = ("--max-seq-len", 64, "--max-batch-size", 1, "--max-draft-tokens", 4, "--compute-capability", 89)
    assert_done(builder.build("--runtime", "tensorrt-rtx", *small))
    monkeypatch.setattr(tensorrt_engine, "cuda_problem", lambda: "no NVIDIA driver")
    result = trtspec("run", builder.output, "--prompt", "Hi")
    assert_refused(result, "no runtime of", "tensorrt-rtx: no NVIDIA driver", "build it with --runtime onnxruntime")
    found = trtspec("inspect", builder.output, "--json").lines[0]["runtimes"]["tensorrt-rtx"]
    assert (found["usable_here"], found["problem"]) == (False, "no NVIDIA driver")
    assert found["compute_capabilities"] == [89]
    assert_done(builder.build("--runtime", "tensorrt-rtx", *small[:-2], "--force"))
    found = trtspec("inspect", builder.output, "--json").lines[0]["runtimes"]["tensorrt-rtx"]
    assert found["compute_capabilities"] == "80 and newer"
