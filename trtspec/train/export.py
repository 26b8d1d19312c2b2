"""Writing a trained head as an official EAGLE-1 checkpoint, which `checkpoint.draft_head` and others read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from trtspec.errors import ConfigError
from trtspec.staging import staged_directory
from trtspec.train.head import EagleHead


def export_head(
    head: EagleHead,
    directory: Path,
    *,
    vocab_size: int,
    token_ids: torch.Tensor,
    max_positions: int,
    force: bool = False,
) -> None:
    """Write config.json and model.safetensors in float16; the directory appears complete or not at all.

    Args:
        vocab_size: the target's.
        token_ids: int `[draft_vocab]`, ascending: the tokens that the head is to propose. Fewer than the target's go
            into the file as `token_map`.
        max_positions: positions up to which the head is to draft.

    Raises:
        ConfigError: a weight is not finite in float16.
    """
    tensors = {name: value.detach().to("cpu", torch.float16).contiguous() for name, value in head.state_dict().items()}
    for name, value in tensors.items():
        if not value.isfinite().all():
            raise ConfigError(f"{name} is not finite in float16; train again with a lower learning rate")
    sizes = head.sizes
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": True,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "max_position_embeddings": max_positions,
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "torch_dtype": "float16",
        "vocab_size": vocab_size,
    }
    if len(token_ids) < vocab_size:
        config["truncated_vocab_size"] = len(token_ids)
        tensors["token_map"] = token_ids.to("cpu", torch.int32)
    with staged_directory(directory, force=force) as staging:
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True)
        (staging / "config.json").write_text(text + "\n", encoding="utf-8")
