"""The proposal graph in ONNX Runtime against the host's drafters, a brute-force oracle and the reference."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from draft.trees import token_paths, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.draft.merge import union
from trtspec.draft.ngram import Match, find_match, tree_of
from trtspec.draft.tree import EAGLE, EMPTY, DraftTree
from trtspec.engine.onnxruntime_engine import OnnxRuntimeEngine
from trtspec.engine.tensorrt_build import (
    RUNTIMES,
    BuildConfig,
    Profile,
    build_engine,
    check_network,
    layer_counts,
    parse_network,
)
from trtspec.errors import ConfigError
from trtspec.graph.proposal import ProposalConfig, proposal_graph, proposal_spec
from trtspec.plugins import reference
from trtspec.plugins.definition import LONGEST_MATCH

RTX = "tensorrt-rtx"
UNLIMITED = 1 << 20
EXTREMES = (-(2**31), -1, 0, 2**31 - 1)
LATEST = {False: "earliest", True: "latest"}

needs_rtx = pytest.mark.skipif(
    not any(importlib.util.find_spec(module) for module in RUNTIMES[RTX].modules),
    reason="TensorRT-RTX is not installed",
)


def config(**changes: int) -> ProposalConfig:
    """A small graph with these changes."""
    sizes = {"max_len": 24, "eagle_nodes": 7, "size": 12}
    lookup = {"ngram_min": 1, "ngram_max": 3, "ngram_tokens": 4, "ngram_branches": 2, "latest": False}
    return ProposalConfig(**{**sizes, **lookup, **changes})


CONFIGS = [
    config(),
    config(latest=True),
    config(ngram_branches=1, ngram_min=2, ngram_max=5, ngram_tokens=6),
    config(ngram_branches=1, ngram_min=3, ngram_max=3, ngram_tokens=1, eagle_nodes=1, latest=True),
    config(max_len=80, ngram_branches=5, ngram_max=40, ngram_tokens=9, size=40, latest=True),
    config(max_len=1, size=1),
]


class Inputs(NamedTuple):
    """One batch, int32."""

    history: np.ndarray
    lengths: np.ndarray
    eagle_tokens: np.ndarray
    eagle_parents: np.ndarray
    eagle_counts: np.ndarray
    room: np.ndarray
    ngram_limits: np.ndarray

    def rows(self, start: int, stop: int) -> Inputs:
        """Some of its sequences."""
        return Inputs(*(array[start:stop] for array in self))


class Outputs(NamedTuple):
    """What the graph gives for one batch, int32."""

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    sources: np.ndarray
    counts: np.ndarray
    match_lengths: np.ndarray

    def tree(self, sequence: int) -> DraftTree:
        """One sequence's tree; everything behind its nodes must be 0."""
        count = int(self.counts[sequence])
        for array in (self.tokens, self.parents, self.depths, self.sources):
            assert not array[sequence, count:].any()
        tokens, parents, sources = (array[sequence, :count] for array in (self.tokens, self.parents, self.sources))
        tree = DraftTree(tokens, parents, sources.astype(np.int8))
        assert tree.depths[1:].tolist() == self.depths[sequence, :count].tolist()
        return tree


