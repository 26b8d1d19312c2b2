"""The draft head's graphs against a plain PyTorch head: refreshing, chains, trees and batches, for every format."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from checkpoint import heads
from checkpoint.heads import HIDDEN, VOCAB, make_e1, make_e3
from graph.head_graphs import (
    CACHE_ROWS,
    CASES,
    SAME_GRAPH,
    Case,
    HeadGraphs,
    Level,
    Session,
    chain,
    features,
    grow,
    refresh,
    vllm_eagle3,
)
from graph.head_oracle import Outputs, Switches

from trtspec.engine.tensorrt_build import RUNTIMES, BuildConfig, Profile, build_engine

RTX = "tensorrt-rtx"
TOLERANCE = 1e-5
PROMPT = [17, 3, 60, 44, 9, 9, 51]
ACCEPTED = [33, 8, 62]
DRAFTED = [21, 40, 5]
# Token and parent one level up: the first two nodes have children, the third has none.
TREE: list[Level] = [[(21, 0), (7, 0), (58, 0)], [(40, 0), (21, 1), (13, 0)], [(5, 2), (5, 1)]]
PATHS: list[list[int]] = [[0, 0], [1, 1, 1], [2], [0, 2, 0]]

every_case = pytest.mark.parametrize("graphs", CASES, indirect=True)
needs_rtx = pytest.mark.skipif(
    not any(importlib.util.find_spec(module) for module in RUNTIMES[RTX].modules),
    reason="TensorRT-RTX is not installed",
)
pytestmark = pytest.mark.usefixtures("one_torch_thread")
Open = Callable[[str], HeadGraphs]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Heads by name of their case, each made once."""
    made: dict[str, HeadGraphs] = {}

    def head(name: str) -> HeadGraphs:
        if name not in made:
            made[name] = HeadGraphs(CASES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return head


@pytest.fixture(scope="module")
def graphs(request: pytest.FixtureRequest, opened: Open) -> HeadGraphs:
    """The head of the case that a test is parametrised with."""
    return opened(request.param)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert expected.std() > 0.1
    assert distance(found, expected) <= tolerance


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in standard deviations."""
    return float((found.double() - expected.double()).abs().max() / expected.double().std())


def assert_same(found: Sequence[Outputs], expected: Sequence[Outputs], tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in ours._asdict().items():
            assert_close(value, getattr(theirs, name), tolerance)


def draft(session: Session, graphs: HeadGraphs) -> list[Outputs]:
    """The prompt, and three tokens drafted behind it; the first two results are the drafting steps 1 and 2."""
    prompt = refresh(session, PROMPT, features(graphs, len(PROMPT), seed=1))
    return [Outputs(*(value[-1:] for value in prompt)), *chain(session, prompt.feedback[-1], DRAFTED)]


def play(session: Session, graphs: HeadGraphs) -> list[Outputs]:
    """The prompt, a chain that is thrown away, the accepted tokens in its place, and a tree behind them."""
    results = [refresh(session, PROMPT, features(graphs, len(PROMPT), seed=1))]
    results += chain(session, results[-1].feedback[-1], DRAFTED)
    session.drop(len(PROMPT))
    results.append(refresh(session, ACCEPTED, features(graphs, len(ACCEPTED), seed=2)))
    results += grow(session, results[-1].feedback[-1], TREE)
    assert session.rows == len(PROMPT) + len(ACCEPTED) + 8
    return results


@every_case
def test_refresh_chain_and_tree(graphs: HeadGraphs) -> None:
    assert_same(play(graphs.session(), graphs), play(graphs.oracle(), graphs))


@every_case
def test_logits_are_of_the_targets_tokens(graphs: HeadGraphs) -> None:
    ids = graphs.config.token_ids
    assert (list(range(VOCAB)) if ids is None else list(ids)) == graphs.oracle_head().token_ids()


@pytest.mark.parametrize("name", ["e1_no_fc_bias", "e2_slots_applied", "e3", "e4_fc_norm", "e4_norm_output"])
def test_float16_differs_by_rounding_only(opened: Open, name: str) -> None:
    graphs = opened(name)
    found = play(graphs.session("float16"), graphs)
    assert all(outputs.feedback.dtype == torch.float16 for outputs in found)
    assert_same(found, play(graphs.oracle(), graphs), tolerance=2e-2)


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("e1", "e2"),
        ("e1", "e2_long_names"),
        ("e1", "e2_no_bias_flag"),
        ("e1", "e1_poison"),
        ("e1", "e2_slots_ignored"),
        ("e3", "e4"),
        ("e3", "e3_embedding"),
        ("e3", "e3_nvidia"),
        ("e3", "e3_forty_layers"),
        ("e3_post_norm_fed", "e4_norm_output"),
        ("e3_post_norm_fed", "e3_nvidia_post_norm"),
        ("e3_normed_residual", "e4_normed_residual"),
    ],
)
def test_twins(opened: Open, name: str, twin: str) -> None:
    first, second = opened(name), opened(twin)
    for ours, theirs in zip(draft(first.session(), first), draft(second.session(), second), strict=True):
        assert torch.equal(ours.feedback, theirs.feedback)
        assert torch.equal(ours.logits, theirs.logits)


def test_joint_projections(opened: Open, tmp_path: Path) -> None:
    """The weights of vLLM's joint projections are byte ranges of one tensor."""
    joint, plain = HeadGraphs(Case(vllm_eagle3), tmp_path), opened("e3")
    for ours, theirs in zip(draft(joint.session(), joint), draft(plain.session(), plain), strict=True):
        assert torch.equal(ours.logits, theirs.logits)
    assert (joint.export("float32") / "weights" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("e1", {"swap_concat": True}),
        ("e1_numbers", {"theta": 10000.0}),
        ("e1_numbers", {"eps": 1e-6}),
        ("e2_slots_ignored", {"final_norm": True}),
        ("e2_slots_ignored", {"first_input_norm": True}),
        ("e2_slots_applied", {"final_norm": False}),
        ("e2_slots_applied", {"first_input_norm": False}),
        ("e2_para_norm", {"swap_concat": True}),
        ("e3", {"swap_concat": True}),
        ("e3", {"final_norm": False}),
        ("e3", {"norm_before_residual": True}),
        ("e3", {"double_hidden_norm": True}),
        ("e3_numbers", {"theta": 10000.0}),
        ("e3_numbers", {"eps": 1e-6}),
        ("e4_normed_residual", {"norm_before_residual": False}),
        ("e4_two_layers", {"norm_before_residual": True}),
    ],
)
def test_wrong_wiring_shows(opened: Open, name: str, switches: dict[str, Any]) -> None:
    graphs = opened(name)
    found, wrong = draft(graphs.session(), graphs), draft(graphs.oracle(Switches(**switches)), graphs)
    assert_same(found, draft(graphs.oracle(), graphs))
    assert all(distance(ours.logits, theirs.logits) > 0.02 for ours, theirs in zip(found, wrong, strict=True))


