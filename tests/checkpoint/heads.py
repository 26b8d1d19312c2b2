"""Tiny EAGLE draft heads, written as the tools that make them write them, with weights that can't pass for others.

A weight depends on its role only, so the same head written in two formats has equal weights.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trtspec.checkpoint.rope import RopeConfig
from trtspec.checkpoint.target import TargetConfig

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, DRAFT_VOCAB, TOKEN_MAP = 32, 2, 1, 16, 48, 64, 40, 16
TARGET_LAYERS, BOUNDARIES = 8, (2, 4, 5)
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
Tensors = dict[str, torch.Tensor]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "torch_dtype": "float16",
}


def target_config(**changes: Any) -> TargetConfig:
    """The target that the heads are for, of 8 layers."""
    fields: dict[str, Any] = {
        "architecture": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_layers": TARGET_LAYERS,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "tied": False,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_window": None,
        "eos_token_ids": (2,),
        "rope": RopeConfig(),
    }
    return TargetConfig(**{**fields, **changes})


def weight(role: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """float32 values that depend on role and seed; vectors (norms, biases) are uniform between 0.3 and 2."""
    generator = torch.Generator().manual_seed(zlib.crc32(role.encode()) + seed)
    if len(shape) == 1:
        return 0.3 + 1.7 * torch.rand(shape, generator=generator)
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def embedding(hidden: int = HIDDEN) -> torch.Tensor:
    """The target's embedding table, of which heads hold copies."""
    return weight("embed_tokens.weight", VOCAB, hidden)


def target_lm_head() -> torch.Tensor:
    """The target's LM head."""
    return weight("target lm_head.weight", VOCAB, HIDDEN)


def draft_ids() -> list[int]:
    """The target ids of the 40 tokens that EAGLE-3 heads draft; 0 isn't among them."""
    order = torch.randperm(VOCAB - 1, generator=torch.Generator().manual_seed(1)) + 1
    return sorted(order[:DRAFT_VOCAB].tolist())


def token_map() -> list[int]:
    """The 16 target ids that a truncated EAGLE-1 head drafts."""
    return sorted(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:TOKEN_MAP].tolist())


def layer(
    prefix: str, attended: int, *, head_dim: int = HEAD_DIM, bias: bool = False, qk_norm: bool = False
) -> Tensors:
    """A layer's attention, MLP and second norm; `prefix` ends in the layer's number, so roles are told apart by it."""
    query, key = HEADS * head_dim, KV_HEADS * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (query, attended),
        "self_attn.k_proj.weight": (key, attended),
        "self_attn.v_proj.weight": (key, attended),
        "self_attn.o_proj.weight": (HIDDEN, query),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if bias:
        shapes |= {f"self_attn.{name}_proj.bias": (query if name == "q" else key,) for name in "qkv"}
    if qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    return {f"{prefix}.{suffix}": weight(f"{prefix}.{suffix}", *shape) for suffix, shape in shapes.items()}


def e1_tensors(*, fc_bias: bool = True, qkv_bias: bool = False, layers: int = 1) -> Tensors:
    """Official EAGLE-1 weights."""
    tensors = {"embed_tokens.weight": embedding(), "fc.weight": weight("fc.weight", HIDDEN, 2 * HIDDEN)}
    if fc_bias:
        tensors["fc.bias"] = weight("fc.bias", HIDDEN)
    for number in range(layers):
        tensors |= layer(f"layers.{number}", HIDDEN, bias=qkv_bias)
        if number:
            name = f"layers.{number}.input_layernorm.weight"
            tensors[name] = weight(name, HIDDEN)
    return tensors


def e3_tensors(
    *,
    target_hidden: int = HIDDEN,
    draft_vocab: int = DRAFT_VOCAB,
    head_dim: int = HEAD_DIM,
    features: int = 3,
    with_embedding: bool = False,
    qk_norm: bool = False,
    bias: bool = False,
) -> Tensors:
    """EAGLE-3 weights with layer 0 called layers.0; no maps where the draft vocabulary is the target's."""
    tensors = {
        "fc.weight": weight("fc.weight", HIDDEN, features * target_hidden),
        "norm.weight": weight("norm.weight", HIDDEN),
        "lm_head.weight": weight("lm_head.weight", draft_vocab, HIDDEN),
        **layer("layers.0", 2 * HIDDEN, head_dim=head_dim, qk_norm=qk_norm, bias=bias),
        "layers.0.input_layernorm.weight": weight("layers.0.input_layernorm.weight", HIDDEN),
        "layers.0.hidden_norm.weight": weight("layers.0.hidden_norm.weight", HIDDEN),
    }
    if draft_vocab < VOCAB:
        ids = torch.tensor(draft_ids())
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    if with_embedding:
        tensors["embed_tokens.weight"] = embedding()
    return tensors


