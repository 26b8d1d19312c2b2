"""A GGUF file's metadata as a Hugging Face configuration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import GGUFReader

from trtspec.errors import CheckpointError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Fields that change the output and that a plain layer of these architectures doesn't have.
UNSUPPORTED_FIELDS = (
    "attention.scale",
    "attention.clamp_kqv",
    "attention.sliding_window_pattern",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.scaling.yarn_log_multiplier",
)


def architecture(reader: GGUFReader) -> str:
    """The model's architecture.

    Raises:
        CheckpointError: it isn't named, or not supported.
    """
    entry = reader.get_field("general.architecture")
    name = entry.contents() if entry is not None else None
    if name not in ARCHITECTURES:
        raise CheckpointError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return str(name)


def field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """The field `<architecture>.<key>`, one value for all layers.

    Raises:
        CheckpointError: it is missing and has no default, or differs by layer.
    """
    full = f"{architecture(reader)}.{key}"
    entry = reader.get_field(full)
    if entry is None:
        if default is None:
            raise CheckpointError(f"the GGUF file has no field {full}; convert the model again")
        return default
    value = entry.contents()
    if isinstance(value, list):
        if not value or any(other != value[0] for other in value):
            raise CheckpointError(f"GGUF field {full} differs by layer ({value}), which is not supported")
        value = value[0]
    # GGUF floats are float32; the shortest decimal that reads back the same is what the converter was given.
    return float(str(np.float32(value))) if isinstance(value, float) else value


def gguf_config(reader: GGUFReader) -> dict[str, Any]:
    """What config.json of the same model would say, as far as `TargetConfig.from_hf` reads it.

    Raises:
        CheckpointError: the architecture or an option is not supported, or a field is missing.
    """
    name = architecture(reader)
    for key in UNSUPPORTED_FIELDS:
        if reader.get_field(f"{name}.{key}") is not None:
            raise CheckpointError(f"GGUF field {name}.{key} is not supported; it would change the output")
    shapes = {tensor.name: [int(axis) for axis in tensor.shape] for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise CheckpointError("the GGUF file has no tensor token_embd.weight; is it a whole model?")
    heads, hidden = int(field(reader, "attention.head_count")), int(field(reader, "embedding_length"))
    head_dim = int(field(reader, "attention.key_length", hidden // heads))
    if field(reader, "attention.value_length", head_dim) != head_dim:
        raise CheckpointError("GGUF key_length and value_length differ, which is not supported")
    return {
        "model_type": name,
        "hidden_size": hidden,
        "intermediate_size": int(field(reader, "feed_forward_length")),
        "num_hidden_layers": int(field(reader, "block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field(reader, "attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "vocab_size": shapes["token_embd.weight"][-1],
        "rms_norm_eps": field(reader, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": int(field(reader, "context_length")),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_output.bias" in shapes or (name != "qwen2" and "blk.0.attn_q.bias" in shapes),
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "num_local_experts": int(field(reader, "expert_count", 0)),
        "rope_theta": float(field(reader, "rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(reader),
        "partial_rotary_factor": field(reader, "rope.dimension_count", head_dim) / head_dim,
        "eos_token_id": _eos_token_ids(reader),
        **_sliding_window(reader),
    }


def _sliding_window(reader: GGUFReader) -> dict[str, Any]:
    window = field(reader, "attention.sliding_window", 0)
    if not window:
        return {}
    # llama.cpp calls Mistral "llama"; of the two only Mistral has a window.
    name = "mistral" if architecture(reader) == "llama" else architecture(reader)
    return {"model_type": name, "sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}


def _eos_token_ids(reader: GGUFReader) -> list[int]:
    found = (reader.get_field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    return list(dict.fromkeys(int(entry.contents()) for entry in found if entry is not None))


def _rope_scaling(reader: GGUFReader) -> dict[str, Any]:
    factor = float(field(reader, "rope.scaling.factor", field(reader, "rope.scale_linear", 1.0)))
    kind = field(reader, "rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        scaling: dict[str, Any] = {"rope_type": "default"}
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = _yarn(reader, factor)
    else:
        raise CheckpointError(f"GGUF rope scaling {kind!r} is not supported; supported: none, linear, yarn")
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            scaling["frequency_factors"] = [float(value) for value in np.asarray(tensor.data).reshape(-1)]
    return scaling


def _yarn(reader: GGUFReader, factor: float) -> dict[str, Any]:
    if field(reader, "rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise CheckpointError("GGUF yarn_ext_factor other than 1 is not supported")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(
            field(reader, "rope.scaling.original_context_length", field(reader, "context_length"))
        ),
        "beta_fast": field(reader, "rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": field(reader, "rope.scaling.yarn_beta_slow", 1.0),
    }
    # llama.cpp multiplies this one with the factor that YaRN prescribes; in config.json it replaces it.
    extra = field(reader, "rope.scaling.attn_factor", field(reader, "rope.scaling.yarn_attn_factor", 1.0))
    if extra != 1.0:
        scaling["attention_factor"] = extra * (1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0)
    return scaling
