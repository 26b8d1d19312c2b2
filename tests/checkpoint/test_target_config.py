"""Configurations of each architecture, against transformers' models, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from trtspec.checkpoint.target import ARCHITECTURES, TargetConfig
from trtspec.errors import CheckpointError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "max_position_embeddings": 64,
}


def hf_config(architecture: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": architecture, **SIZES, **fields}


def model_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of transformers' model of this configuration, without its tied LM head."""
    kind = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(kind)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        del shapes["lm_head.weight"]
    return shapes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_dim": 16},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"num_key_value_heads": None},
    ],
    ids=lambda fields: ",".join(fields) or "plain",
)
def test_weight_shapes_equal_transformers(architecture: str, fields: dict[str, Any]) -> None:
    if architecture == "qwen2" and "head_dim" in fields:
        pytest.skip("transformers' Qwen2 has no head_dim of its own")
    if architecture == "mistral" and "num_key_value_heads" in fields:
        pytest.skip("transformers' Mistral needs num_key_value_heads")
    config = hf_config(architecture, **fields)
    assert TargetConfig.from_hf(config).weight_shapes() == model_shapes(config)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values(architecture: str) -> None:
    config = TargetConfig.from_hf(
        hf_config(architecture, rms_norm_eps=1e-5, head_dim=8, rope_theta=5e5, tie_word_embeddings=True)
    )
    assert (config.architecture, config.hidden_size, config.intermediate_size) == (architecture, 32, 48)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (20, 64, 1e-5)
    assert config.tied and config.rope.theta == 5e5
    assert config.qkv_bias == (architecture == "qwen2")
    assert config.qk_norm == (architecture == "qwen3")
    assert config.kv_bytes_per_token(2) == 2 * 2 * 2 * 8 * 2


def test_json_round_trip() -> None:
    config = TargetConfig.from_hf(
        hf_config("llama", eos_token_id=[1, 2], rope_scaling={"rope_type": "linear", "factor": 2.0})
    )
    assert TargetConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (2, {}, (2,)),
        ([2, 3], {}, (2, 3)),
        (2, {"eos_token_id": [4, 5]}, (4, 5)),
        (2, {"eos_token_id": None}, (2,)),
        (None, {}, ()),
        (0, {}, (0,)),
    ],
)
def test_end_of_sequence(config_eos: Any, generation: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert TargetConfig.from_hf(hf_config("llama", eos_token_id=config_eos), generation).eos_token_ids == expected


QWEN_SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("mistral", {"sliding_window": 16}, 16),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": 16, "layer_types": ["full_attention"] * 2}, 16),
        ("llama", {"sliding_window": 16}, None),
        ("llama", QWEN_SLIDING, None),
        ("qwen2", {"sliding_window": 16}, None),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, None),
        ("qwen2", QWEN_SLIDING, 16),
        ("qwen2", {**QWEN_SLIDING, "max_window_layers": 2}, None),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True}, None),
        ("qwen3", {**QWEN_SLIDING, "layer_types": ["full_attention"] * 2}, None),
        ("qwen3", {**QWEN_SLIDING, "layer_types": ["full_attention", "sliding_attention"]}, 16),
    ],
)
def test_sliding_window(architecture: str, fields: dict[str, Any], expected: int | None) -> None:
    config = hf_config(architecture, **fields)
    assert TargetConfig.from_hf(config).sliding_window == expected
    theirs = transformers.AutoConfig.for_model(**config)
    windows = getattr(theirs, "sliding_window", None)
    if architecture in ("qwen2", "qwen3") and "sliding_attention" not in theirs.layer_types:
        windows = None
    if architecture != "llama":
        assert windows == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "'gemma2' .Gemma2ForCausalLM."),
        ({"model_type": None}, "model_type None"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"num_experts": 8}, "mixture-of-experts"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp 2"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"hidden_size": "wide"}, "wrong kind"),
        ({"rope_scaling": {"rope_type": "default", "frequency_factors": [1.0]}}, "1 rotary frequency factors"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        TargetConfig.from_hf(hf_config("llama", **fields))


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"])
def test_missing_field_is_named(field: str) -> None:
    config = hf_config("llama")
    del config[field]
    with pytest.raises(CheckpointError, match=field):
        TargetConfig.from_hf(config)
