"""The part `proposal`: built for TensorRT only, described in engine.json, and loaded by what is said there."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

import trtspec
from trtspec import engine_build, proposal_build, runtime_build
from trtspec.config import Limits, SpeculationConfig
from trtspec.engine import loading
from trtspec.engine.tensorrt_build import BuildConfig
from trtspec.engine_dir import EngineDir, record_files
from trtspec.errors import DependencyError, EngineDirError
from trtspec.graph.proposal import ProposalConfig, proposal_spec
from trtspec.plugins import tensorrt_ops
from trtspec.proposal_build import proposal_config, register_plugins
from trtspec.tensors import GraphSpec

LIMITS = Limits(64, max_batch_size=2, max_draft_tokens=12)
REGISTERED = "plugins registered"


class FakeCompiler:
    """Compiles graphs to files that name them, and notes what happened in which order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.nodes: dict[str, list[str]] = {}
        self.configs: dict[str, BuildConfig] = {}

    def register(self) -> None:
        self.events.append(REGISTERED)

    def build(
        self, runtime: str, graph: Path, spec: GraphSpec, config: BuildConfig, output: Path, progress: Any = None
    ) -> None:
        name = f"{runtime} {spec.name}"
        self.events.append(name)
        self.nodes[name] = [node.op_type for node in onnx.load(graph, load_external_data=False).graph.node]
        self.configs[name] = config
        output.write_text(name)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    made = FakeCompiler()
    monkeypatch.setattr(tensorrt_ops, "register", made.register)
    monkeypatch.setattr(proposal_build, "find_spec", lambda name: object())
    monkeypatch.setattr(engine_build, "check_request", lambda runtime, spec, config: None)
    monkeypatch.setattr(runtime_build, "build_engine", made.build)
    return made


def build(target: Path, output: Path, *runtimes: str, **options: Any) -> EngineDir:
    sizes = {"max_seq_len": 64, "max_batch_size": 2, "max_draft_tokens": 12, "dtype": "float32"}
    return trtspec.build(target, output, runtimes=runtimes, **{**sizes, **options})


def test_a_tensorrt_build_has_a_proposal_engine(compiler: FakeCompiler, tiny_hf_dir: Path, tmp_path: Path) -> None:
    directory = build(tiny_hf_dir, tmp_path / "e", "onnxruntime", "tensorrt-rtx", "tensorrt")
    assert compiler.nodes["tensorrt proposal"] == ["ngram_draft", "Min", "merge_drafts"]
    assert compiler.configs["tensorrt proposal"].profiles[0].sizes == {"batch": (1, 1, 2)}
    # The parser finds only what is registered, and no part that takes long comes before this one.
    own = [event for event in compiler.events if not event.startswith("tensorrt-rtx")]
    assert own[-4:] == [REGISTERED, "tensorrt proposal", "tensorrt target", "tensorrt lm_head"]
    assert set(own[:-4]) == {REGISTERED}
    record = directory.runtimes["tensorrt"]
    assert record.graphs["proposal"] == "tensorrt/proposal.engine"
    assert record.proposal == {
        "max_len": 64,
        "eagle_nodes": 12,
        "size": 12,
        "ngram_min": 2,
        "ngram_max": 5,
        "ngram_tokens": 12,
        "ngram_branches": 1,
        "latest": False,
    }
    for runtime in ("onnxruntime", "tensorrt-rtx"):
        assert directory.runtimes[runtime].proposal is None
        assert "proposal" not in directory.runtimes[runtime].graphs
    assert not list(directory.path.glob("*proposal.onnx"))


def test_it_is_built_for_the_options_that_nobody_changed() -> None:
    config, options = proposal_config("tensorrt", LIMITS), SpeculationConfig()
    assert config is not None
    assert (config.ngram_min, config.ngram_max) == (options.ngram_min, options.ngram_max)
    assert (config.ngram_branches, config.latest) == (options.ngram_branches, options.ngram_occurrence == "latest")
    assert ProposalConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("runtime", ["onnxruntime", "tensorrt-rtx"])
