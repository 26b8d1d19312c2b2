"""Opening a checkpoint by what the user gives, checking its weights, saving its tokenizer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trtspec.checkpoint import source
from trtspec.checkpoint.shards import TensorInfo
from trtspec.checkpoint.source import check_weights, open_checkpoint
from trtspec.checkpoint.target import TargetConfig
from trtspec.errors import CheckpointError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
    "max_position_embeddings": 32,
    "eos_token_id": 1,
}


def save_model(directory: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """A model directory with random weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **fields}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    weights = {name: torch.randn(shape) for name, shape in TargetConfig.from_hf(config).weight_shapes().items()}
    save_file(weights, directory / "model.safetensors")
    return weights


def save_words(directory: Path) -> None:
    """A tokenizer of a few words."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(directory)


def test_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = save_model(tmp_path / "some" / "model")
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("some/model")
    assert (checkpoint.name, checkpoint.origin) == ("model", str(tmp_path / "some" / "model"))
    config = TargetConfig.from_hf(checkpoint.hf_config, checkpoint.generation_config)
    assert config.eos_token_ids == (1, 2)
    assert check_weights(config, checkpoint.tensors) == []
    assert all(torch.equal(checkpoint.tensors.load(name), weight) for name, weight in weights.items())


def test_generation_config_is_optional(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert open_checkpoint(str(tmp_path)).generation_config == {}


def test_gguf_file(tmp_path: Path, gguf_files: Any) -> None:
    tensors = gguf_files.hf_tensors("llama")
    gguf_files.write(tmp_path / "tiny.Q8_0.gguf", "llama", tensors, kind="F16")
    checkpoint = open_checkpoint(str(tmp_path / "tiny.Q8_0.gguf"))
    assert (checkpoint.name, checkpoint.origin) == ("tiny.Q8_0", str(tmp_path / "tiny.Q8_0.gguf"))
    config = TargetConfig.from_hf(checkpoint.hf_config, checkpoint.generation_config)
    assert config.eos_token_ids == (2,)
    assert check_weights(config, checkpoint.tensors) == []


def test_demo(tmp_path: Path, gguf_files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_files.write(tmp_path / "demo-target.gguf", "llama", gguf_files.hf_tensors("llama"))
    monkeypatch.setattr(source, "fetch_demo", lambda: tmp_path / "demo-target.gguf")
    checkpoint = open_checkpoint("demo")
    assert (checkpoint.name, checkpoint.origin) == ("demo-target", "demo")


@pytest.mark.parametrize("target", ["/no/such/place", "./absent", "absent", "owner/name.gguf", "a/b/c", ""])
def test_nothing_there(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(target)
    assert target in str(raised.value)


def test_file_that_is_no_gguf(tmp_path: Path) -> None:
    save_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"a file but no \.gguf; give the directory"):
        open_checkpoint(str(tmp_path / "model.safetensors"))


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json; expected a Hugging Face model directory"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"has no config\.json; give the path of model\.Q4_K_M\.gguf"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_damaged_config(tmp_path: Path, text: str) -> None:
    save_model(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json (is not JSON|holds a JSON list)"):
        open_checkpoint(str(tmp_path))


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "snapshot")
    asked: list[Any] = []

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.append((repo, options["allow_patterns"]))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    checkpoint = open_checkpoint("owner/some-model")
    assert (checkpoint.name, checkpoint.origin) == ("owner/some-model", "owner/some-model")
    assert [repo for repo, _ in asked] == ["owner/some-model"]
    assert not any(".bin" in pattern for pattern in asked[0][1])
    (tmp_path / "snapshot" / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(1)}, tmp_path / "snapshot" / "pytorch_model.bin")
    assert set(open_checkpoint("owner/some-model").tensors.tensors) == {"w"}
    assert any(".bin" in pattern for pattern in asked[-1][1])


def hub_error(kind: type[Exception], text: str) -> Exception:
    """An error of the hub client, which wants the response it came from."""
    if kind in (GatedRepoError, RepositoryNotFoundError):
        error = kind.__new__(kind)
        Exception.__init__(error, text)
        return error
    return kind(text)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ConnectionError, r"hub can't be reached \(no route\); give a local directory"),
        (RepositoryNotFoundError, "neither a directory here nor a model on the Hugging Face hub"),
        (GatedRepoError, "gated on the Hugging Face hub; accept its licence"),
    ],
)
def test_hub_fails(monkeypatch: pytest.MonkeyPatch, kind: type[Exception], message: str) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise hub_error(kind, "no route\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=rf"owner/name.*{message}") as raised:
        open_checkpoint("owner/name")
    assert "\n" not in str(raised.value)


class Described:
    """A source with descriptions only."""

    def __init__(self, config: TargetConfig, **changes: TensorInfo | None) -> None:
        self.tensors = {name: TensorInfo("float16", shape) for name, shape in config.weight_shapes().items()}
        for name, info in changes.items():
            if info is None:
                del self.tensors[name]
            else:
                self.tensors[name] = info

    def load(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was loaded")


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({UP: None}, rf"no tensor {UP}, expected \[12, 8\]"),
        ({"lm_head.weight": None}, r"no tensor lm_head\.weight"),
        ({UP: TensorInfo("float16", (12, 9))}, rf"{UP} has shape \[12, 9\], expected \[12, 8\]"),
        ({UP: TensorInfo("int8", (12, 8))}, rf"{UP} has dtype int8"),
        ({UP: TensorInfo("float8_e4m3fn", (12, 8))}, rf"{UP} has dtype float8_e4m3fn"),
        (
            {"model.layers.0.self_attn.q_proj.bias": TensorInfo("float16", (8,))},
            r"a tensor model\.layers\.0\.self_attn\.q_proj\.bias, which a llama model has not",
        ),
        ({"model.layers.1.input_layernorm.weight": TensorInfo("float16", (8,))}, r"tensor model\.layers\.1\.input"),
    ],
)
def test_wrong_weights(changes: dict[str, TensorInfo | None], message: str) -> None:
    config = TargetConfig.from_hf(CONFIG)
    with pytest.raises(CheckpointError, match=message):
        check_weights(config, Described(config, **changes))


def test_right_weights() -> None:
    config = TargetConfig.from_hf(CONFIG)
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": TensorInfo("float32", (2,))}
    assert check_weights(config, Described(config, **rotary)) == []
    assert check_weights(config, Described(config, **{UP: TensorInfo("Q4_K", (12, 8))})) == []


def test_lm_head_of_a_tied_model_is_a_warning() -> None:
    config = TargetConfig.from_hf({**CONFIG, "tie_word_embeddings": True})
    described = Described(config, **{"lm_head.weight": TensorInfo("float16", (10, 8))})
    assert check_weights(config, Described(config)) == []
    warnings = check_weights(config, described)
    assert len(warnings) == 1
    assert "lm_head.weight is ignored" in warnings[0]


def test_tokenizer_of_a_directory(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    save_words(tmp_path / "model")
    open_checkpoint(str(tmp_path / "model")).save_tokenizer(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("to be or not") == [1, 2, 3, 4]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_no_tokenizer(tmp_path: Path, architecture: str) -> None:
    save_model(tmp_path / "model", model_type=architecture)
    with pytest.raises(CheckpointError, match="model has no tokenizer") as raised:
        open_checkpoint(str(tmp_path / "model")).save_tokenizer(tmp_path / "saved")
    assert "\n" not in str(raised.value)


def gpt2_tokens(kind: str) -> Any:
    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(kind)
        writer.add_token_list(["<|end|>", "1", "2", "a", "\u0120", "\u0120\u0120", "\u01202", "12", "b"])
        writer.add_token_types([3] + [1] * 8)
        writer.add_token_merges(["\u0120 \u0120", "\u0120 2", "1 2"])

    return add


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("smollm", ["a", "\u0120\u0120", "2", "1", "2", "b"]),
        ("default", ["a", "\u0120", "\u01202", "12", "b"]),
        ("llama-bpe", ["a", "\u0120", "\u0120", "2", "12", "b"]),
        ("never-heard-of", None),
    ],
)
def test_tokenizer_of_a_gguf_file(
    tmp_path: Path, gguf_files: Any, caplog: pytest.LogCaptureFixture, kind: str, expected: list[str] | None
) -> None:
    path = tmp_path / "m.gguf"
    fields = {"tokenizer.ggml.eos_token_id": 0}
    gguf_files.write(path, "llama", gguf_files.hf_tensors("llama"), fields=fields, tokens=gpt2_tokens(kind))
    with caplog.at_level(logging.WARNING, "trtspec"):
        open_checkpoint(str(path)).save_tokenizer(tmp_path / "saved")
    warned = [record for record in caplog.records if "'never-heard-of' is not known" in record.getMessage()]
    assert len(warned) == (expected is None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    if expected is not None:
        assert tokenizer.tokenize("a  212b") == expected
    assert tokenizer.eos_token == "<|end|>"


def test_gguf_file_without_tokenizer(tmp_path: Path, gguf_files: Any) -> None:
    gguf_files.write(tmp_path / "m.gguf", "llama", gguf_files.hf_tensors("llama"))
    with pytest.raises(CheckpointError, match=r"m\.gguf has no tokenizer"):
        open_checkpoint(str(tmp_path / "m.gguf")).save_tokenizer(tmp_path / "saved")
