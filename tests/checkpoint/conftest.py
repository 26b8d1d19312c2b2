"""Tiny GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB, NUM_LAYERS = 4, 2, 16, 256, 512, 24, 2
QUERY, KEY_VALUE = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM

LAYER_TENSORS = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (QUERY, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KEY_VALUE, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KEY_VALUE, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, QUERY)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
}


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's LlamaModel.permute, word for word."""
    permuted: np.ndarray = (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )
    return permuted


def hf_tensors(
    architecture: str, *, tied: bool = False, qkv_bias: bool | None = None, all_bias: bool = False
) -> dict[str, np.ndarray]:
    """Random float32 weights by Hugging Face name."""
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    biased = ["q_proj", "k_proj", "v_proj"] if (architecture == "qwen2" if qkv_bias is None else qkv_bias) else []
    if all_bias:
        biased = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for layer in range(NUM_LAYERS):
        for suffix, shape in LAYER_TENSORS.values():
            shapes[f"model.layers.{layer}.{suffix}.weight"] = shape
            if suffix.rpartition(".")[2] in biased:
                shapes[f"model.layers.{layer}.{suffix}.bias"] = shape[:1]
        if architecture == "qwen3":
            shapes[f"model.layers.{layer}.self_attn.q_norm.weight"] = (HEAD_DIM,)
            shapes[f"model.layers.{layer}.self_attn.k_norm.weight"] = (HEAD_DIM,)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    """The name llama.cpp's converter gives a Hugging Face tensor, from gguf's own tables."""
    mapping = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, NUM_LAYERS)
    found = mapping.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None
    return str(found)


def k_quant_bytes(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random valid blocks: gguf cannot quantise to the K types, only read them."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(3)
    data = random.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    scales = random.uniform(0.01, 0.1, (*shape[:-1], shape[-1] // block, 2)).astype(np.float16).view(np.uint8)
    if kind == gguf.GGMLQuantizationType.Q4_K:
        data[..., :4] = scales
    else:
        data[..., -2:] = scales[..., :2]
    return data.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Mapping[str, np.ndarray],
    *,
    kind: str = "F32",
    fields: Mapping[str, Any] | None = None,
    rope_freqs: np.ndarray | None = None,
    raw: Mapping[str, np.ndarray] | None = None,
    tokens: Callable[[gguf.GGUFWriter], None] | None = None,
) -> None:
    """Write weights by Hugging Face name, matrices as `kind`, the rest as F32.

    Args:
        fields: metadata by key, added to or replacing the usual one; None leaves a key out.
        raw: already quantised bytes by Hugging Face name.
    """
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": NUM_LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": NUM_HEADS,
        "attention.head_count_kv": NUM_KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": 50000.0,
    }
    every = {f"{architecture}.{key}": value for key, value in values.items()}
    every |= {"tokenizer.ggml.eos_token_id": 2, **(fields or {})}
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in every.items():
        if value is not None:
            adders[type(value)](key, value)
    if tokens is not None:
        tokens(writer)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    for name, tensor in tensors.items():
        _add(writer, name, tensor, architecture, gguf.GGMLQuantizationType[kind], (raw or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(
    writer: gguf.GGUFWriter,
    name: str,
    value: np.ndarray,
    architecture: str,
    kind: gguf.GGMLQuantizationType,
    raw: np.ndarray | None,
) -> None:
    stored = value if raw is None else raw
    if architecture == "llama" and "q_proj" in name:
        stored = permute(stored, NUM_HEADS)
    if architecture == "llama" and "k_proj" in name:
        stored = permute(stored, NUM_KV_HEADS)
    stored = np.ascontiguousarray(stored)
    if raw is not None:
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    elif value.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(gguf_name(name), stored)
    else:
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)


class GgufFiles:
    """The functions above, for tests: pytest imports no module that lies beside a test."""

    write = staticmethod(write_gguf)
    hf_tensors = staticmethod(hf_tensors)
    k_quant_bytes = staticmethod(k_quant_bytes)


@pytest.fixture(scope="session")
def gguf_files() -> type[GgufFiles]:
    """How to write tiny GGUF files."""
    return GgufFiles