@pytest.mark.parametrize(
    ("name", "other", "same_steps"),
    [
        ("e1", "e1_final_norm", 0),
        ("e1", "e1_input_norm", 0),
        ("e2_slots_applied", "e2_slots_applied_pre_norm_fed", 1),
        ("e3", "e3_no_final_norm", 0),
        ("e3", "e3_normed_residual", 0),
        ("e3", "e3_double_norm", 0),
        ("e3", "e3_post_norm_fed", 1),
        ("e4", "e4_normed_residual", 0),
        ("e4", "e4_norm_output", 1),
        ("e4_normed_residual", "e4_all_norms", 0),
    ],
)
def test_flags_change_the_graph(opened: Open, name: str, other: str, same_steps: int) -> None:
    """What is fed back changes the second step and not the first; the other flags change the first."""
    first, second = opened(name), opened(other)
    pairs = list(zip(draft(first.session(), first), draft(second.session(), second), strict=True))
    for step, (ours, theirs) in enumerate(pairs):
        if step < same_steps:
            assert torch.equal(ours.logits, theirs.logits)
            assert distance(ours.feedback, theirs.feedback) > 0.1
        else:
            assert distance(ours.logits, theirs.logits) > 0.02


def swapped_halves(tensors: dict[str, torch.Tensor], suffixes: Sequence[str]) -> dict[str, torch.Tensor]:
    """The matrices of these names with the halves of their columns swapped."""
    chosen = {name: tensor for name, tensor in tensors.items() if name.endswith(tuple(suffixes))}
    assert len(chosen) == len(suffixes)
    return {name: torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1) for name, tensor in chosen.items()}