def test_other_runtimes_have_none(runtime: str) -> None:
    assert proposal_config(runtime, LIMITS) is None


def test_a_directory_without_room_for_drafts_has_none(
    compiler: FakeCompiler, tiny_hf_dir: Path, tmp_path: Path
) -> None:
    directory = build(tiny_hf_dir, tmp_path / "e", "tensorrt", max_draft_tokens=0)
    assert compiler.events == ["tensorrt target", "tensorrt lm_head"]
    assert directory.runtimes["tensorrt"].proposal is None


def test_inspect_lists_it(compiler: FakeCompiler, tiny_hf_dir: Path, tmp_path: Path) -> None:
    from trtspec.cli.inspect import describe_engine_dir

    described = describe_engine_dir(build(tiny_hf_dir, tmp_path / "e", "tensorrt"))
    assert described["runtimes"]["tensorrt"]["graphs"]["proposal"] == "tensorrt/proposal.engine"
    assert "tensorrt/proposal.engine" in described["file_bytes"]


def test_loading_takes_the_sizes_from_the_directory(
    compiler: FakeCompiler, tiny_hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build(tiny_hf_dir, tmp_path / "e", "onnxruntime", "tensorrt")
    loaded: list[tuple[str, Path, GraphSpec]] = []
    monkeypatch.setattr(loading, "TensorRTEngine", lambda *arguments: loaded.append(arguments) or "engine")
    config = proposal_config("tensorrt", directory.limits)
    assert config is not None
    assert loading.load_proposal(directory, "tensorrt") == ("engine", config)
    assert loaded == [("tensorrt", directory.path / "tensorrt/proposal.engine", proposal_spec(config))]
    assert loading.load_proposal(directory, "onnxruntime") is None


@pytest.mark.parametrize("change", [{"beams": 3}, {"ngram_min": 0}, {"latest": None}])
def test_a_proposal_described_in_unknown_terms(
    compiler: FakeCompiler, tiny_hf_dir: Path, tmp_path: Path, change: dict[str, int | None]
) -> None:
    directory = build(tiny_hf_dir, tmp_path / "e", "tensorrt")
    record = directory.runtimes["tensorrt"]
    assert record.proposal is not None
    proposal = {name: value for name, value in {**record.proposal, **change}.items() if value is not None}
    changed = dataclasses.replace(
        directory,
        runtimes={"tensorrt": dataclasses.replace(record, proposal=proposal)},
        files=record_files(directory.path),
    )
    with pytest.raises(EngineDirError, match="describes its proposal graph in terms that this trtspec doesn't know"):
        loading.load_proposal(changed, "tensorrt")


@pytest.mark.parametrize("wrong", [None, {"ngram_min": "2"}])
def test_a_manifest_without_the_proposals_configuration(
    compiler: FakeCompiler, tiny_hf_dir: Path, tmp_path: Path, wrong: Any
) -> None:
    directory = build(tiny_hf_dir, tmp_path / "e", "tensorrt")
    record = dataclasses.replace(directory.runtimes["tensorrt"], proposal=wrong)
    dataclasses.replace(directory, runtimes={"tensorrt": record}).write_manifest()
    with pytest.raises(EngineDirError, match="does not fit format 1"):
        EngineDir.load(directory.path)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposal_build, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"triton; install it with: pip install 'trtspec\[kernels\]'"):
        register_plugins()
    monkeypatch.setattr(proposal_build, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(DependencyError, match=r"tensorrt; install it with: pip install 'trtspec\[tensorrt\]'"):
        register_plugins()


def test_missing_packages_are_named_before_anything_is_written(
    compiler: FakeCompiler, tiny_hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposal_build, "find_spec", lambda name: None)
    with pytest.raises(DependencyError):
        build(tiny_hf_dir, tmp_path / "e", "tensorrt")
    assert not (tmp_path / "e").exists()
    assert compiler.events == []
