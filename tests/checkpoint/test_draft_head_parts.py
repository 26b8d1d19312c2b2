"""Pieces of reading a draft head: numbers of config.json, tables compared, fused rows, descriptions."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from heads import HIDDEN, make_e1, make_e2, make_e3, make_e4, target_config

from trtspec.checkpoint.convert import place_weights
from trtspec.checkpoint.draft_head import DraftHead, DraftHeadConfig, describe, open_draft_head, weight_shapes
from trtspec.checkpoint.draft_head.names import Part, RenamedSource
from trtspec.checkpoint.draft_head.tables import differing_rows
from trtspec.checkpoint.shards import open_tensors
from trtspec.errors import CheckpointError, ConfigError

TARGET = target_config()
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def origin(head: DraftHead, name: str) -> str:
    """Where a decision came from."""
    return next(decision.origin for decision in head.decisions if decision.name == name)


@pytest.mark.parametrize(
    ("config", "theta", "kind"),
    [
        ({"rope_theta": 500000.0}, 500000.0, "default"),
        ({"rope_theta": None}, 10000.0, "default"),
        ({"rope_theta": 500000.0, "rope_scaling": LLAMA3}, 500000.0, "llama3"),
        ({"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 2e5}}, 2e5, "llama3"),
        ({"rope_theta": 500000.0, "rope_parameters": LLAMA3}, 500000.0, "llama3"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 3e5}, "rope_scaling": LLAMA3}, 3e5, "llama3"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_rope_spellings(tmp_path: Path, config: dict[str, Any], theta: float, kind: str, nested: bool) -> None:
    if nested:
        make_e4(tmp_path, layer_config=config)
    else:
        make_e3(tmp_path, config=config)
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.rope.theta, head.config.rope.kind) == (theta, kind)
    assert origin(head, "rope_theta") == ("default" if theta == 10000.0 else "config")
    assert head.config.rope.factor == (8.0 if kind == "llama3" else 1.0)
    chosen = open_draft_head(tmp_path, TARGET, {"rope_theta": "1e6", "rope_scaling": "none"})
    assert (chosen.config.rope.theta, chosen.config.rope.kind, chosen.config.rope.factor) == (1e6, "default", 1.0)
    assert origin(chosen, "rope_theta") == origin(chosen, "rope_scaling") == "option"
    plain = open_draft_head(tmp_path, TARGET, {"rope_scaling": "none"})
    assert (plain.config.rope.theta, plain.config.rope.kind) == (theta, "default")


def test_official_eagle_drops_theta_where_there_is_scaling(tmp_path: Path) -> None:
    config = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    make_e1(tmp_path, config=config)
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.rope.kind, head.config.rope.theta) == ("linear", 10000.0)
    assert "drops rope_theta (500000)" in head.warnings[0]
    chosen = open_draft_head(tmp_path, TARGET, {"rope_theta": "500000"})
    assert (chosen.config.rope.theta, chosen.warnings) == (500000.0, ())


def test_yarn_that_exporters_add_is_noted(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
    make_e3(tmp_path, names="layers.0", config={"rope_scaling": scaling})
    note = describe(open_draft_head(tmp_path, TARGET))["decisions"]["rope_scaling"]["note"]
    assert "compare with rope_scaling=none" in note


def test_numbers_come_from_the_heads_own_config(tmp_path: Path) -> None:
    make_e1(tmp_path, config={"rms_norm_eps": 1e-5, "max_position_embeddings": 96})
    head = open_draft_head(tmp_path, target_config(rms_norm_eps=1e-3, num_kv_heads=2, intermediate_size=99))
    assert (head.config.rms_norm_eps, head.config.max_position_embeddings) == (1e-5, 96)
    assert (head.config.num_kv_heads, head.config.intermediate_size) == (1, 48)
    assert len(head.warnings) == 1
    assert "made for 96 positions, the target for 128" in head.warnings[0]
    chosen = open_draft_head(tmp_path, TARGET, {"rms_norm_eps": "1e-4", "max_positions": "64"})
    assert (chosen.config.rms_norm_eps, chosen.config.max_position_embeddings) == (1e-4, 64)
    assert (chosen.warnings, origin(chosen, "rms_norm_eps")) == ((), "option")


def test_numbers_that_are_missing(tmp_path: Path) -> None:
    make_e1(tmp_path, without=["rms_norm_eps", "max_position_embeddings", "num_key_value_heads", "hidden_act"])
    head = open_draft_head(tmp_path, target_config(max_position_embeddings=4096))
    assert (head.config.rms_norm_eps, head.config.max_position_embeddings) == (1e-6, 2048)
    assert head.config.num_kv_heads == 1
    assert sorted(text.split(";")[0].split(",")[0] for text in head.warnings) == [
        "config.json has no rms_norm_eps",
        "the head is made for 2048 positions",
    ]


def test_sizes_that_config_has_wrong(tmp_path: Path) -> None:
    make_e1(tmp_path, config={"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16})
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.hidden_size, head.config.intermediate_size, head.config.num_kv_heads) == (32, 48, 1)
    assert len(head.warnings) == 3
    assert all("the tensors are followed" in text for text in head.warnings)


def test_tables_that_differ() -> None:
    table = torch.randn(5000, 8)
    assert differing_rows(table, table) is None
    assert differing_rows(table.half(), table.bfloat16()) is None
    assert differing_rows(torch.zeros(3, 4), torch.zeros(3, 4)) is None
    other = table.clone()
    other[4998] *= -1
    assert differing_rows(other, table) == "1 of 5000 rows differ, by up to 2 of a row's length"
    other[0, 0] = math.nan
    assert str(differing_rows(other, table)).startswith("2 of 5000 rows differ")
    assert differing_rows(table[:3], table) == "shape [3, 8], the target's is [5000, 8]"


def test_embedding_in_another_precision_is_the_same(tmp_path: Path) -> None:
    make_e1(tmp_path, dtype=torch.float16)
    assert open_draft_head(tmp_path, TARGET, {}, lambda: heads.embedding().bfloat16()).warnings == ()
    other = lambda: torch.randn(64, HIDDEN)  # noqa: E731
    assert "64 of 64 rows differ" in open_draft_head(tmp_path, TARGET, {}, other).warnings[0]
    assert not open_draft_head(tmp_path, TARGET, {}, other).config.own_embedding


def fused(directory: Path, **changes: Any) -> None:
    tensors = heads.fuse(heads.e3_tensors(bias=True))
    config = {**heads.CONFIG, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 40, **changes}
    heads.save_head(directory, tensors, config)


def test_fused_rows_are_taken_from_the_file(tmp_path: Path) -> None:
    fused(tmp_path)
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.source_format, head.config.qkv_bias) == ("eagle3-vllm", True)
    expected = heads.e3_tensors(bias=True)
    for suffix in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        name = f"layers.0.{suffix}.weight"
        assert torch.equal(head.tensors.load(name), expected[name])
        at = head.tensors.tensors[name].file_range
        assert at is not None
        with at.path.open("rb") as file:
            file.seek(at.offset)
            assert file.read(at.nbytes) == expected[name].numpy().tobytes()
    assert torch.equal(head.tensors.load("layers.0.self_attn.v_proj.bias"), expected["layers.0.self_attn.v_proj.bias"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, r"qkv_proj\.\w+ has 64 rows, expected 63: 5 \+ 2 x 1 heads of 9"),
        ({"num_attention_heads": None}, "can't be split: config.json has no usable num_attention_heads"),
    ],
)
def test_fused_rows_that_do_not_divide(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fused(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_draft_head(tmp_path, TARGET)


def test_fused_rows_that_are_odd(tmp_path: Path) -> None:
    tensors = {**heads.fuse(heads.e3_tensors()), "layers.0.mlp.gate_up_proj.weight": torch.zeros(95, 32)}
    heads.save_head(tmp_path, tensors, {**heads.CONFIG, "draft_vocab_size": 40})
    with pytest.raises(CheckpointError, match="has 95 rows, which can't be gate and up projections"):
        open_draft_head(tmp_path, TARGET)


def test_fused_beside_separate(tmp_path: Path) -> None:
    tensors = {**heads.e3_tensors(), **heads.fuse(heads.e3_tensors())}
    heads.save_head(tmp_path, tensors, {**heads.CONFIG, "draft_vocab_size": 40})
    with pytest.raises(CheckpointError, match=r"twice, once inside .*remove one"):
        open_draft_head(tmp_path, TARGET)


def test_weights_can_be_placed_in_an_engine_directory(tmp_path: Path) -> None:
    make_e2(tmp_path / "head", mapped=True, changes={"fc.weight": heads.weight("fc.weight", 32, 64).half()})
    head = open_draft_head(tmp_path / "head", TARGET)
    refs = place_weights(
        head.tensors, weight_shapes(head.config), tmp_path / "engine", "weights", "head.safetensors", "float16"
    )
    placed = open_tensors(tmp_path / "engine" / "weights")
    assert list(refs) == list(head.tensors.tensors)
    assert all(torch.equal(placed.load(name), head.tensors.load(name).half()) for name in refs)


def test_parts_of_a_source(tmp_path: Path) -> None:
    make_e1(tmp_path)
    source = open_tensors(tmp_path)
    view = RenamedSource(source, {"a": Part("fc.weight"), "b": Part("fc.weight", ids=(3, 1))})
    assert torch.equal(view.load("b"), source.load("fc.weight")[[3, 1]])
    assert view.tensors["b"].shape == (2, 64)
    with pytest.raises(CheckpointError, match="the draft head has no tensor c"):
        view.load("c")


@pytest.mark.parametrize("make", [make_e1, make_e2, make_e3, make_e4])
def test_description(tmp_path: Path, make: Any) -> None:
    make(tmp_path, config={"num_hidden_layers": 40} if make is not make_e4 else {})
    head = open_draft_head(tmp_path, TARGET)
    description = json.loads(json.dumps(describe(head)))
    assert description["kind"] == "draft head"
    assert description["config"]["kind"] == head.config.kind
    assert description["problems"] == list(head.warnings)
    assert len(description["problems"]) == (make is not make_e4)
    assert description["dtypes"] == {"float32": description["tensors"]}
    assert len(description["decisions"]) == len(head.decisions)
    fields = {field.name for field in dataclasses.fields(DraftHeadConfig)}
    derived = {"rope", "target_hidden_size", "vocab_size", "draft_vocab_size", "double_hidden_norm"}
    decided = set(description["decisions"]) | {"embedding_norm", "hidden_norm", "input_norm", "has_fc", "boundaries"}
    assert fields - derived - decided <= {"feature_norm"}
    assert {d["origin"] for d in description["decisions"].values()} <= {"tensor", "config", "option", "default"}


def test_config_round_trip_and_checks(tmp_path: Path) -> None:
    make_e4(tmp_path, layer_config={"rope_scaling": LLAMA3})
    config = open_draft_head(tmp_path, TARGET).config
    assert DraftHeadConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    for changes in (
        {"kind": "eagle4"},
        {"feature": "post_norm"},
        {"boundaries": ()},
        {"token_ids": (1, 2)},
        {"output_norm": False, "feedback": "post_norm"},
        {"residual": "none"},
    ):
        with pytest.raises(ConfigError):
            dataclasses.replace(config, **changes)
