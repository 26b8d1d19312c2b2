"""Which kind of draft head a file holds and who wrote it, from its tensors first and its config.json second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtspec.checkpoint.draft_head.config import EAGLE, EAGLE3
from trtspec.checkpoint.draft_head.names import base_names
from trtspec.checkpoint.shards import TensorInfo
from trtspec.errors import CheckpointError

FIRST_LAYERS = ("midlayer", "midlayer.0", "layers.0", "transformer")
UNSUPPORTED_TENSORS = {
    "mask_hidden": "a P-EAGLE head (mask_hidden)",
    "eh_proj": "a head with eh_proj before its attention",
    "q_a_proj": "a head with multi-head latent attention (q_a_proj)",
    "kv_a_proj_with_mqa": "a head with multi-head latent attention (kv_a_proj_with_mqa)",
    "experts": "a mixture-of-experts head",
}
EXTRA_NORMS = ("embed_layernorm.weight", "post_embedding_layernorm.weight", "embedding_layernorm.weight")


@dataclass(frozen=True)
class Format:
    """Kind and writer of a head, its configuration without nesting, and its tensors' names without prefixes."""

    kind: str
    source_format: str
    config: Mapping[str, Any]
    names: Mapping[str, str]


def identify(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Format:
    """Find out what a head file is.

    Raises:
        CheckpointError: it is no EAGLE head, an incomplete one, or one that isn't supported.
    """
    declared = config.get("speculators_model_type")
    if declared not in (None, EAGLE, EAGLE3):
        raise CheckpointError(f"speculators_model_type {declared!r} is not supported; supported: {EAGLE}, {EAGLE3}")
    names = base_names(name for name in tensors if not name.endswith("rotary_emb.inv_freq"))
    _reject_unsupported(names)
    kind = _kind(names, tensors)
    if declared is not None and declared != kind:
        raise CheckpointError(
            f"config.json says speculators_model_type {declared!r}, the tensors are those of an {kind} head; "
            "is config.json this head's?"
        )
    if kind == EAGLE3 and any(name in names for name in ("enorm.weight", "hnorm.weight")):
        raise CheckpointError("EAGLE-3 heads with enorm or hnorm (use_mtp_layernorm) are not supported")
    writer = _eagle_writer(config, names) if kind == EAGLE else _eagle3_writer(config, names)
    return Format(kind, writer, flatten(config), names)


def is_draft_head(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a checkpoint is a head that `identify` knows."""
    try:
        identify(config, tensors)
    except CheckpointError:
        return False
    return True


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping of a configuration and the model configuration that vLLM or speculators nests in it.

    Raises:
        CheckpointError: the nested configuration is no object.
    """
    key = "model" if config.get("model_type") == "eagle" and "model" in config else "transformer_layer_config"
    nested = config.get(key)
    if nested is None:
        return dict(config)
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"config.json: {key} is a {type(nested).__name__}, expected an object")
    outer = {name: value for name, value in config.items() if name != key}
    return {**outer, **nested}


def _reject_unsupported(names: Mapping[str, str]) -> None:
    for base, original in names.items():
        for part in base.split("."):
            if part in UNSUPPORTED_TENSORS:
                raise CheckpointError(f"{UNSUPPORTED_TENSORS[part]} is not supported as a draft head ({original})")


def _kind(names: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> str:
    if any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names:
        return EAGLE3
    hidden = _first(names, tensors, "post_attention_layernorm.weight", axis=0)
    attended = _first(names, tensors, "self_attn.q_proj.weight", axis=1)
    attended = attended or _first(names, tensors, "self_attn.qkv_proj.weight", axis=1)
    if hidden and attended == 2 * hidden:
        raise CheckpointError(
            f"the first layer attends over {attended} = 2 x {hidden} columns, as in an EAGLE-3 head, but there is no "
            "layers.0.hidden_norm.weight; the head is incomplete: fetch it again"
        )
    fusion = names.get("fc.weight") or names.get("fusion_fc.weight")
    if fusion is None:
        raise CheckpointError(
            "this is no EAGLE draft head: it has neither fc.weight nor a hidden_norm; is it a whole model, or a head "
            "whose tensors were lost?"
        )
    shape = tensors[fusion].shape
    if hidden is None or len(shape) != 2 or shape[1] != 2 * hidden:
        width = "a layer's post_attention_layernorm.weight" if hidden is None else f"[{hidden}, {2 * hidden}]"
        raise CheckpointError(
            f"{fusion} has shape {list(shape)}, an EAGLE-1 head without hidden_norm needs {width}; is it a draft head?"
        )
    return EAGLE


def _first(names: Mapping[str, str], tensors: Mapping[str, TensorInfo], suffix: str, axis: int) -> int | None:
    """Size of an axis of the first layer's tensor, however the file calls the layer."""
    for layer in FIRST_LAYERS:
        original = names.get(f"{layer}.{suffix}")
        if original is not None and len(tensors[original].shape) > axis:
            return tensors[original].shape[axis]
    return None


def _eagle_writer(config: Mapping[str, Any], names: Mapping[str, str]) -> str:
    if config.get("speculators_model_type") or "fusion_fc.weight" in names:
        return "speculators-eagle"
    if any(name in names for name in EXTRA_NORMS):
        return "eagle-norms"
    if config.get("model_type") == "eagle" and "model" in config:
        return "vllm-eagle"
    return "eagle-official"


def _eagle3_writer(config: Mapping[str, Any], names: Mapping[str, str]) -> str:
    if config.get("speculators_model_type"):
        return "eagle3-speculators"
    exported = bool(config.get("eagle_config")) or any("Eagle3" in str(a) for a in config.get("architectures") or [])
    if any(name.startswith("midlayer.") for name in names):
        # Model-Optimizer before December 2025 and its Megatron export write these names too.
        return "eagle3-specforge" if exported else "eagle3-official"
    if "draft_id_to_target_id" in names.values() or any("qkv_proj" in name for name in names):
        return "eagle3-vllm"
    return "eagle3-automodel" if names["layers.0.hidden_norm.weight"].startswith("model.") else "eagle3-nvidia"
