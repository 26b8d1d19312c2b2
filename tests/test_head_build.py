"""Draft heads in engine directories: what is placed, that it is placed once, and that the graphs compute with it."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from checkpoint import heads
from checkpoint.heads import HIDDEN, VOCAB, make_e1
from head_targets import CASES, SMALL, Heads, expected_rows, load, save_head_target, token_ids

import trtspec
from trtspec import tensors
from trtspec.checkpoint.draft_head import DraftHeadConfig, weight_shapes
from trtspec.config import HEAD_CHUNK, HEAD_WIDTH
from trtspec.engine.base import TORCH_DTYPES
from trtspec.engine.onnxruntime_engine import OnnxRuntimeEngine
from trtspec.engine.tensorrt_build import RUNTIMES, BuildConfig, Profile
from trtspec.engine_build import plan_build
from trtspec.engine_dir import EngineDir
from trtspec.graph.draft_lm_head import draft_lm_head_spec

RTX = "tensorrt-rtx"
needs_rtx = pytest.mark.skipif(
    not any(importlib.util.find_spec(module) for module in RUNTIMES[RTX].modules),
    reason="TensorRT-RTX is not installed",
)


every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(tmp_path_factory.mktemp("heads"))


def draft_logits(engine_dir: EngineDir, hidden: torch.Tensor) -> torch.Tensor:
    """What the directory's draft LM head computes."""
    assert engine_dir.draft_head is not None
    config = DraftHeadConfig.from_json(engine_dir.draft_head.config)
    spec = draft_lm_head_spec(config, engine_dir.dtype, weight_as_input=False)
    engine = OnnxRuntimeEngine(engine_dir.path / engine_dir.runtimes["onnxruntime"].graphs["draft_lm_head"], spec)
    return engine.run({tensors.HIDDEN_ROWS: hidden.to(TORCH_DTYPES[engine_dir.dtype])})[tensors.LOGITS].float()


def weight_bytes(engine_dir: EngineDir) -> int:
    """Bytes below weights/."""
    return sum(record.size for name, record in engine_dir.files.items() if name.startswith("weights/"))


@every_case
def test_every_head(made: Heads, name: str) -> None:
    case, engine_dir = CASES[name], made.build(name)
    record = engine_dir.draft_head
    assert record is not None
    assert (record.name, record.origin) == (name, str(made.head(name)))
    assert (record.lm_head, record.config["draft_vocab_size"]) == (case.lm_head, case.draft_vocab)
    assert tuple(engine_dir.runtimes["onnxruntime"].graphs) == ("target", "lm_head", *case.graphs)
    ids = token_ids(engine_dir)
    assert (None if ids is None else tuple(ids)) == case.token_ids
    assert (record.embedding is not None) == case.own_embedding
    assert (record.lm_head_weight is not None) == (case.lm_head in ("own", "reduced"))
    for graph in engine_dir.runtimes["onnxruntime"].graphs.values():
        model = onnx.load(engine_dir.path / graph, load_external_data=False)
        assert model.graph.name == Path(graph).stem
    engine_dir.verify(whole=True)


@every_case
def test_record(made: Heads, name: str) -> None:
    plan, record = made.plan(name).head, made.build(name).draft_head
    assert plan is not None
    assert record is not None
    assert record.config["token_ids"] is None
    expected = dataclasses.replace(plan.head.config, token_ids=None, draft_vocab_size=plan.config.draft_vocab_size)
    assert DraftHeadConfig.from_json(record.config) == plan.config == expected
    assert list(record.decisions) == [each.name for each in plan.head.decisions]
    assert all({"value", "origin"} <= set(decision) for decision in record.decisions.values())
    assert {decision["origin"] for decision in record.decisions.values()} <= {"tensor", "config", "option", "default"}


@every_case
def test_own_embedding(made: Heads, name: str) -> None:
    engine_dir = made.build(name)
    if CASES[name].own_embedding:
        assert engine_dir.draft_head is not None
        assert torch.equal(load(engine_dir, engine_dir.draft_head.embedding), heads.embedding())


