"""Sizes and biases of a draft head, read from its tensors; config.json only says how rows divide into heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtspec.checkpoint.draft_head.config import EAGLE, FC, FC_BIAS
from trtspec.checkpoint.draft_head.names import Part
from trtspec.checkpoint.draft_head.reading import Reading
from trtspec.checkpoint.shards import TensorInfo
from trtspec.errors import CheckpointError

QUERY, KEY = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"
GATE, POST_NORM = "layers.0.mlp.gate_proj.weight", "layers.0.post_attention_layernorm.weight"
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSED = re.compile(r"(layers\.\d+\.(?:self_attn|mlp))\.(qkv_proj|gate_up_proj)\.(weight|bias)")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a head's layers."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Biases:
    """Which biases and per-head norms every layer has."""

    fc_bias: bool
    qkv_bias: bool
    qk_norm: bool
    output_bias: bool
    mlp_bias: bool


def split_fused(
    names: Mapping[str, str], tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, Part]:
    """Parts by canonical name, vLLM's joint projections (q/k/v, gate/up) taken apart by rows.

    Raises:
        CheckpointError: the rows can't be divided as config.json says.
    """
    parts: dict[str, Part] = {}
    for name, original in names.items():
        match = FUSED.fullmatch(name)
        if match is None:
            new = {name: Part(original)}
        else:
            place, fused, kind = match.groups()
            rows, pieces = tensors[original].shape[0], QKV if fused == "qkv_proj" else GATE_UP
            shares = _attention_shares(original, rows, config) if fused == "qkv_proj" else _halves(original, rows)
            new, start = {}, 0
            for piece, share in zip(pieces, shares, strict=True):
                new[f"{place}.{piece}.{kind}"] = Part(original, start, start + share)
                start += share
        for twice in parts.keys() & new.keys():
            raise CheckpointError(f"the draft head has {twice} twice, once inside {original}; remove one of them")
        parts.update(new)
    return parts


def read_sizes(reading: Reading) -> Sizes:
    """The sizes; what config.json says otherwise is a warning.

    Raises:
        CheckpointError: a tensor is missing, or the rows don't divide into heads.
    """
    hidden = reading.matrix(FC)[0] if reading.has(FC) else reading.vector(POST_NORM)
    layers = _count_layers(reading)
    inner = reading.matrix(GATE)[0]
    for key, value in (("hidden_size", hidden), ("num_hidden_layers", layers), ("intermediate_size", inner)):
        reading.compare(key, value)
        reading.findings.decide(key.replace("hidden_layers", "layers"), value, "tensor")
    heads, kv_heads, head_dim = _attention(reading, hidden)
    return Sizes(hidden, inner, layers, heads, kv_heads, head_dim)


def read_biases(reading: Reading, num_layers: int) -> Biases:
    """The biases and per-head norms that the file has; what config.json says otherwise is a warning.

    Raises:
        CheckpointError: layers differ.
    """
    fc_bias = reading.has(FC_BIAS)
    _compare_bias(reading, "fc bias", fc_bias, _stated_fc_bias(reading))
    qkv_bias = _uniform(reading, num_layers, [f"self_attn.{name}.bias" for name in QKV])
    _compare_bias(reading, "q/k/v bias", qkv_bias, reading.flag("qkv_bias", "attention_bias"))
    qk_norm = _uniform(reading, num_layers, ["self_attn.q_norm.weight", "self_attn.k_norm.weight"])
    output_bias = _uniform(reading, num_layers, ["self_attn.o_proj.bias"])
    mlp_bias = _uniform(reading, num_layers, [f"mlp.{name}.bias" for name in (*GATE_UP, "down_proj")])
    for name, value in (
        ("fc_bias", fc_bias),
        ("qkv_bias", qkv_bias),
        ("qk_norm", qk_norm),
        ("output_bias", output_bias),
        ("mlp_bias", mlp_bias),
    ):
        reading.findings.decide(name, value, "tensor")
    return Biases(fc_bias, qkv_bias, qk_norm, output_bias, mlp_bias)


def _count_layers(reading: Reading) -> int:
    found = {int(m[1]) for name in reading.tensors.tensors if (m := re.match(r"layers\.(\d+)\.", name))}
    if found != set(range(len(found))):
        raise CheckpointError(f"the draft head has layers {sorted(found)}, expected 0 onwards without a gap")
    if not found:
        raise reading.missing(QUERY)
    return len(found)


def _attention(reading: Reading, hidden: int) -> tuple[int, int, int]:
    """Heads, key/value heads and head_dim; the head's own configuration may differ from the target's in all."""
    heads = reading.integer("num_attention_heads")
    if heads is None:
        raise CheckpointError("config.json has no 'num_attention_heads'; is it this head's?")
    query, key = reading.matrix(QUERY)[0], reading.matrix(KEY)[0]
    stated_dim, stated_kv = reading.integer("head_dim"), reading.integer("num_key_value_heads") or heads
    head_dim = stated_dim or query // heads
    divided = query == heads * head_dim and key % head_dim == 0
    # Without head_dim in config.json it rests on the number of heads alone, so the keys must confirm it.
    if not divided or (stated_dim is None and head_dim != hidden // heads and key != stated_kv * head_dim):
        raise CheckpointError(
            f"{reading.name(QUERY)} has {query} rows and {reading.name(KEY)} {key}, which are not {heads} and "
            f"{stated_kv} heads of {stated_dim or hidden // heads}; is config.json this head's?"
        )
    kv_heads = key // head_dim
    reading.compare("num_key_value_heads", kv_heads)
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(f"{heads} heads on {kv_heads} key/value heads of {head_dim}: not supported")
    reading.findings.decide("num_heads", heads, "config")
    reading.findings.decide("num_kv_heads", kv_heads, "tensor")
    note = "" if head_dim * heads == hidden else f"not hidden_size / num_heads ({hidden} / {heads})"
    reading.findings.decide("head_dim", head_dim, "config" if stated_dim else "tensor", note)
    return heads, kv_heads, head_dim


def _attention_shares(name: str, rows: int, config: Mapping[str, Any]) -> list[int]:
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads < 1 or kv_heads < 1:
        raise CheckpointError(f"{name} can't be split: config.json has no usable num_attention_heads")
    head_dim = config.get("head_dim") or rows // (heads + 2 * kv_heads)
    shares = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    if sum(shares) != rows:
        raise CheckpointError(
            f"{name} has {rows} rows, expected {sum(shares)}: {heads} + 2 x {kv_heads} heads of {head_dim}; "
            "is config.json this head's?"
        )
    return shares


def _halves(name: str, rows: int) -> list[int]:
    if rows % 2:
        raise CheckpointError(f"{name} has {rows} rows, which can't be gate and up projections of one size")
    return [rows // 2, rows // 2]


def _uniform(reading: Reading, num_layers: int, suffixes: list[str]) -> bool:
    names = [f"layers.{layer}.{suffix}" for layer in range(num_layers) for suffix in suffixes]
    present = [name for name in names if reading.has(name)]
    if present and len(present) != len(names):
        absent = next(name for name in names if not reading.has(name))
        raise CheckpointError(f"the draft head has {present[0]} but no {absent}; heads that mix them are not supported")
    return bool(present)


def _stated_fc_bias(reading: Reading) -> bool | None:
    """What config.json implies, None where the format has no rule."""
    if reading.source_format == "speculators-eagle":
        keys = ["fusion_bias"]
    else:
        keys = ["eagle_fc_bias", "bias"] if reading.kind == EAGLE else ["bias"]
    stated = next((value for key in keys if (value := reading.flag(key)) is not None), None)
    if stated is not None or reading.source_format == "eagle-norms":
        return stated
    # The official EAGLE-1 code has the bias unless its configuration says otherwise; others must ask for it.
    return reading.source_format == "eagle-official"


def _compare_bias(reading: Reading, what: str, present: bool, stated: bool | None) -> None:
    if stated is not None and stated != present:
        has, says = ("has", "says none") if present else ("has no", "implies one")
        reading.findings.warn(f"the file {has} {what}, config.json {says}: the tensors are followed")
