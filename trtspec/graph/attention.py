"""Grouped-query attention over a preallocated KV cache with an arbitrary tree mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtspec import tensors
from trtspec.checkpoint.layer import LayerConfig
from trtspec.graph.builder import GraphBuilder
from trtspec.graph.layers import linear, reshape, rms_norm


@dataclass(frozen=True)
class StepInputs:
    """What every layer of one pass shares."""

    position_ids: ir.Value
    """`[batch, width]`"""
    cache_length: ir.Value
    """`[batch]`: rows already in the cache; this pass writes behind them."""
    tree_mask: ir.Value
    """`[batch, 1, width, live_len]`, true where a row may look."""
    row_shape: ir.Value
    """`[2]`: batch and width."""
    live_len: ir.Value
    """`[1]`: the tree mask's last axis; the cache is cut to it, so its unused tail costs nothing."""
    cos: ir.Value
    sin: ir.Value


def step_inputs(builder: GraphBuilder, cos: ir.Value, sin: ir.Value) -> StepInputs:
    """Collect the declared inputs and derive the live length from the mask's shape."""
    mask = builder.inputs[tensors.TREE_MASK]
    return StepInputs(
        position_ids=builder.inputs[tensors.POSITION_IDS],
        cache_length=builder.inputs[tensors.CACHE_LENGTH],
        tree_mask=mask,
        row_shape=builder.op("Shape", "/rows", builder.inputs[tensors.POSITION_IDS]),
        live_len=builder.op("Shape", "/live_len", mask, start=3, end=4),
        cos=cos,
        sin=sin,
    )


def attention(
    builder: GraphBuilder, path: str, prefix: str, x: ir.Value, layer: int, config: LayerConfig, step: StepInputs
) -> ir.Value:
    """Self-attention of one layer.

    x `[batch * width, hidden]` --q,k,v--> rotary --k,v--> TensorScatter into the cache --cut to live_len--> Attention
                                             `--q------------------------------------------------------------^
    """
    queries = _heads(builder, path, prefix, "q", x, config.num_heads, config, step)
    keys = _heads(builder, path, prefix, "k", x, config.num_kv_heads, config, step)
    values = _heads(builder, path, prefix, "v", x, config.num_kv_heads, config, step)
    live_keys = _cache_update(builder, f"{path}/k_cache", layer, "key", keys, step)
    live_values = _cache_update(builder, f"{path}/v_cache", layer, "value", values, step)
    mixed = builder.op(
        "Attention", path, queries, live_keys, live_values, step.tree_mask, scale=float(config.head_dim) ** -0.5
    )
    rows = builder.op("Transpose", f"{path}/merge_heads", mixed, perm=[0, 2, 1, 3])
    rows = reshape(builder, f"{path}/merge_heads", rows, (-1, config.num_heads * config.head_dim))
    bias = builder.weight(f"{prefix}.o_proj.bias") if config.output_bias else None
    return linear(builder, f"{path}/o_proj", rows, builder.weight(f"{prefix}.o_proj.weight"), bias)


def _heads(
    builder: GraphBuilder,
    path: str,
    prefix: str,
    kind: str,
    x: ir.Value,
    num_heads: int,
    config: LayerConfig,
    step: StepInputs,
) -> ir.Value:
    """Project, normalise (Qwen3) and rotate (not the values): `[batch, num_heads, width, head_dim]`."""
    bias = builder.weight(f"{prefix}.{kind}_proj.bias") if config.qkv_bias else None
    flat = linear(builder, f"{path}/{kind}_proj", x, builder.weight(f"{prefix}.{kind}_proj.weight"), bias)
    head_shape = builder.constant(
        f"/shapes/heads_{num_heads}", np.array([num_heads, config.head_dim], np.int64), "int64"
    )
    shape = builder.op("Concat", f"{path}/{kind}_split", step.row_shape, head_shape, axis=0)
    split = builder.op("Reshape", f"{path}/{kind}_split", flat, shape)
    if kind != "v" and config.qk_norm:
        split = rms_norm(
            builder, f"{path}/{kind}_norm", split, builder.weight(f"{prefix}.{kind}_norm.weight"), config.rms_norm_eps
        )
    heads = builder.op("Transpose", f"{path}/{kind}_heads", split, perm=[0, 2, 1, 3])
    if kind == "v":
        return heads
    return builder.op("RotaryEmbedding", f"{path}/{kind}_rope", heads, step.cos, step.sin, step.position_ids)


def _cache_update(
    builder: GraphBuilder, path: str, layer: int, kind: str, update: ir.Value, step: StepInputs
) -> ir.Value:
    """Write `update` behind the committed rows, in place, and return the live part of the cache."""
    past = builder.inputs[tensors.past_name(layer, kind)]
    present = builder.op("TensorScatter", path, past, update, step.cache_length, axis=2)
    builder.output(tensors.present_name(layer, kind), present)
    start = builder.constant("/shapes/zero", np.array([0], np.int64), "int64")
    axis = builder.constant("/shapes/sequence_axis", np.array([2], np.int64), "int64")
    return builder.op("Slice", path, present, start, step.live_len, axis)