def later_layer(number: int = 1) -> Tensors:
    """A later layer of a speculators EAGLE-3 head."""
    name = f"layers.{number}.input_layernorm.weight"
    return {**layer(f"layers.{number}", HIDDEN), name: weight(name, HIDDEN)}


def fuse(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """q/k/v and gate/up joined, as vLLM holds them."""
    result = dict(tensors)
    for name in tensors:
        for first, others, fused in (
            ("q_proj", ("k_proj", "v_proj"), "qkv_proj"),
            ("gate_proj", ("up_proj",), "gate_up_proj"),
        ):
            if f".{first}." in name:
                names = [name, *(name.replace(first, other) for other in others)]
                result[name.replace(first, fused)] = torch.cat([result.pop(each) for each in names])
    return result


def save_head(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    safetensors: bool = True,
    rename: Callable[[str], str] = str,
    dtype: torch.dtype | None = None,
) -> Tensors:
    """Write a head's directory and return the tensors under the names they have in it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    cast = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in tensors.items()}
    stored = {rename(name): tensor.contiguous() for name, tensor in cast.items()}
    if safetensors:
        save_file(stored, directory / "model.safetensors")
    else:
        torch.save(stored, directory / "pytorch_model.bin")
    return stored


def edit(tensors: Tensors, changes: Mapping[str, torch.Tensor | None] | None) -> Tensors:
    """Tensors added or replaced, and taken away where the change is None."""
    merged = {**tensors, **(changes or {})}
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


def make_e1(
    directory: Path,
    *,
    fc_bias: bool = True,
    qkv_bias: bool = False,
    layers: int = 1,
    poison: bool = False,
    changes: Mapping[str, torch.Tensor | None] | None = None,
    config: Mapping[str, Any] | None = None,
    without: Iterable[str] = (),
    **options: Any,
) -> Tensors:
    """The official EAGLE-1 format; `poison` adds the norms that it doesn't apply.

    Args:
        changes: see `edit`.
        config: fields of config.json added or replaced.
        without: fields left out.
        options: of `save_head`.
    """
    tensors = e1_tensors(fc_bias=fc_bias, qkv_bias=qkv_bias, layers=layers)
    if poison:
        tensors |= {name: torch.full((HIDDEN,), 7.0) for name in ("layers.0.input_layernorm.weight", "norm.weight")}
    fields = {**CONFIG, "num_hidden_layers": layers, **({} if fc_bias else {"bias": False})}
    fields |= {"qkv_bias": True} if qkv_bias else {}
    fields = {key: value for key, value in {**fields, **(config or {})}.items() if key not in set(without)}
    return save_head(directory, edit(tensors, changes), fields, **{"safetensors": False, **options})


def vllm_name(name: str) -> str:
    """The longer of the spellings that vLLM's EAGLE-1 loader takes."""
    if name.startswith(("fc.", "enorm.", "hnorm.", "token_map")):
        return name
    return f"model.{name}" if name.startswith("lm_head.") else f"model.model.{name}"


def make_e2(
    directory: Path,
    *,
    bias_flag: bool = True,
    slots: bool = False,
    para_norm: bool = False,
    mapped: bool = False,
    lm_head_rows: int = VOCAB,
    changes: Mapping[str, torch.Tensor | None] | None = None,
    config: Mapping[str, Any] | None = None,
    outer: Mapping[str, Any] | None = None,
    **options: Any,
) -> Tensors:
    """EAGLE-1 converted for vLLM: the target's LM head added, the configuration nested.

    Args:
        slots: with the weights of layer 0's input norm and of the output norm.
        para_norm: with enorm and hnorm, and the flag for them.
        mapped: with a token_map of 16 ids; `lm_head_rows` may then be 16, too.
        config: inner fields added or replaced; `outer` the same of the outer object.
    """
    rows = target_lm_head()
    tensors = {**e1_tensors(), "lm_head.weight": rows if lm_head_rows == VOCAB else rows[token_map()]}
    inner = {
        **CONFIG,
        **({"eagle_fc_bias": True} if bias_flag else {}),
        **({"add_para_norm": True} if para_norm else {}),
    }
    names = ["layers.0.input_layernorm.weight", "norm.weight"] if slots else []
    names += ["enorm.weight", "hnorm.weight"] if para_norm else []
    tensors |= {name: weight(name, HIDDEN) for name in names}
    if mapped:
        tensors["token_map"] = torch.tensor(token_map())
    wrapped = {
        "model_type": "eagle",
        "model": {**inner, **(config or {})},
        **({"truncated_vocab_size": TOKEN_MAP} if mapped else {}),
        **(outer or {}),
    }
    return save_head(directory, edit(tensors, changes), wrapped, **options)


def make_e3(
    directory: Path,
    *,
    names: str = "midlayer",
    maps: Sequence[str] = ("d2t", "t2d"),
    changes: Mapping[str, torch.Tensor | None] | None = None,
    config: Mapping[str, Any] | None = None,
    without: Iterable[str] = (),
    rename: Callable[[str], str] = str,
    safetensors: bool = False,
    dtype: torch.dtype | None = None,
    **variant: Any,
) -> Tensors:
    """The official EAGLE-3 format; `names` is what layer 0 is called, `maps` which maps the file has.

    Args:
        variant: arguments of `e3_tensors`; a draft vocabulary and target width are written to config.json.
        changes: see `edit`; under the names with layers.0.
    """
    tensors = edit(e3_tensors(**variant), changes)
    tensors = {name: t for name, t in tensors.items() if name not in {"d2t", "t2d"} - set(maps)}
    fields = {**CONFIG, "draft_vocab_size": variant.get("draft_vocab", DRAFT_VOCAB)}
    fields |= {"target_hidden_size": variant["target_hidden"]} if "target_hidden" in variant else {}
    fields |= {"head_dim": variant["head_dim"]} if "head_dim" in variant else {}
    fields = {key: value for key, value in {**fields, **(config or {})}.items() if key not in set(without)}
    return save_head(
        directory,
        tensors,
        fields,
        safetensors=safetensors,
        rename=lambda name: rename(name.replace("layers.0", names)),
        dtype=dtype,
    )


def make_e4(
    directory: Path,
    *,
    layers: int = 1,
    feature_norm: str = "none",
    changes: Mapping[str, torch.Tensor | None] | None = None,
    config: Mapping[str, Any] | None = None,
    layer_config: Mapping[str, Any] | None = None,
    without: Iterable[str] = (),
    dtype: torch.dtype | None = None,
    **variant: Any,
) -> Tensors:
    """The speculators EAGLE-3 format.

    Args:
        feature_norm: "none", "whole" (norm_before_fc) or "per_feature" (fc_norm).
        config: top-level fields added or replaced; `layer_config` the same of transformer_layer_config.
        variant: arguments of `e3_tensors`.
    """
    tensors = e3_tensors(**{"with_embedding": True, **variant})
    for number in range(1, layers):
        tensors |= later_layer(number)
    width = variant.get("target_hidden", HIDDEN)
    if feature_norm == "whole":
        tensors["input_norm.weight"] = weight("input_norm.weight", 3 * width)
    if feature_norm == "per_feature":
        tensors |= {f"fc_norm.{n}.weight": weight(f"fc_norm.{n}.weight", width) for n in range(3)}
    fields = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
        "draft_vocab_size": variant.get("draft_vocab", DRAFT_VOCAB),
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        **dict.fromkeys(NORM_FLAGS, False),
        "norm_before_fc": feature_norm == "whole",
        "fc_norm": feature_norm == "per_feature",
        "transformer_layer_config": {
            **{key: value for key, value in CONFIG.items() if key != "architectures"},
            "num_hidden_layers": layers,
            **(layer_config or {}),
        },
        **(config or {}),
    }
    fields = {key: value for key, value in fields.items() if key not in set(without)}
    return save_head(directory, edit(tensors, changes), fields, dtype=dtype)
