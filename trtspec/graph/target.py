"""The target's decoder body and its LM head as ONNX graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from trtspec import tensors
from trtspec.checkpoint.target import EMBEDDING, FINAL_NORM, LM_HEAD, TargetConfig
from trtspec.graph.attention import StepInputs, attention, step_inputs
from trtspec.graph.builder import GraphBuilder
from trtspec.graph.layers import gated_mlp, linear, reshape, rms_norm, rope_tables
from trtspec.tensors import WeightRef


def target_spec(
    config: TargetConfig, cache_rows: int, dtype: str, boundaries: tuple[int, ...] = ()
) -> tensors.GraphSpec:
    """The declared inputs and outputs of this target's body; `boundaries` as for `target_graph`."""
    return tensors.target_spec(
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        cache_rows=cache_rows,
        dtype=dtype,
        num_taps=len(boundaries),
    )


def lm_head_spec(config: TargetConfig, dtype: str, *, weight_as_input: bool) -> tensors.GraphSpec:
    """The declared inputs and outputs of this target's LM head."""
    return tensors.lm_head_spec(
        hidden_size=config.hidden_size, vocab_size=config.vocab_size, dtype=dtype, weight_as_input=weight_as_input
    )


def target_graph(
    config: TargetConfig,
    weights: Mapping[str, WeightRef],
    directory: Path,
    *,
    cache_rows: int,
    dtype: str,
    boundaries: tuple[int, ...] = (),
) -> ir.Model:
    """Embeddings in, hidden states after the final norm out; see `tensors.target_spec`.

    Args:
        weights: by checkpoint name; files relative to `directory`.
        cache_rows: rows of the KV cache per slot, and of the rotary tables.
        boundaries: b stands for the residual stream after b layers, before any final norm (0: the embeddings); the
            second output is these streams in the order given, side by side.
    """
    builder = GraphBuilder(target_spec(config, cache_rows, dtype, boundaries), weights, directory)
    cos, sin = rope_tables(builder, config.rope, config.head_dim, cache_rows, dtype)
    step = step_inputs(builder, cos, sin)
    x = reshape(builder, "/model/rows", builder.inputs[tensors.INPUTS_EMBEDS], (-1, config.hidden_size))
    residuals = [x]
    for layer in range(config.num_layers):
        residuals.append(_decoder_layer(builder, residuals[-1], layer, config, step))
    x = rms_norm(builder, "/model/norm", residuals[-1], builder.weight(FINAL_NORM), config.rms_norm_eps)
    shape = builder.op("Shape", "/hidden_shape", builder.inputs[tensors.INPUTS_EMBEDS])
    builder.output(tensors.HIDDEN_STATES, builder.op("Reshape", "/model/hidden_states", x, shape))
    if boundaries:
        taps = [builder.op("Reshape", f"/model/boundaries.{b}", residuals[b], shape) for b in boundaries]
        builder.output(tensors.AUX_HIDDEN_STATES, builder.op("Concat", "/model/boundaries", *taps, axis=-1))
    return builder.model()


def lm_head_graph(
    config: TargetConfig,
    weights: Mapping[str, WeightRef],
    directory: Path,
    *,
    dtype: str,
    weight_as_input: bool = False,
) -> ir.Model:
    """Hidden rows in, logits out; a tied head reads the embedding table's bytes.

    Args:
        weight_as_input: bind the weight at run time (TensorRT shares it with the embedding); else an initializer
            (ONNX Runtime packs it ahead of time, two to three times faster than a weight it sees at run time).
    """
    builder = GraphBuilder(lm_head_spec(config, dtype, weight_as_input=weight_as_input), weights, directory)
    if weight_as_input:
        weight = builder.inputs[tensors.LM_HEAD_WEIGHT]
    else:
        weight = builder.weight(EMBEDDING if config.tied else LM_HEAD)
    builder.output(tensors.LOGITS, linear(builder, "/lm_head", builder.inputs[tensors.HIDDEN_ROWS], weight))
    return builder.model()


def _decoder_layer(builder: GraphBuilder, x: ir.Value, layer: int, config: TargetConfig, step: StepInputs) -> ir.Value:
    """Pre-norm attention and gated MLP, each with its residual; x `[batch * width, hidden]`."""
    path, prefix = f"/model/layers.{layer}", f"model.layers.{layer}"
    norm = builder.weight(f"{prefix}.input_layernorm.weight")
    normed = rms_norm(builder, f"{path}/input_layernorm", x, norm, config.rms_norm_eps)
    attended = attention(builder, f"{path}/attn", f"{prefix}.self_attn", normed, layer, config, step)
    x = builder.op("Add", f"{path}/attn_residual", x, attended)
    norm = builder.weight(f"{prefix}.post_attention_layernorm.weight")
    normed = rms_norm(builder, f"{path}/post_attention_layernorm", x, norm, config.rms_norm_eps)
    mixed = gated_mlp(builder, f"{path}/mlp", f"{prefix}.mlp", normed, bias=config.mlp_bias)
    return builder.op("Add", f"{path}/mlp_residual", x, mixed)
