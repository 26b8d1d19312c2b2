"""EAGLE draft heads as ONNX graphs: EAGLE-1/2 and EAGLE-3, wired as the canonical record says.

The wiring is that of the SafeAILab/EAGLE reference code. An EAGLE-1/2 head has no norm before layer 0's attention and
none before the LM head, takes the target's hidden state after its final norm, and feeds its own output back. An EAGLE-3
head attends over [norm(embedding); norm(hidden)] and feeds back its output before the norm that the LM head reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from trtspec import tensors
from trtspec.checkpoint.draft_head.config import (
    EAGLE,
    EMBEDDING_NORM,
    FC,
    FC_BIAS,
    FEATURE_NORM,
    HIDDEN_NORM,
    OUTPUT_NORM,
    DraftHeadConfig,
)
from trtspec.graph.attention import StepInputs, attention, step_inputs
from trtspec.graph.builder import GraphBuilder
from trtspec.graph.layers import gated_mlp, linear, reshape, rms_norm, rope_tables, slice_columns
from trtspec.tensors import GraphSpec, WeightRef


def draft_head_spec(config: DraftHeadConfig, cache_rows: int, dtype: str) -> GraphSpec:
    """The declared inputs and outputs of this head."""
    return tensors.draft_head_spec(
        hidden_size=config.hidden_size,
        input_hidden_size=config.target_hidden_size if config.kind == EAGLE else config.hidden_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        cache_rows=cache_rows,
        dtype=dtype,
        separate_logit_hidden=config.output_norm and config.feedback == "pre_norm",
    )


def draft_head_graph(
    config: DraftHeadConfig, weights: Mapping[str, WeightRef], directory: Path, *, cache_rows: int, dtype: str
) -> ir.Model:
    """The head's layers; see `tensors.draft_head_spec`.

    Args:
        weights: by canonical name (`checkpoint.draft_head.weight_shapes`); files relative to `directory`.
        cache_rows: rows of the head's KV cache per slot, and of its rotary tables.
    """
    builder = GraphBuilder(draft_head_spec(config, cache_rows, dtype), weights, directory)
    cos, sin = rope_tables(builder, config.rope, config.head_dim, cache_rows, dtype)
    step = step_inputs(builder, cos, sin)
    embeds = _rows(builder, tensors.INPUTS_EMBEDS)
    hidden = _rows(builder, tensors.HIDDEN_INPUT)
    first = _first_layer_eagle if config.kind == EAGLE else _first_layer_eagle3
    x = first(builder, embeds, hidden, config, step)
    for layer in range(1, config.num_layers):
        normed = _norm(builder, f"/layers.{layer}/input_norm", x, f"layers.{layer}.input_norm.weight", config)
        x = _attend(builder, x, normed, layer, config, step)
    _give_out(builder, x, config)
    return builder.model()


def fuse_spec(config: DraftHeadConfig, dtype: str) -> GraphSpec:
    """The declared inputs and outputs of this head's `fuse` graph."""
    return tensors.fuse_spec(
        feature_size=config.num_features * config.target_hidden_size, hidden_size=config.hidden_size, dtype=dtype
    )


def fuse_graph(config: DraftHeadConfig, weights: Mapping[str, WeightRef], directory: Path, *, dtype: str) -> ir.Model:
    """EAGLE-3: the target's features `[rows, num_features * target_hidden]` to the head's first hidden state."""
    builder = GraphBuilder(fuse_spec(config, dtype), weights, directory)
    x = builder.inputs[tensors.FEATURES]
    if config.feature_norm == "whole":
        x = _norm(builder, "/fuse/norm", x, FEATURE_NORM, config)
    elif config.feature_norm == "per_feature":
        x = _per_feature_norm(builder, x, config)
    bias = builder.weight(FC_BIAS) if config.fc_bias else None
    builder.output(tensors.FUSED, linear(builder, "/fuse/fc", x, builder.weight(FC), bias))
    return builder.model()


