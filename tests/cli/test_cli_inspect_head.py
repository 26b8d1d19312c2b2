"""`trtspec inspect` on EAGLE draft heads: how they are wired, and who says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from invocation import Invoke, assert_done, assert_refused

HIDDEN, INNER, HEADS, KV_HEADS = 64, 128, 4, 2


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """An official EAGLE-1 head for the tiny target, with a stray layer-0 norm that must not be used."""
    directory = tmp_path / "head"
    directory.mkdir()
    key_value = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "fc.bias": (HIDDEN,),
        "layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "layers.0.self_attn.k_proj.weight": (key_value, HIDDEN),
        "layers.0.self_attn.v_proj.weight": (key_value, HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "layers.0.input_layernorm.weight": (HIDDEN,),
    }
    torch.save({name: torch.full(shape, 0.5) for name, shape in shapes.items()}, directory / "pytorch_model.bin")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "vocab_size": 49152,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_decisions_and_their_origins(trtspec: Invoke, head: Path, tiny_hf_dir: Path) -> None:
    result = trtspec("inspect", head, "--target", tiny_hf_dir, "--json")
    assert result.code == 0, result
    (found,) = result.lines
    assert (found["kind"], found["target"], found["config"]["kind"]) == ("draft head", "tiny-llama", "eagle")
    decisions = found["decisions"]
    assert (decisions["fc_bias"]["value"], decisions["fc_bias"]["origin"]) == (True, "tensor")
    assert decisions["input_norm"]["value"] is False
    assert decisions["rms_norm_eps"]["origin"] == "config"
    assert any("input_layernorm" in problem for problem in found["problems"])


def test_an_option_decides(trtspec: Invoke, head: Path, tiny_hf_dir: Path) -> None:
    options = ("--eagle-option", "rope_theta=12345", "--eagle-option", "input_norm=true")
    result = trtspec("inspect", head, "--target", tiny_hf_dir, *options, "--json")
    (found,) = result.lines
    assert (found["decisions"]["rope_theta"]["value"], found["decisions"]["rope_theta"]["origin"]) == (
        12345.0,
        "option",
    )
    assert found["config"]["input_norm"] is True


def test_text(trtspec: Invoke, head: Path, tiny_hf_dir: Path) -> None:
    result = trtspec("inspect", head, "--target", tiny_hf_dir)
    assert result.code == 0
    assert "kind: draft head" in result.out


def test_a_head_without_its_target(trtspec: Invoke, head: Path) -> None:
    assert_refused(trtspec("inspect", head), "is an EAGLE draft head", "--target TARGET")


def test_a_target_is_no_head(trtspec: Invoke, tiny_hf_dir: Path) -> None:
    assert_refused(trtspec("inspect", tiny_hf_dir, "--target", tiny_hf_dir), "head")
    assert_done(trtspec("inspect", tiny_hf_dir, "--json"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--eagle-option", "rope_theta"), "expected KEY=VALUE"),
        (("--eagle-option", "=1"), "expected KEY=VALUE"),
        (("--eagle-option", "nonsense=1"), "nonsense"),
        (("--eagle-option", "rope_theta=fast"), "rope_theta"),
        (("--eagle-option", "rope_theta=1", "--eagle-option", "rope_theta=2"), "given twice"),
    ],
)
def test_options_refused(trtspec: Invoke, head: Path, tiny_hf_dir: Path, options: tuple[str, ...], words: str) -> None:
    assert_refused(trtspec("inspect", head, "--target", tiny_hf_dir, *options), words)


def test_options_need_a_target(trtspec: Invoke, head: Path) -> None:
    assert_refused(trtspec("inspect", head, "--eagle-option", "rope_theta=1"), "--target")
