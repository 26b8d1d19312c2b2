"""What a build makes of a draft head and the options for it: its LM head, its tokens, its sizes, what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import heads
from checkpoint.heads import DRAFT_VOCAB, HIDDEN, TOKEN_MAP, VOCAB, make_e1, make_e2, make_e3
from head_targets import EOS, IDS, MAP, SMALL, Heads, expected_rows, load, save_head_target, token_ids

import trtspec
from trtspec import head_plan
from trtspec.config import HEAD_CHUNK
from trtspec.engine.tensorrt_build import RUNTIMES
from trtspec.engine_build import plan_build
from trtspec.errors import CheckpointError, ConfigError

RTX = "tensorrt-rtx"
needs_rtx = pytest.mark.skipif(
    not any(importlib.util.find_spec(module) for module in RUNTIMES[RTX].modules),
    reason="TensorRT-RTX is not installed",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(tmp_path_factory.mktemp("heads"))


@pytest.mark.parametrize(
    ("name", "draft_vocab", "lm_head", "expected"),
    [
        ("e1", 10, "reduced", range(10)),
        ("e1", 1, "reduced", [0, EOS]),
        ("e1", VOCAB, "target", None),
        ("e1", "64", "target", None),
        # The target's rows serve more tokens than the head's own map, whose ids come first.
        ("e2_token_map", 20, "reduced", sorted([*MAP, *[token for token in range(VOCAB) if token not in MAP][:4]])),
        ("e2_token_map", VOCAB, "target", None),
        ("e2_own_lm_head", 10, "reduced", range(10)),
        ("e2_own_lm_head", 100, "own", None),
        ("e2_unsorted_map", 5, "reduced", sorted({*MAP[:5], *({EOS} & set(MAP))})),
        ("e2_unsorted_map", TOKEN_MAP, "own", MAP[::-1]),
        ("e3", 10, "reduced", sorted({*IDS[:10], *({EOS} & set(IDS))})),
        ("e3", DRAFT_VOCAB, "own", IDS),
        ("e3", VOCAB, "own", IDS),
        ("e3_whole_vocabulary", 10, "reduced", range(10)),
        ("e4", 10, "reduced", sorted({*IDS[:10], *({EOS} & set(IDS))})),
    ],
)
def test_draft_vocabulary(made: Heads, name: str, draft_vocab: int | str, lm_head: str, expected: Any) -> None:
    engine_dir = made.build(name, draft_vocab=draft_vocab, draft_lm_head="target")
    assert engine_dir.draft_head is not None
    assert engine_dir.draft_head.lm_head == lm_head
    assert token_ids(engine_dir) == (None if expected is None else list(expected))
    if lm_head != "target":
        rows = expected_rows(made, name, engine_dir)
        assert torch.equal(load(engine_dir, engine_dir.draft_head.lm_head_weight), rows)


def test_draft_vocabulary_from_files(made: Heads, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([IDS[7], IDS[3]]), encoding="utf-8")
    assert token_ids(made.build("e3", draft_vocab=tmp_path / "ids.json")) == [IDS[3], IDS[7]]
    (tmp_path / "corpus.txt").write_text("w33 w33 w7", encoding="utf-8")
    assert token_ids(made.build("e1", draft_vocab=f"2:{tmp_path / 'corpus.txt'}")) == [EOS, 7, 33]
    (tmp_path / "ids.json").write_text(json.dumps([0]), encoding="utf-8")
    assert 0 not in IDS
    with pytest.raises(ConfigError, match="entry 1 is 0, of which the draft head's own LM head has no row"):
        made.plan("e3", draft_vocab=tmp_path / "ids.json")


def test_token_map_in_another_order_is_sorted_where_the_targets_rows_serve(made: Heads, tmp_path: Path) -> None:
    make_e2(tmp_path / "head", mapped=True, changes={"token_map": torch.tensor(heads.token_map()[::-1])})
    plan = plan_build(made.target, eagle=tmp_path / "head", **SMALL).head
    assert plan is not None
    assert (plan.lm_head, plan.token_ids, plan.rows) == ("reduced", MAP, MAP)


def test_memory_and_disk(made: Heads) -> None:
    plan = made.plan("e3")
    assert plan.head is not None
    assert plan.limits.head_cache_rows == 64 + HEAD_CHUNK
    assert plan.head_kv_bytes_per_sequence == 2 * heads.KV_HEADS * heads.HEAD_DIM * 4 * (64 + HEAD_CHUNK)
    assert plan.head.lm_head_bytes == DRAFT_VOCAB * HIDDEN * 4
    assert plan.disk_bytes == plan.head_bytes
    int4 = made.plan("e3", draft_lm_head="int4").head
    assert int4 is not None
    assert int4.lm_head_bytes == DRAFT_VOCAB * HIDDEN // 2 + DRAFT_VOCAB * HIDDEN // 32 * 4
    without = plan_build(made.target, **SMALL)
    assert (without.head_bytes, without.head_kv_bytes_per_sequence, without.boundaries) == (0, 0, ())


def test_warnings_of_the_head_are_the_plans(made: Heads, tmp_path: Path) -> None:
    make_e1(tmp_path / "head", poison=True)
    plan = plan_build(made.target, eagle=tmp_path / "head", **SMALL)
    assert any("input_layernorm" in warning for warning in plan.warnings)


def test_packaged_head_of_the_demo_target(made: Heads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built in unless another is named or none is wanted, and only for the demo target."""
    target = heads.target_config()
    plan = plan_build(made.target, **SMALL)
    demo = dataclasses.replace(plan.checkpoint, origin="demo")
    monkeypatch.setattr(head_plan, "packaged_head", lambda: made.head("e1"))

    def planned(checkpoint: Any, **request: Any) -> Any:
        return head_plan.plan_head(head_plan.HeadRequest(**request), checkpoint, target, "float32")

    found = planned(demo)
    assert (found.name, found.origin, found.config.kind) == ("demo", "demo", "eagle")
    assert planned(demo, use_eagle=False) is None
    assert planned(demo, eagle=made.head("e3")).name == "e3"
    assert planned(plan.checkpoint) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eagle_options": {"rope_theta": "1"}}, "--eagle-option is for a draft head"),
        ({"draft_vocab": 8}, "--draft-vocab is for a draft head"),
        ({"draft_lm_head": "target"}, "--draft-lm-head is for a draft head"),
        ({"eagle": "x", "use_eagle": False}, "--eagle and --no-eagle exclude each other"),
        ({"eagle": ""}, "--eagle is empty"),
        ({"draft_lm_head": "int8"}, "--draft-lm-head 'int8': choose from target, int4"),
        ({"draft_vocab": 0}, "--draft-vocab 0"),
    ],
)
def test_options_that_do_not_fit(made: Heads, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_build(made.target, **SMALL, **options)


@pytest.mark.parametrize("options", [{}, {"draft_vocab": 10}, {"draft_lm_head": "int4"}], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("weight", ["fc.weight", "lm_head.weight"])
def test_damaged_heads_leave_nothing(
    made: Heads, tmp_path: Path, weight: str, value: float, options: dict[str, Any]
) -> None:
    tensor = heads.e3_tensors()[weight]
    tensor[1, 2] = value
    make_e3(tmp_path / "head", changes={weight: tensor})
    with pytest.raises(CheckpointError, match=r"draft head head: .* holds NaN or infinity"):
        trtspec.build(made.target, tmp_path / "out", tmp_path / "head", **options, **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]


@pytest.mark.parametrize(
    ("weight", "options", "words"),
    [
        ("fc.weight", {}, "draft head head: tensor fc.weight overflows float16; choose --dtype"),
        ("lm_head.weight", {"draft_vocab": 10}, "lm_head.weight of the draft head head overflows float16"),
        ("lm_head.weight", {"draft_lm_head": "int4"}, "lm_head.weight of the draft head head overflows float16"),
    ],
)
def test_head_that_overflows_float16(
    made: Heads, tmp_path: Path, weight: str, options: dict[str, Any], words: str
) -> None:
    make_e3(tmp_path / "head", changes={weight: 1e6 * heads.e3_tensors()[weight]})
    with pytest.raises(CheckpointError, match=re.escape(words)):
        trtspec.build(made.target, tmp_path / "out", tmp_path / "head", dtype="float16", **options, **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]


def test_output_never_replaces_the_head(made: Heads, tmp_path: Path) -> None:
    make_e1(tmp_path / "head")
    with pytest.raises(trtspec.UserError, match="is or holds the draft head"):
        trtspec.build(made.target, tmp_path / "head", tmp_path / "head", force=True, **SMALL)
    assert (tmp_path / "head" / "config.json").exists()


def test_int4_of_a_head_whose_width_does_not_fit(tmp_path: Path) -> None:
    save_head_target(tmp_path / "target", hidden=48)
    make_e3(tmp_path / "head", target_hidden=48, with_embedding=True)
    plan = plan_build(tmp_path / "target", eagle=tmp_path / "head", draft_lm_head="int4", **SMALL)
    assert plan.head is not None
    assert plan.head.config.hidden_size == HIDDEN
    # The width that counts is the head's own.
    trtspec.build(tmp_path / "target", tmp_path / "out", tmp_path / "head", draft_lm_head="int4", **SMALL)