@pytest.mark.parametrize("name", ["e1", "e3"])
def test_embedding_comes_first(opened: Open, name: str, tmp_path: Path) -> None:
    """A head whose columns are swapped computes what the original would with its inputs swapped."""
    make: Callable[..., Any] = make_e1 if name == "e1" else make_e3
    tensors, suffixes = (
        (heads.e1_tensors(), ["fc.weight"])
        if name == "e1"
        else (heads.e3_tensors(), [f"{kind}_proj.weight" for kind in "qkv"])
    )
    changes = swapped_halves(tensors, suffixes)
    swapped, plain = HeadGraphs(Case(lambda path: make(path, changes=changes)), tmp_path), opened(name)
    found = draft(swapped.session(), swapped)
    assert_same(found, draft(plain.oracle(Switches(swap_concat=True)), plain))
    original = draft(plain.session(), plain)
    assert all(distance(ours.logits, theirs.logits) > 0.1 for ours, theirs in zip(found, original, strict=True))


some_heads = pytest.mark.parametrize(
    "name", ["e1", "e1_two_layers", "e2_slots_applied", "e3", "e4_norm_output", "e4_two_layers"]
)


@some_heads
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_every_path_of_a_tree_is_a_chain(opened: Open, name: str, path: list[int]) -> None:
    graphs = opened(name)
    ours, theirs = graphs.session(), graphs.session()
    roots = [refresh(each, PROMPT, features(graphs, len(PROMPT), seed=1)).feedback[-1] for each in (ours, theirs)]
    tokens = []
    for depth, node in enumerate(path):
        token, parent = TREE[depth][node]
        assert depth == 0 or parent == path[depth - 1]
        tokens.append(token)
    tree, alone = grow(ours, roots[0], TREE), chain(theirs, roots[1], tokens)
    for depth, node in enumerate(path):
        for name_, value in tree[depth]._asdict().items():
            assert_close(value[node : node + 1], getattr(alone[depth], name_))
            others = torch.cat([value[:node], value[node + 1 :]])
            assert (others - value[node]).abs().amax(dim=1).min() > 0.01 * value.std()


@some_heads
def test_refresh_in_pieces(opened: Open, name: str) -> None:
    graphs = opened(name)
    states = features(graphs, len(PROMPT), seed=1)
    whole, pieces = graphs.session(), graphs.session()
    expected = refresh(whole, PROMPT, states)
    found = [refresh(pieces, PROMPT[a:b], states[a:b]) for a, b in ((0, 1), (1, 5), (5, 7))]
    assert_same([Outputs(*map(torch.cat, zip(*found, strict=True)))], [expected])
    assert_same(chain(pieces, found[-1].feedback[-1], DRAFTED), chain(whole, expected.feedback[-1], DRAFTED))


@some_heads
def test_batch_of_different_lengths(opened: Open, name: str) -> None:
    """Two sequences' trees in one pass, padded to the longer; a third slot stays as it was."""
    graphs = opened(name)
    first = graphs.session(slots=3)
    second = first.beside(1)
    first.cache.block[:, 2] = 5.0
    first.cache.block[:, 1, :, 2:] = 1e4
    expected, inputs = [], []
    for session, length in ((first, len(PROMPT)), (second, 2)):
        tokens, states = PROMPT[:length], features(graphs, length, seed=length)
        root = refresh(session, tokens, states).feedback[-1]
        alone = graphs.oracle()
        expected += grow(alone, refresh(alone, tokens, states).feedback[-1], TREE[:1])
        inputs.append((session.embed([token for token, _ in TREE[0]]), root.expand(3, HIDDEN)))
    lengths = torch.tensor([first.rows, second.rows])
    mask = torch.zeros(2, 1, 3, int(lengths.max()) + 3, dtype=torch.bool)
    for slot, length in enumerate(lengths.tolist()):
        mask[slot, 0, :, :length] = True
        mask[slot, 0, :, length : length + 3] = torch.eye(3, dtype=torch.bool)
    embeds, hidden = map(torch.stack, zip(*inputs, strict=True))
    assert_same(first.run(embeds, hidden, lengths[:, None].expand(2, 3), lengths, mask), expected)
    assert (first.cache.block[:, 2] == 5.0).all()
    assert (first.cache.block[:, 1, :, 5:] == 1e4).all()