def _first_layer_eagle(
    builder: GraphBuilder, embeds: ir.Value, hidden: ir.Value, config: DraftHeadConfig, step: StepInputs
) -> ir.Value:
    """fc([embedding; hidden]), then a layer whose attention reads fc's output as it is."""
    if config.embedding_norm:
        embeds = _norm(builder, "/embedding_norm", embeds, EMBEDDING_NORM, config)
    if config.hidden_norm:
        hidden = _norm(builder, "/hidden_norm", hidden, HIDDEN_NORM, config)
    both = builder.op("Concat", "/fc", embeds, hidden, axis=-1)
    x = linear(builder, "/fc", both, builder.weight(FC), builder.weight(FC_BIAS) if config.fc_bias else None)
    attended = x
    if config.input_norm:
        attended = _norm(builder, "/layers.0/input_norm", x, "layers.0.input_norm.weight", config)
    return _attend(builder, x, attended, 0, config, step)


def _first_layer_eagle3(
    builder: GraphBuilder, embeds: ir.Value, hidden: ir.Value, config: DraftHeadConfig, step: StepInputs
) -> ir.Value:
    """A layer whose attention reads [norm(embedding); norm(hidden)], twice as wide as its residual."""
    embeds = _norm(builder, "/embedding_norm", embeds, EMBEDDING_NORM, config)
    inner = hidden
    if config.double_hidden_norm:
        inner = _norm(builder, "/embedding_norm_of_hidden", hidden, EMBEDDING_NORM, config)
    normed = _norm(builder, "/hidden_norm", inner, HIDDEN_NORM, config)
    both = builder.op("Concat", "/attended", embeds, normed, axis=-1)
    return _attend(builder, normed if config.residual == "normed" else hidden, both, 0, config, step)


def _attend(
    builder: GraphBuilder,
    residual: ir.Value,
    attended: ir.Value,
    layer: int,
    config: DraftHeadConfig,
    step: StepInputs,
) -> ir.Value:
    """residual + attention(attended), then the MLP with its own residual; `[batch * width, hidden]`."""
    path, prefix = f"/layers.{layer}", f"layers.{layer}"
    mixed = attention(builder, f"{path}/attn", f"{prefix}.self_attn", attended, layer, config, step)
    x = builder.op("Add", f"{path}/attn_residual", residual, mixed)
    norm_path = f"{path}/post_attention_layernorm"
    normed = _norm(builder, norm_path, x, f"{prefix}.post_attention_layernorm.weight", config)
    mlp = gated_mlp(builder, f"{path}/mlp", f"{prefix}.mlp", normed, bias=config.mlp_bias)
    return builder.op("Add", f"{path}/mlp_residual", x, mlp)


def _give_out(builder: GraphBuilder, x: ir.Value, config: DraftHeadConfig) -> None:
    normed = _norm(builder, "/norm", x, OUTPUT_NORM, config) if config.output_norm else x
    shape = builder.op("Shape", "/row_shape", builder.inputs[tensors.INPUTS_EMBEDS])
    feedback = normed if config.feedback == "post_norm" else x
    builder.output(tensors.FEEDBACK, builder.op("Reshape", "/feedback", feedback, shape))
    if feedback is not normed:
        builder.output(tensors.LOGIT_HIDDEN, builder.op("Reshape", "/logit_hidden", normed, shape))


def _per_feature_norm(builder: GraphBuilder, x: ir.Value, config: DraftHeadConfig) -> ir.Value:
    """Each of the concatenated features normalised with its own weight."""
    parts = []
    for n in range(config.num_features):
        part = slice_columns(builder, f"/fuse/feature.{n}", x, n * config.target_hidden_size, config.target_hidden_size)
        parts.append(_norm(builder, f"/fuse/feature_norm.{n}", part, f"feature_norm.{n}.weight", config))
    return builder.op("Concat", "/fuse/features", *parts, axis=-1)


def _norm(builder: GraphBuilder, path: str, x: ir.Value, weight: str, config: DraftHeadConfig) -> ir.Value:
    return rms_norm(builder, path, x, builder.weight(weight), config.rms_norm_eps)


def _rows(builder: GraphBuilder, name: str) -> ir.Value:
    width = builder.inputs[name].shape
    assert width is not None
    return reshape(builder, f"/rows/{name}", builder.inputs[name], (-1, int(str(width[2]))))
