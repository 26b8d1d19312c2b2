"""The LM head that drafting uses where it isn't the target's: a head's own rows, or chosen ones, or 4-bit weights.

Drafts need not be exact, and the LM head of a large vocabulary costs more than the rest of a draft head.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from trtspec import tensors
from trtspec.checkpoint.draft_head import DraftHeadConfig
from trtspec.errors import ConfigError
from trtspec.graph.builder import GraphBuilder
from trtspec.graph.layers import NUMPY_DTYPES, linear
from trtspec.tensors import GraphSpec, WeightRef

INT4_BLOCK = 32
"""Weights of one row that share a scale."""
# Weights quantised at once: few enough to stay in the processor's caches.
_CHUNK = 1 << 19
# The largest weight of a block becomes about this many steps. Beyond 7 it is cut off and the others are nearer: which
# is best differs from block to block.
_STEPS = (7.0, 7.5, 8.0, 8.5, 9.0)


def draft_lm_head_spec(config: DraftHeadConfig, dtype: str, *, weight_as_input: bool) -> GraphSpec:
    """The declared inputs and outputs; logits `[rows, draft_vocab]`."""
    return tensors.lm_head_spec(
        name="draft_lm_head",
        hidden_size=config.hidden_size,
        vocab_size=config.draft_vocab_size,
        dtype=dtype,
        weight_as_input=weight_as_input,
    )


def draft_lm_head_graph(
    config: DraftHeadConfig, weight: WeightRef, directory: Path, *, dtype: str, weight_as_input: bool = False
) -> ir.Model:
    """Hidden rows in, draft logits out.

    Args:
        weight: `[draft_vocab, hidden]`, in a file relative to `directory`.
        weight_as_input: as for `graph.target.lm_head_graph`.
    """
    spec = draft_lm_head_spec(config, dtype, weight_as_input=weight_as_input)
    builder = GraphBuilder(spec, {tensors.LM_HEAD_WEIGHT: weight}, directory)
    name = tensors.LM_HEAD_WEIGHT
    rows = builder.inputs[name] if weight_as_input else builder.weight(name)
    builder.output(tensors.LOGITS, linear(builder, "/draft_lm_head", builder.inputs[tensors.HIDDEN_ROWS], rows))
    return builder.model()


def int4_draft_lm_head_graph(config: DraftHeadConfig, weight: torch.Tensor, *, dtype: str) -> ir.Model:
    """The same with 4-bit weights, which lie in the graph.

    ONNX Runtime makes one operator of the two, four times as fast as Gemm with float32 weights; TensorRT's compilers
    keep the weights in 4 bits.

    Args:
        weight: `[draft_vocab, hidden]`, finite, of any float dtype.

    Raises:
        ConfigError: the hidden size is no multiple of INT4_BLOCK.
    """
    check_int4(config.hidden_size)
    quantised, scales = quantise_int4(weight)
    builder = GraphBuilder(draft_lm_head_spec(config, dtype, weight_as_input=False), {}, Path())
    # Input axis first: the only layout whose two operators ONNX Runtime joins.
    values = builder.constant("/draft_lm_head/int4", quantised.T.astype(ml_dtypes.int4), "int4")
    factors = builder.constant("/draft_lm_head/scales", scales.T.astype(NUMPY_DTYPES[dtype]), dtype)
    path = "/draft_lm_head"
    rows = builder.op("DequantizeLinear", path, values, factors, axis=0, block_size=INT4_BLOCK)
    builder.output(tensors.LOGITS, builder.op("MatMul", path, builder.inputs[tensors.HIDDEN_ROWS], rows))
    return builder.model()


def check_int4(hidden_size: int) -> None:
    """Raise ConfigError where rows of this length can't be quantised."""
    if hidden_size % INT4_BLOCK:
        raise ConfigError(
            f"--draft-lm-head int4 needs a hidden size that is a multiple of {INT4_BLOCK}, the draft head's is "
            f"{hidden_size}; leave the option out"
        )


def quantise_int4(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric 4-bit quantisation of finite `[rows, columns]`: int8 values from -8 to 7, float32 scales per block.

    Returns:
        values `[rows, columns]` and scales `[rows, columns / INT4_BLOCK]`, all above 0.
    """
    values = np.empty(tuple(weight.shape), np.int8)
    scales = np.empty((weight.shape[0], weight.shape[1] // INT4_BLOCK), np.float32)
    step = max(1, _CHUNK // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        values[part], scales[part] = _quantise(weight[part].float())
    return values, scales


def _quantise(rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """float32 `[rows, columns]` to the values and scales with the least squared error among `_STEPS`."""
    blocks = rows.reshape(rows.shape[0], -1, INT4_BLOCK)
    # The smallest float16 that is no subnormal, since scales are stored in the serving dtype.
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(9 * torch.finfo(torch.float16).tiny)
    scale = largest / _STEPS[0]
    best = _steps(blocks, scale)
    error = _squared_error(blocks, best, scale)
    for steps in _STEPS[1:]:
        values = _steps(blocks, largest / steps)
        other = _squared_error(blocks, values, largest / steps)
        better = other < error
        best, error = torch.where(better, values, best), torch.where(better, other, error)
        scale = torch.where(better, largest / steps, scale)
    return best.reshape(rows.shape).to(torch.int8).numpy(), scale.squeeze(-1).numpy()


def _steps(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (blocks / scale).round().clamp(-8, 7)


def _squared_error(blocks: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (blocks - values * scale).square().sum(-1, keepdim=True)