@every_case
def test_target_gives_the_features_that_the_head_takes(made: Heads, name: str) -> None:
    engine_dir = made.build(name)
    assert engine_dir.draft_head is not None
    model = onnx.load(engine_dir.path / "target.onnx", load_external_data=False)
    outputs = {value.name: value.type.tensor_type.shape.dim[-1].dim_value for value in model.graph.output}
    boundaries = engine_dir.draft_head.config["boundaries"]
    assert outputs.get(tensors.AUX_HIDDEN_STATES, 0) == len(boundaries) * HIDDEN
    assert bool(boundaries) == ("fuse" in CASES[name].graphs)


@every_case
def test_size_is_the_sum_of_the_parts(made: Heads, name: str) -> None:
    """Nothing of the target comes again: not the copies of its tables that heads' files hold, nor the LM head."""
    plan = made.plan(name)
    assert plan.head is not None
    grown = weight_bytes(made.build(name)) - weight_bytes(made.build(None))
    shapes = weight_shapes(plan.head.head.config)
    own = sum(math.prod(shape) * 4 for shape in shapes.values())
    # Of an LM head that isn't the file's own, rows are written; ids come with either.
    own += plan.head.lm_head_bytes if plan.head.lm_head == "reduced" else 0
    assert plan.head_bytes == own
    assert own <= grown <= 1.1 * own
    assert grown - own < VOCAB * HIDDEN * 4
    graphs = [record.size for file, record in made.build(name).files.items() if file.endswith(".onnx")]
    # Rotary tables and nodes, no weights.
    assert sum(graphs) < 150_000


@every_case
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_draft_logits(made: Heads, name: str, dtype: str) -> None:
    engine_dir = made.build(name, dtype=dtype)
    if "draft_lm_head" not in CASES[name].graphs:
        return
    rows = expected_rows(made, name, engine_dir)
    hidden = torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(1))
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert torch.allclose(draft_logits(engine_dir, hidden), hidden @ rows.T, atol=tolerance, rtol=tolerance)
    assert engine_dir.draft_head is not None
    weight = load(engine_dir, engine_dir.draft_head.lm_head_weight)
    assert torch.equal(weight, rows.to(TORCH_DTYPES[dtype]))


@pytest.mark.parametrize("name", ["e1", "e2_token_map", "e2_own_lm_head", "e2_unsorted_map", "e3", "e4"])
@pytest.mark.parametrize("draft_vocab", [None, 10])
def test_int4(made: Heads, name: str, draft_vocab: int | None) -> None:
    engine_dir = made.build(name, draft_vocab=draft_vocab, draft_lm_head="int4")
    record = engine_dir.draft_head
    assert record is not None
    assert (record.lm_head, record.lm_head_weight) == ("int4", None)
    ids = token_ids(engine_dir)
    if draft_vocab is None:
        assert (None if ids is None else tuple(ids)) == CASES[name].token_ids
    rows = expected_rows(made, name, engine_dir)
    assert record.config["draft_vocab_size"] == len(rows)
    hidden = torch.randn((8, HIDDEN), generator=torch.Generator().manual_seed(1))
    found, exact = draft_logits(engine_dir, hidden), hidden @ rows.T
    assert 0 < (found - exact).norm() <= 0.12 * exact.norm()
    files = [file for file in engine_dir.files if file.startswith("weights/draft_lm_head")]
    assert files == ([] if ids is None else ["weights/draft_lm_head.safetensors"])


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_tied_target(tmp_path: Path, tied: bool) -> None:
    save_head_target(tmp_path / "target", tied=tied)
    make_e1(tmp_path / "head")
    engine_dir = trtspec.build(tmp_path / "target", tmp_path / "out", tmp_path / "head", draft_vocab=9, **SMALL)
    assert engine_dir.draft_head is not None
    expected = (heads.embedding() if tied else heads.target_lm_head())[:9]
    assert torch.equal(load(engine_dir, engine_dir.draft_head.lm_head_weight), expected)


