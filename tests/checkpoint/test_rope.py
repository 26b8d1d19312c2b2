"""Rotary tables against transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from trtspec.checkpoint.rope import RopeConfig
from trtspec.errors import CheckpointError

HEAD_DIM, POSITIONS = 64, 600
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn attention_factor": {"rope_type": "yarn", **YARN, "attention_factor": 0.7},
    "yarn mscale": {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn mscale alone": {"rope_type": "yarn", **YARN, "mscale": 0.5},
    "yarn betas": {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn truncate": {"rope_type": "yarn", **YARN, "truncate": False},
    "yarn without original": {"rope_type": "yarn", "factor": 4.0},
}


def base_config(**fields: Any) -> dict[str, Any]:
    return {
        "hidden_size": 2 * HEAD_DIM,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        **fields,
    }


def expected(config: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """transformers' tables, `[positions, head_dim / 2]`."""
    rotary = LlamaRotaryEmbedding(LlamaConfig(**config))
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(POSITIONS)[None])
    return cos[0, :, : HEAD_DIM // 2].numpy(), sin[0, :, : HEAD_DIM // 2].numpy()


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name: str, spelling: str) -> None:
    theta = 50000.0
    if spelling == "rope_parameters":
        config = base_config(rope_parameters={**SCALINGS[name], "rope_theta": theta})
    else:
        config = base_config(rope_scaling=SCALINGS[name], rope_theta=theta)
    want_cos, want_sin = expected(base_config(rope_parameters={**SCALINGS[name], "rope_theta": theta}))
    cos, sin = RopeConfig.from_hf(config).cos_sin(HEAD_DIM, POSITIONS)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos, want_cos, atol=1e-4, rtol=0)
    np.testing.assert_allclose(sin, want_sin, atol=1e-4, rtol=0)


def test_every_scaling_changes_the_tables() -> None:
    tables = [RopeConfig.from_hf(base_config(rope_scaling=s)).cos_sin(HEAD_DIM, 200)[0] for s in SCALINGS.values()]
    first = list(SCALINGS).index("default")
    assert all(np.abs(table - tables[first]).max() > 1e-2 for n, table in enumerate(tables) if n != first)


def test_old_key_type_names_the_kind() -> None:
    new = RopeConfig.from_hf(base_config(rope_scaling={"rope_type": "linear", "factor": 2.0}))
    assert RopeConfig.from_hf(base_config(rope_scaling={"type": "linear", "factor": 2.0})) == new
    assert new.kind == "linear"


def test_yarn_factor_follows_from_the_lengths() -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128}
    rope = RopeConfig.from_hf(base_config(rope_scaling=scaling))
    assert rope.factor == 4.0
    want_cos, _ = expected(base_config(rope_parameters={**scaling, "rope_theta": 10000.0}))
    np.testing.assert_allclose(rope.cos_sin(HEAD_DIM, POSITIONS)[0], want_cos, atol=1e-4, rtol=0)


def test_theta_defaults_to_transformers_default() -> None:
    want_cos, _ = expected(base_config())
    np.testing.assert_allclose(RopeConfig.from_hf(base_config()).cos_sin(HEAD_DIM, POSITIONS)[0], want_cos, atol=1e-4)


def test_frequency_factors_divide() -> None:
    """llama.cpp stores llama3 scaling as the quotient of unscaled and scaled frequencies."""
    llama3 = RopeConfig.from_hf(base_config(rope_scaling=SCALINGS["llama3"]))
    plain = RopeConfig.from_hf(base_config())
    factors = plain.inverse_frequencies(HEAD_DIM) / llama3.inverse_frequencies(HEAD_DIM)
    stored = RopeConfig.from_hf(
        base_config(rope_scaling={"rope_type": "default", "frequency_factors": factors.tolist()})
    )
    np.testing.assert_allclose(stored.inverse_frequencies(HEAD_DIM), llama3.inverse_frequencies(HEAD_DIM), rtol=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_json_round_trip(name: str) -> None:
    rope = RopeConfig.from_hf(base_config(rope_scaling=SCALINGS[name]))
    assert RopeConfig.from_json(rope.to_json()) == rope


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}, "'mrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "without a factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "without a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1.0}}, "partial_rotary_factor 0.25"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer"),
    ],
)
def test_unsupported(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        RopeConfig.from_hf(base_config(**fields))