@functools.cache
def engine(options: ProposalConfig) -> OnnxRuntimeEngine:
    """The graph in ONNX Runtime."""
    model = ir.serde.serialize_model(proposal_graph(options))
    onnx.checker.check_model(model, full_check=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "proposal.onnx"
        path.write_bytes(model.SerializeToString())
        return OnnxRuntimeEngine(path, proposal_spec(options))


def run(options: ProposalConfig, inputs: Inputs) -> Outputs:
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
    spec = proposal_spec(options)
    found = engine(options).run({tensor.name: value for tensor, value in zip(spec.inputs, tensors, strict=True)})
    return Outputs(*(found[tensor.name].numpy().copy() for tensor in spec.outputs))


def draw(options: ProposalConfig, batch: int, seed: int, tokens: Seq[int] = (3, 4, 5)) -> Inputs:
    """Random histories over few tokens, so that most things happen; garbage behind lengths and counts."""
    rng = np.random.default_rng(seed)

    def ints(high: int | np.ndarray, *shape: int) -> np.ndarray:
        return rng.integers(0, high, (batch, *shape), dtype=np.int32)

    def some(*shape: int) -> np.ndarray:
        # A batch in which sequences differ in how many tokens they use.
        kinds = rng.integers(1, len(tokens) + 1, (batch, *(1 for _ in shape)))
        return np.array(tokens, np.int32)[ints(1 << 30, *shape) % kinds]

    nodes = np.arange(options.eagle_nodes, dtype=np.int32)
    parents, counts = ints(1 + nodes, options.eagle_nodes), ints(1 + options.eagle_nodes)
    parents = np.where(nodes < counts[:, None], parents, ints(2**31 - 1, options.eagle_nodes))
    return Inputs(
        history=some(options.max_len),
        lengths=ints(1 + options.max_len),
        eagle_tokens=some(options.eagle_nodes),
        eagle_parents=parents,
        eagle_counts=counts,
        room=ints(3 + options.size) - 1,
        # As many tokens as the axis has, or fewer.
        ngram_limits=1 + ints(options.ngram_tokens + 2, 1),
    )


def match_length(history: Seq[int], end: int) -> int:
    """How many tokens in front of `end` equal the last ones."""
    equal = itertools.takewhile(lambda n: history[end - n] == history[len(history) - n], range(1, end + 1))
    return min(sum(1 for _ in equal), LONGEST_MATCH)


def brute_force(options: ProposalConfig, history: np.ndarray) -> list[Match]:
    """All branches: every place with its length, the best of each first token."""
    tokens, count = history.tolist(), options.ngram_tokens

    def goodness(end: int) -> tuple[int, bool, int]:
        late = options.latest and end + count <= len(tokens)
        return min(match_length(tokens, end), options.ngram_max), late, end if late else -end

    places = [end for end in range(1, len(tokens)) if match_length(tokens, end) >= options.ngram_min]
    best: dict[int, int] = {}
    for end in sorted(places, key=goodness, reverse=True):
        best.setdefault(tokens[end], end)
    chosen = list(best.values())[: options.ngram_branches]
    return [Match(history[end : end + count], match_length(tokens, end)) for end in chosen]


def cut(matches: Seq[Match], limit: int) -> list[Match]:
    """The matches with continuations of at most `limit` tokens."""
    return [Match(match.continuation[:limit], match.length) for match in matches]


def eagle_paths(inputs: Inputs, sequence: int) -> list[tuple[int, ...]]:
    """Paths of EAGLE's nodes in their order, some of them perhaps equal."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(int(inputs.eagle_counts[sequence])):
        parent = int(inputs.eagle_parents[sequence, node])
        paths.append((*paths[parent], int(inputs.eagle_tokens[sequence, node])))
    return paths[1:]


def expected_tree(matches: Seq[Match], eagle: Seq[tuple[int, ...]], room: int) -> list[tuple[tuple[int, ...], int]]:
    """Path and flags of each node."""
    found: dict[tuple[int, ...], int] = {}
    for match in matches:
        tokens = tuple(match.continuation.tolist())
        for depth in range(1, len(tokens) + 1):
            found[tokens[:depth]] = found.get(tokens[:depth], 0) | 1
    for path in eagle:
        found[path] = found.get(path, 0) | 2
    kept = sorted(found, key=len)[: max(room, 0)]
    return [(path, flags) for path, flags in found.items() if path in kept]


def check(options: ProposalConfig, inputs: Inputs) -> None:
    """Compare a batch with the brute-force oracle and its first branch with the host's lookup."""
    found = run(options, inputs)
    # The host counts on beyond the longest match.
    longest = min(options.ngram_max, LONGEST_MATCH)
    lookup = {"ngram_min": options.ngram_min, "ngram_max": longest, "num_tokens": options.ngram_tokens}
    for sequence, length in enumerate(inputs.lengths.tolist()):
        history = inputs.history[sequence, :length]
        matches = brute_force(options, history)
        first = find_match(history, **lookup, occurrence=LATEST[options.latest])
        assert (first is None) == (not matches)
        if first is not None:
            assert first.continuation.tolist() == matches[0].continuation.tolist()
            assert first.length == matches[0].length
        lengths = [match.length for match in matches] + [0] * options.ngram_branches
        assert found.match_lengths[sequence].tolist() == lengths[: options.ngram_branches]
        tree = found.tree(sequence)
        flags = tree.sources.tolist()
        room = min(int(inputs.room[sequence]), options.size)
        limit = int(inputs.ngram_limits[sequence, 0])
        expected = expected_tree(cut(matches, limit), eagle_paths(inputs, sequence), room)
        assert list(zip(token_paths(tree), flags, strict=True)) == expected


@pytest.mark.parametrize("tokens", [(3, 4, 5), EXTREMES], ids=["few", "extremes"])
@pytest.mark.parametrize("options", CONFIGS, ids=range(len(CONFIGS)))
def test_six_hundred_sequences_in_one_run(options: ProposalConfig, tokens: Seq[int]) -> None:
    check(options, draw(options, 600, seed=1, tokens=tokens))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CONFIGS), st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=8), st.data())