def test_files_that_hold_little_else_are_linked(made: Heads, tmp_path: Path) -> None:
    """A head's file has the name of the target's; one with a copy of the target's embedding is not linked."""
    make_e1(tmp_path / "lean", safetensors=True, changes={"embed_tokens.weight": None})
    lean = trtspec.build(made.target, tmp_path / "out", tmp_path / "lean", **SMALL)
    linked = lean.path / "weights" / "draft_head" / "model.safetensors"
    assert linked.samefile(tmp_path / "lean" / "model.safetensors")
    assert (lean.path / "weights" / "model.safetensors").samefile(made.target / "model.safetensors")
    plan = plan_build(made.target, eagle=tmp_path / "lean", **SMALL)
    assert plan.linked_bytes == plan.weight_bytes + plan.head_bytes
    assert plan.disk_bytes == 0
    assert "weights/draft_head/body.safetensors" in made.build("e1_safetensors").files
    assert "weights/draft_head/model.safetensors" not in made.build("e1_safetensors").files


@needs_rtx
@pytest.mark.parametrize("options", [{}, {"draft_vocab": 10}, {"draft_lm_head": "int4"}], ids=str)
@pytest.mark.parametrize("name", ["e1", "e3"])
def test_compiles_for_tensorrt_rtx(made: Heads, name: str, options: dict[str, Any]) -> None:
    engine_dir = made.build(name, runtimes=(RTX,), dtype="float16", **options)
    record, graphs = engine_dir.draft_head, engine_dir.runtimes[RTX].graphs
    assert record is not None
    separate = options or name == "e3"
    expected = ["target", "lm_head", "draft_head", *(["fuse"] if name == "e3" else [])]
    assert list(graphs) == [*expected, *(["draft_lm_head"] if separate else [])]
    assert all(engine_dir.files[file].size > 1000 for file in graphs.values())
    # Compiled engines hold the rest.
    refs = (engine_dir.embedding, engine_dir.lm_head, record.lm_head_weight, record.token_ids)
    kept = {ref.location for ref in refs if ref is not None}
    assert {file for file in engine_dir.files if file.startswith("weights/")} == kept
    if record.lm_head_weight is not None:
        rows = expected_rows(made, name, engine_dir)
        assert torch.equal(load(engine_dir, record.lm_head_weight), rows.half())


@needs_rtx
def test_both_runtimes_share_the_weights(made: Heads) -> None:
    engine_dir = made.build("e3", runtimes=("onnxruntime", RTX), dtype="float16", draft_vocab=10)
    alone = made.build("e3", dtype="float16", draft_vocab=10)
    assert weight_bytes(engine_dir) == weight_bytes(alone)
    assert list(engine_dir.runtimes[RTX].graphs) == list(engine_dir.runtimes["onnxruntime"].graphs)


def test_profiles_cover_what_drafting_asks_for(made: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtspec import runtime_build

    profiles: dict[str, tuple[Profile, ...]] = {}

    def record(runtime: str, path: Path, spec: Any, config: BuildConfig, output: Path, progress: Any) -> None:
        profiles[spec.name] = config.profiles
        output.write_bytes(b"engine")

    monkeypatch.setattr(runtime_build, "build_engine", record)
    made.build("e3", runtimes=(RTX,), dtype="float16", max_seq_len=50)
    batch, rows = SMALL["max_batch_size"], 50 + HEAD_CHUNK
    step, refresh = profiles["draft_head"]
    assert {axis: (low, high) for axis, (low, _, high) in step.sizes.items()} == {
        "batch": (1, batch),
        "width": (1, HEAD_WIDTH),
        "live_len": (1, rows),
    }
    assert (refresh.sizes["batch"][2], refresh.sizes["width"][2], refresh.sizes["live_len"][2]) == (1, HEAD_CHUNK, rows)
    assert profiles["fuse"][0].sizes["rows"][2] == max(HEAD_CHUNK, batch * HEAD_WIDTH)
    assert profiles["draft_lm_head"][0].sizes["rows"][2] == batch * HEAD_WIDTH
    assert profiles["lm_head"][0].sizes["rows"][2] == batch * 7
    made.build("e1", runtimes=(RTX,), dtype="float16", max_seq_len=50)
    assert profiles["lm_head"][0].sizes["rows"][2] == batch * HEAD_WIDTH
