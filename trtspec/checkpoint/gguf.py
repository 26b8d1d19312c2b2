"""Weights and configuration of a GGUF file, under the names that Hugging Face gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader

from trtspec.checkpoint.gguf_config import architecture, field
from trtspec.checkpoint.shards import TensorInfo
from trtspec.errors import CheckpointError

PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTISED_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
ROPE_FREQUENCIES = "rope_freqs.weight"

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DEQUANTISED_ROWS = 1024


def open_gguf(path: Path) -> GGUFReader:
    """A memory-mapped reader of the file.

    Raises:
        CheckpointError: the file is missing, truncated, no GGUF, big-endian, or one of several parts.
    """
    try:
        # Copy-on-write: torch warns about read-only memory, and the file is never changed.
        reader = GGUFReader(path, "c")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # the reader trusts its bytes; wrong ones fail in any way
        raise CheckpointError(f"{path} is no GGUF file, or is truncated ({error}); fetch it again") from None
    if reader.byte_order != "I":
        raise CheckpointError(f"{path} has the other byte order than this machine; get the little-endian file")
    parts = reader.get_field("split.count")
    if parts is not None and parts.contents() > 1:
        raise CheckpointError(f"{path} is one of {parts.contents()} parts; join them with: llama-gguf-split --merge")
    return reader


class GgufSource:
    """Tensors of a GGUF file; `load` dequantises, and undoes llama.cpp's reordering of query and key rows."""

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        """Name and check the tensors of a reader from `open_gguf`.

        Raises:
            CheckpointError: the architecture or a tensor's type is not supported.
        """
        self._path = path
        self._permuted_heads = _permuted_heads(reader)
        self._gguf_tensors = {hf_name(t.name): t for t in reader.tensors if t.name != ROPE_FREQUENCIES}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(_dtype(path, t), tuple(int(axis) for axis in reversed(t.shape.tolist())))
            for name, t in self._gguf_tensors.items()
        }

    def load(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype, or dequantised to float32; treat it as read-only.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self._path} has no tensor {name}")
        info, stored = self.tensors[name], self._gguf_tensors[name]
        data = np.asarray(stored.data)
        if info.dtype == "bfloat16":
            tensor = torch.from_numpy(data).view(torch.bfloat16)
        elif info.dtype in PLAIN_TYPES.values():
            tensor = torch.from_numpy(data)
        else:
            tensor = _dequantise(data, stored.tensor_type, info.shape)
        heads = self._permuted_heads.get(name.rpartition(".")[0].rpartition(".")[2])
        return tensor.reshape(info.shape) if heads is None else _unpermute(tensor.reshape(info.shape), heads)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that isn't known stays as it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{GLOBAL_NAMES[stem]}.{kind}" if stem in GLOBAL_NAMES else name
    return f"model.layers.{int(layer)}.{LAYER_NAMES[stem]}.{kind}" if stem in LAYER_NAMES else name


def _permuted_heads(reader: GGUFReader) -> dict[str, int]:
    """Number of heads by projection, for the projections whose rows llama.cpp's converter reorders."""
    if architecture(reader) != "llama":
        return {}
    query = int(field(reader, "attention.head_count"))
    return {"q_proj": query, "k_proj": int(field(reader, "attention.head_count_kv", query))}


def _dtype(path: Path, tensor: gguf.ReaderTensor) -> str:
    kind = str(tensor.tensor_type.name)
    if kind in PLAIN_TYPES:
        return PLAIN_TYPES[kind]
    if kind not in QUANTISED_TYPES:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} has type {kind}; supported: {', '.join([*PLAIN_TYPES, *QUANTISED_TYPES])}"
        )
    return kind


def _dequantise(data: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> torch.Tensor:
    """float32 of `shape` from bytes `[rows, bytes of a row]`; by groups of rows, as gguf keeps a second copy."""
    result = torch.empty(shape, dtype=torch.float32)
    rows, out = data.reshape(-1, data.shape[-1]), result.reshape(-1, shape[-1])
    for start in range(0, rows.shape[0], DEQUANTISED_ROWS):
        group = slice(start, start + DEQUANTISED_ROWS)
        out[group] = torch.from_numpy(gguf.quants.dequantize(rows[group], kind))
    return result


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from llama.cpp's order (the halves of a head interleaved) back to one half after the other.

    Args:
        tensor: `[heads * head_dim, ...]`, weight or bias.
    """
    halves = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