BODY_INPUTS = {
    "inputs_embeds": ("batch", "width", HIDDEN),
    "hidden_input": ("batch", "width", HIDDEN),
    "position_ids": ("batch", "width"),
    "cache_length": ("batch",),
    "tree_mask": ("batch", 1, "width", "live_len"),
}
SEPARATE = {
    "e1": False,
    "e2_slots_applied": False,
    "e2_slots_applied_pre_norm_fed": True,
    "e1_eagle_norms": True,
    "e3": True,
    "e3_no_final_norm": False,
    "e3_post_norm_fed": False,
    "e3_narrow": True,
    "e4_two_layers": True,
}


def declared(model: onnx.ModelProto) -> tuple[dict[str, tuple[Any, ...]], dict[str, tuple[Any, ...]]]:
    """Axes of a model's inputs and outputs by name."""
    inputs, outputs = (
        {
            value.name: tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim)
            for value in values
        }
        for values in (model.graph.input, model.graph.output)
    )
    return inputs, outputs


@pytest.mark.parametrize("name", SEPARATE)
def test_inputs_and_outputs(opened: Open, name: str) -> None:
    """The LM head has an input of its own exactly where it doesn't read what is fed back."""
    graphs = opened(name)
    folder = graphs.export("float32")
    inputs, outputs = declared(onnx.load(folder / "draft_head.onnx", load_external_data=False))
    cache = ("batch", graphs.config.num_kv_heads, CACHE_ROWS, graphs.config.head_dim)
    tables = [f"{layer}.{kind}" for layer in range(graphs.config.num_layers) for kind in ("key", "value")]
    assert inputs == {**BODY_INPUTS, **{f"past_key_values.{each}": cache for each in tables}}
    hidden = ["feedback", "logit_hidden"] if SEPARATE[name] else ["feedback"]
    rows = dict.fromkeys(hidden, ("batch", "width", HIDDEN))
    assert outputs == {**rows, **{f"present.{each}": cache for each in tables}}
    assert (folder / "fuse.onnx").exists() == (graphs.config.kind == "eagle3")
    if graphs.config.kind == "eagle3":
        width = 3 * graphs.case.target_hidden
        fuse = declared(onnx.load(folder / "fuse.onnx", load_external_data=False))
        assert fuse == ({"features": ("rows", width)}, {"fused": ("rows", HIDDEN)})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@every_case
def test_onnx_files(graphs: HeadGraphs, dtype: str, tmp_path: Path) -> None:
    """The checker accepts them, they declare what their specs say, and hold no weight that they don't use."""
    # The checker refuses weight files that are hard links, as those of a float32 checkpoint are here.
    folder = shutil.copytree(graphs.export(dtype), tmp_path / "copy")
    assert {path.stem for path in folder.glob("*.onnx")} == set(graphs.specs(dtype))
    for name, spec in graphs.specs(dtype).items():
        onnx.checker.check_model(folder / f"{name}.onnx", full_check=True)
        model = onnx.load(folder / f"{name}.onnx", load_external_data=False)
        expected = tuple({each.name: each.axes for each in tensors} for tensors in (spec.inputs, spec.outputs))
        assert declared(model) == expected
        assert len({node.name for node in model.graph.node}) == len(model.graph.node)
        used = {name for node in model.graph.node for name in node.input}
        assert {each.name for each in model.graph.initializer} <= used


def profiles(name: str) -> tuple[Profile, ...]:
    if name == "fuse":
        return (Profile("rows", {"rows": (1, 8, 16)}),)
    live = (1, CACHE_ROWS // 2, CACHE_ROWS)
    step = {"batch": (1, 1, 2), "width": (1, 4, 8), "live_len": live}
    return Profile("step", step), Profile("refresh", {"batch": (1, 1, 1), "width": (1, 16, 16), "live_len": live})


@pytest.mark.parametrize("name", SAME_GRAPH)
def test_same_graphs(opened: Open, name: str) -> None:
    assert all(opened(twin).nodes() == opened(name).nodes() for twin in SAME_GRAPH[name])


@needs_rtx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("graphs", sorted(set(CASES).difference(*SAME_GRAPH.values())), indirect=True)
def test_compiles_for_tensorrt_rtx(graphs: HeadGraphs, dtype: str, tmp_path: Path) -> None:
    folder = graphs.export(dtype)
    for name, spec in graphs.specs(dtype).items():
        config = BuildConfig(dtype, (), profiles(name))
        info = build_engine(RTX, folder / f"{name}.onnx", spec, config, tmp_path / f"{name}.engine")
        assert info.size_bytes == info.path.stat().st_size > 0
