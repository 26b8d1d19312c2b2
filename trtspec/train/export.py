"""Writing a trained head as an official EAGLE-1 checkpoint, and reading one to train on."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from safetensors.torch import save_file

from trtspec.checkpoint.draft_head import RANKING, open_draft_head
from trtspec.checkpoint.target import TargetConfig
from trtspec.errors import ConfigError
from trtspec.staging import staged_directory
from trtspec.train.head import EagleHead, HeadSizes


def export_head(
    head: EagleHead,
    directory: Path,
    *,
    vocab_size: int,
    max_positions: int,
    ranking: Seq[int] = (),
) -> None:
    """Write config.json, model.safetensors in float16, and RANKING; the directory appears complete or not at all.

    Args:
        vocab_size: the target's.
        max_positions: positions up to which the head is to draft.
        ranking: token ids, the most frequent first, from which `trtspec build --draft-vocab N` chooses.

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
    with staged_directory(directory, force=False) as staging:
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True)
        (staging / "config.json").write_text(text + "\n", encoding="utf-8")
        if ranking:
            (staging / RANKING).write_text(json.dumps(list(ranking)) + "\n", encoding="utf-8")


def load_head(
    directory: Path, target: TargetConfig, rope_theta: float | None = None
) -> tuple[EagleHead, tuple[int, ...]]:
    """A head to go on training from, and its token ranking.

    Args:
        rope_theta: another base for its rotary embedding than it was trained with.

    Raises:
        CheckpointError: there is no head, or not one for this target.
        ConfigError: it is not wired like EagleHead.
    """
    opened = open_draft_head(directory, target)
    config = opened.config
    sizes = HeadSizes(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=rope_theta or config.rope.theta,
    )
    head = EagleHead(sizes)
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    found = {name: tuple(info.shape) for name, info in opened.tensors.tensors.items()}
    if config.kind != "eagle" or config.feature != "post_norm" or found != expected or config.rope.kind != "default":
        odd = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        raise ConfigError(
            f"{directory} is no EAGLE-1 head of one plain Llama layer ({', '.join(odd) or config.kind}); train without "
            "it"
        )
    head.load_state_dict({name: opened.tensors.load(name).float() for name in expected})
    return head, opened.ranking