def test_histories_that_hypothesis_finds(
    options: ProposalConfig, histories: list[list[int]], data: st.DataObject
) -> None:
    inputs = draw(options, len(histories), data.draw(st.integers(0, 2**32 - 1)), tokens=range(3))
    for sequence, history in enumerate(histories):
        known = history[: options.max_len]
        inputs.lengths[sequence] = len(known)
        inputs.history[sequence, : len(known)] = known
    check(options, inputs)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 1), max_size=24),
    trees(range(2), max_size=7),
    st.integers(0, 14),
    st.sampled_from(CONFIGS[:3]),
)
def test_the_tree_is_the_hosts_union(history: list[int], eagle: DraftTree, room: int, options: ProposalConfig) -> None:
    eagle = DraftTree(eagle.tokens, eagle.parents, np.full(eagle.size, EAGLE, np.int8))
    inputs = draw(options, 1, seed=0)
    inputs.lengths[0], inputs.eagle_counts[0], inputs.room[0] = len(history), eagle.size, room
    inputs.history[0, : len(history)] = history
    inputs.eagle_tokens[0, : eagle.size], inputs.eagle_parents[0, : eagle.size] = eagle.tokens, eagle.parents
    limit = int(inputs.ngram_limits[0, 0])
    matches = cut(brute_force(options, np.array(history, np.int32)), limit)
    expected = union(tree_of(matches, UNLIMITED), eagle, min(room, options.size))
    found = run(options, inputs).tree(0)
    for name in ("tokens", "parents", "sources", "depths"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()


def check_reference(options: ProposalConfig, inputs: Inputs) -> Outputs:
    """Compare a batch with the reference, all outputs and bit by bit."""
    history, lengths, *eagle, room, limits = (torch.from_numpy(array) for array in inputs)
    drafted = reference.ngram_draft(history, lengths, **options.lookup.attributes)
    counts = torch.minimum(drafted.counts, limits)
    merged = reference.merge_drafts(drafted.tokens, counts, *eagle, room, **options.merge.attributes)
    found = run(options, inputs)
    for value, expected in zip(found, (*merged, drafted.match_lengths), strict=True):
        np.testing.assert_array_equal(value, expected.numpy())
    return found


@pytest.mark.parametrize("options", CONFIGS, ids=range(len(CONFIGS)))
def test_the_graph_is_the_reference(options: ProposalConfig) -> None:
    inputs = draw(options, 500, seed=2)
    inputs.room.clip(0, out=inputs.room)
    check_reference(options, inputs)


LONG = ProposalConfig(
    max_len=4096,
    eagle_nodes=60,
    size=63,
    ngram_min=2,
    ngram_max=5,
    ngram_tokens=10,
    ngram_branches=3,
    latest=False,
)


def long_inputs(options: ProposalConfig, batch: int, vocabulary: int) -> Inputs:
    """Long histories whose last tokens stand earlier too."""
    inputs = draw(options, batch, seed=3, tokens=range(vocabulary))
    for sequence in range(batch):
        length = options.max_len - 13 * sequence
        inputs.lengths[sequence] = length
        span, start = 1 + 5 * sequence, 100 * (sequence + 1)
        inputs.history[sequence, length - span : length] = inputs.history[sequence, start : start + span]
    return inputs


@pytest.mark.parametrize("latest", [False, True])
@pytest.mark.parametrize("vocabulary", [2, 50, 49152])
def test_long_histories(latest: bool, vocabulary: int) -> None:
    options = ProposalConfig(**{**vars(LONG), "latest": latest})
    inputs = long_inputs(options, 8, vocabulary)
    # Room for all, so that no branch is cut.
    inputs.room[:], inputs.ngram_limits[:] = options.size, options.ngram_tokens
    inputs.eagle_counts.clip(0, 30, out=inputs.eagle_counts)
    found = check_reference(options, inputs)
    for sequence, length in enumerate(inputs.lengths.tolist()):
        history = inputs.history[sequence, :length]
        match = find_match(history, ngram_min=2, ngram_max=5, num_tokens=10, occurrence=LATEST[latest])
        assert int(found.match_lengths[sequence, 0]) == (match.length if match else 0)
        if match:
            # The best branch is the chain in front.
            tokens = match.continuation.tolist()
            assert found.tokens[sequence, : len(tokens)].tolist() == tokens


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    inputs = long_inputs(LONG, 8, 300)
    together = run(LONG, inputs)
    for sequence in range(8):
        alone = run(LONG, inputs.rows(sequence, sequence + 1))
        for one, all_of_them in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], all_of_them[sequence])


