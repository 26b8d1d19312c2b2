"""GGUF files written as llama.cpp's converter does, against the weights that went in."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from trtspec.checkpoint import gguf as gguf_module
from trtspec.checkpoint.gguf import GgufSource, open_gguf
from trtspec.checkpoint.gguf_config import gguf_config
from trtspec.checkpoint.rope import RopeConfig
from trtspec.checkpoint.source import check_weights
from trtspec.checkpoint.target import TargetConfig
from trtspec.errors import CheckpointError

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def open_source(path: Path) -> GgufSource:
    return GgufSource(open_gguf(path), path)


def config_of(path: Path) -> TargetConfig:
    return TargetConfig.from_hf(gguf_config(open_gguf(path)))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors(
    tmp_path: Path, gguf_files: Any, monkeypatch: pytest.MonkeyPatch, architecture: str, kind: str
) -> None:
    """Plain types come back exactly; quantised ones as gguf itself dequantises each row."""
    monkeypatch.setattr(gguf_module, "DEQUANTISED_ROWS", 5)
    path, quantisation = tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind]
    tensors = gguf_files.hf_tensors(architecture)
    gguf_files.write(path, architecture, tensors, kind=kind)
    source = open_source(path)
    assert set(source.tensors) == set(tensors)
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for name, original in tensors.items():
        loaded, info = source.load(name), source.tensors[name]
        assert info.shape == tuple(loaded.shape) == original.shape
        assert info.file_range is None
        if original.ndim == 1:
            assert torch.equal(loaded, torch.from_numpy(original)) and info.dtype == "float32"
        elif kind in plain:
            assert loaded.dtype == plain[kind] and info.dtype == str(plain[kind]).removeprefix("torch.")
            assert torch.equal(loaded, torch.from_numpy(original).to(plain[kind]))
        else:
            expected = gguf.quants.dequantize(gguf.quants.quantize(original, quantisation), quantisation)
            assert loaded.dtype == torch.float32 and info.dtype == kind
            assert torch.equal(loaded, torch.from_numpy(expected))
            assert np.abs(loaded.numpy() - original).mean() < 0.2


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_quants(tmp_path: Path, gguf_files: Any, kind: str) -> None:
    path, quantisation = tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind]
    tensors = {
        name: value
        for name, value in gguf_files.hf_tensors("llama").items()
        if value.ndim == 1 or value.shape[-1] % 256 == 0
    }
    raw = {n: gguf_files.k_quant_bytes(v.shape, quantisation) for n, v in tensors.items() if v.ndim == 2}
    gguf_files.write(path, "llama", tensors, kind=kind, raw=raw)
    source = open_source(path)
    assert len(raw) > 8
    for name, data in raw.items():
        assert source.tensors[name].dtype == kind
        expected = gguf.quants.dequantize(data, quantisation)
        assert np.isfinite(expected).all() and expected.std() > 0
        assert torch.equal(source.load(name), torch.from_numpy(expected))


def test_llama_biases_are_reordered_with_their_weights(tmp_path: Path, gguf_files: Any) -> None:
    path, tensors = tmp_path / "m.gguf", gguf_files.hf_tensors("llama", all_bias=True)
    gguf_files.write(path, "llama", tensors)
    source, config = open_source(path), config_of(path)
    for name, original in tensors.items():
        assert torch.equal(source.load(name), torch.from_numpy(original)), name
    assert config.qkv_bias and config.output_bias and config.mlp_bias
    assert check_weights(config, source) == []


def test_loaded_tensor_can_outlive_its_source(tmp_path: Path, gguf_files: Any) -> None:
    path, tensors = tmp_path / "m.gguf", gguf_files.hf_tensors("qwen3")
    gguf_files.write(path, "qwen3", tensors)
    loaded = open_source(path).load("model.layers.0.mlp.up_proj.weight")
    path.unlink()
    assert torch.equal(loaded, torch.from_numpy(tensors["model.layers.0.mlp.up_proj.weight"]))


def test_big_tensor_is_dequantised_in_little_memory(tmp_path: Path, gguf_files: Any) -> None:
    path = tmp_path / "m.gguf"
    rows = 1 << 15
    big = np.random.default_rng(0).standard_normal((rows, 256), dtype=np.float32)
    gguf_files.write(path, "llama", {"model.embed_tokens.weight": big}, kind="Q8_0")
    source = open_source(path)
    tracemalloc.start()
    loaded = source.load("model.embed_tokens.weight")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # numpy's memory is traced, the torch result is not: what is left is overhead.
    assert peak < loaded.nbytes / 4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config(tmp_path: Path, gguf_files: Any, architecture: str, tied: bool) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, architecture, gguf_files.hf_tensors(architecture, tied=tied))
    expected = {
        "model_type": architecture,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 24,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 50000.0,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
    }
    config = config_of(path)
    assert config == TargetConfig.from_hf(expected)
    assert check_weights(config, open_source(path)) == []


def test_optional_fields_default_as_in_llama_cpp(tmp_path: Path, gguf_files: Any) -> None:
    path = tmp_path / "m.gguf"
    optional = ("head_count_kv", "key_length", "value_length")
    fields: dict[str, Any] = {f"llama.attention.{key}": None for key in optional}
    fields |= {"llama.rope.freq_base": None, "llama.rope.dimension_count": None, "tokenizer.ggml.eos_token_id": None}
    gguf_files.write(path, "llama", gguf_files.hf_tensors("llama"), fields=fields)
    config = config_of(path)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta, config.eos_token_ids) == (4, 64, 10000.0, ())


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"scaling.type": "none", "scaling.factor": 4.0}, {}),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 0.5},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 0.5 * (0.1 * np.log(4.0) + 1),
            },
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, gguf_files: Any, scaling: dict[str, Any], expected: dict[str, Any]) -> None:
    path = tmp_path / "m.gguf"
    fields = {f"qwen2.rope.{key}": value for key, value in scaling.items()}
    gguf_files.write(path, "qwen2", gguf_files.hf_tensors("qwen2"), fields=fields)
    hf = {"rope_theta": 50000.0, "max_position_embeddings": 128, "rope_scaling": expected}
    assert config_of(path).rope == RopeConfig.from_hf(hf)


def test_rope_freqs_tensor(tmp_path: Path, gguf_files: Any) -> None:
    path, factors = tmp_path / "m.gguf", np.linspace(1, 8, 8, dtype=np.float32)
    gguf_files.write(path, "llama", gguf_files.hf_tensors("llama"), rope_freqs=factors)
    config, source = config_of(path), open_source(path)
    assert config.rope.kind == "default"
    assert config.rope.frequency_factors == tuple(factors.tolist())
    assert check_weights(config, source) == []
    plain = 50000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(config.rope.inverse_frequencies(16), plain / factors, rtol=1e-12)


def test_end_of_turn_is_an_end_too(tmp_path: Path, gguf_files: Any) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "llama", gguf_files.hf_tensors("llama"), fields={"tokenizer.ggml.eot_token_id": 5})
    assert config_of(path).eos_token_ids == (2, 5)


def test_window_makes_a_llama_file_mistral(tmp_path: Path, gguf_files: Any) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "llama", gguf_files.hf_tensors("llama"), fields={"llama.attention.sliding_window": 64})
    assert (config_of(path).architecture, config_of(path).sliding_window) == ("mistral", 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.rope.dimension_count": 8}, "partial_rotary_factor 0.5"),
        ({"llama.attention.value_length": 8}, "key_length and value_length differ"),
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale is not supported"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"llama.context_length": None}, r"no field llama\.context_length"),
        ({"llama.attention.head_count_kv": [2, 4]}, "differs by layer"),
    ],
)
def test_config_refused(tmp_path: Path, gguf_files: Any, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "llama", gguf_files.hf_tensors("llama"), fields=fields)
    with pytest.raises(CheckpointError, match=message):
        config_of(path)


def test_unknown_architecture(tmp_path: Path, gguf_files: Any) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "gemma2", gguf_files.hf_tensors("gemma2"))
    with pytest.raises(CheckpointError, match="'gemma2' is not supported; supported: llama, qwen2, qwen3"):
        gguf_config(open_gguf(path))
    with pytest.raises(CheckpointError, match="'gemma2'"):
        open_source(path)


def test_unsupported_tensor_type_is_named_at_open(tmp_path: Path, gguf_files: Any) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "llama", gguf_files.hf_tensors("llama"), kind="Q5_1")
    with pytest.raises(CheckpointError, match=r"tensor token_embd\.weight has type Q5_1; supported: F32, F16, BF16"):
        open_source(path)


def test_unknown_tensor_keeps_its_name(tmp_path: Path, gguf_files: Any) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.attention.head_count", 4)
    for name in ("blk.0.ffn_gate_exps.weight", "blk.1.attn_q.scale", "other.weight"):
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert set(open_source(path).tensors) == {"blk.0.ffn_gate_exps.weight", "blk.1.attn_q.scale", "other.weight"}


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 100, 300, 1000, -5000])
def test_truncated(tmp_path: Path, gguf_files: Any, keep: int) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "llama", gguf_files.hf_tensors("llama"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m\.gguf is no GGUF file, or is truncated"):
        open_gguf(path)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"something else, and long enough to hold a header " * 10)
    with pytest.raises(CheckpointError, match=r"m\.gguf is no GGUF file, .*magic invalid"):
        open_gguf(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.gguf cannot be read: No such file"):
        open_gguf(tmp_path / "absent.gguf")


def test_other_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("x", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="other byte order"):
        open_gguf(path)


def test_split_file(tmp_path: Path, gguf_files: Any) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "llama", gguf_files.hf_tensors("llama"), fields={"split.count": 3})
    with pytest.raises(CheckpointError, match="one of 3 parts; join them"):
        open_gguf(path)


def test_unknown_name(tmp_path: Path, gguf_files: Any) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "llama", gguf_files.hf_tensors("llama"))
    with pytest.raises(CheckpointError, match=r"has no tensor model\.nothing"):
        open_source(path).load("model.nothing")