def test_nothing_is_proposed_where_nothing_is_known() -> None:
    options = config()
    inputs = draw(options, 2, seed=4)
    inputs.lengths[:] = (0, 1)
    inputs.eagle_counts[:] = 0
    inputs.room[:] = options.size
    found = run(options, inputs)
    assert not any(array.any() for array in found)
    assert found.tree(0).size == EMPTY.size


def test_the_nodes_are_the_plugins() -> None:
    model = ir.serde.serialize_model(proposal_graph(LONG))
    drafting, limiting, merging = model.graph.node
    assert [node.op_type for node in model.graph.node] == ["ngram_draft", "Min", "merge_drafts"]
    assert limiting.domain == ""
    lookup = {"ngram_min": 2, "ngram_max": 5, "num_tokens": 10, "branches": 3, "latest": 0}
    for node, attributes in ((drafting, lookup), (merging, {"size": 63})):
        assert node.domain == "trtspec"
        values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        # Where TensorRT's parser looks for the plugin.
        assert values == {**attributes, "plugin_namespace": b"trtspec"}
    for function in model.functions:
        assert function.domain == "trtspec"
        assert {node.domain for node in function.node} == {""}
        assert function.attribute  # what a runtime without the plugin is given and doesn't need
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 24, "trtspec": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_len": 0}, "max_len is 0; the proposal graph needs at least 1"),
        ({"eagle_nodes": 0}, "eagle_nodes is 0"),
        ({"ngram_tokens": 0}, "ngram_tokens is 0"),
        ({"ngram_min": 4}, "ngram_min is 4; it must be at most ngram_max, which is 3"),
        ({"ngram_min": 33, "ngram_max": 40}, "ngram_min is 33; .* at most 32"),
        ({"max_len": 1 << 26}, "max_len is 67108864; the proposal graph takes at most 3253"),
    ],
)
def test_sizes_that_make_no_graph(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@needs_rtx
@pytest.mark.parametrize("options", [CONFIGS[0], CONFIGS[3], LONG], ids=["small", "chain", "long"])
def test_tensorrt_rtx_compiles_the_functions(tmp_path: Path, options: ProposalConfig) -> None:
    path, spec = tmp_path / "proposal.onnx", proposal_spec(options)
    path.write_bytes(ir.serde.serialize_model(proposal_graph(options)).SerializeToString())
    parsed = parse_network(RTX, path, spec)
    # Names, int32 and shapes: everything is [batch, ...] with a dynamic batch.
    check_network(parsed, spec)
    assert "PLUGIN_V3" not in layer_counts(parsed)
    request = BuildConfig("float32", (), (Profile("batch", {"batch": (1, 4, 8)}),))
    assert build_engine(RTX, path, spec, request, tmp_path / "proposal.engine").size_bytes > 0
