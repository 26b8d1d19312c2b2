"""The target graph against transformers: prefill, decoding, trees and batches, for every architecture and rope."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from draft.trees import path_to
from tiny_targets import ARCHITECTURES, CACHE_ROWS, CASES, EXTRA, HEADS, ROPES, VOCAB, Case, TinyTarget, save_case

from trtspec import tensors
from trtspec.checkpoint.target import ARCHITECTURES as SUPPORTED
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.decode.rows import EXACT, prefill_rows, select_rows, verification_rows
from trtspec.draft.tree import EMPTY, NGRAM, DraftTree, check_tree
from trtspec.engine.base import Buckets
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.target import Rows, Target
from trtspec.engine.tensorrt_build import RUNTIMES, BuildConfig, build_engine, lm_head_profiles, target_profiles
from trtspec.graph.target import lm_head_spec
from trtspec.sequence import Sequence

RTX = "tensorrt-rtx"
TOLERANCE = 1e-4
PROMPT = [17, 3, 200, 44, 9, 9, 120, 61, 7, 33, 150, 2, 88]
SHORT_PROMPT = [5, 190, 71, 13, 6]

needs_rtx = pytest.mark.skipif(
    not any(importlib.util.find_spec(module) for module in RUNTIMES[RTX].modules),
    reason="TensorRT-RTX is not installed",
)
every_case = pytest.mark.parametrize("tiny", CASES, indirect=True, ids=lambda case: case.name)
one_case = pytest.mark.parametrize("tiny", [Case("llama", "default")], indirect=True, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    """The case that a test is parametrised with."""
    directory = tmp_path_factory.mktemp(request.param.name)
    save_case(request.param, directory / "hf")
    return TinyTarget(directory / "hf", directory / "graphs")


def start(prompt: Seq[int], slot: int = 0) -> Sequence:
    sequence = Sequence.start(slot, prompt, CACHE_ROWS, SamplingParams(), SpeculationConfig())
    sequence.slot = slot
    return sequence


def prefill(target: Target, cache: KVCache, sequence: Sequence, chunk: int) -> torch.Tensor:
    """Logits behind every prompt token, `[prompt length, vocab]`."""
    logits = []
    while sequence.cached < sequence.prompt_length:
        rows = prefill_rows(sequence, chunk)
        hidden = target.forward(rows, cache.view(sequence.slot, 1)).hidden
        logits.append(target.logits(hidden[0]).clone())
        sequence.cached += rows.tokens.shape[1]
    return torch.cat(logits)


def prefilled(target: Target, cache: KVCache, prompt: Seq[int], root: int, slot: int = 0) -> Sequence:
    """A sequence with its prompt in the cache and a root behind it."""
    sequence = start(prompt, slot)
    prefill(target, cache, sequence, 256)
    sequence.append(root)
    return sequence


def verify(
    target: Target, cache: KVCache, sequences: Seq[Sequence], trees: Seq[DraftTree], buckets: Buckets = EXACT
) -> list[torch.Tensor]:
    """Logits of root and draft tokens of each sequence, `[tree width, vocab]`."""
    hidden = target.forward(verification_rows(sequences, trees, buckets), cache.view(0, len(sequences))).hidden
    logits = target.logits(select_rows(hidden, trees))
    return list(torch.tensor_split(logits.clone(), np.cumsum([tree.width for tree in trees])[:-1].tolist()))


def keep(cache: KVCache, sequence: Sequence, tree: DraftTree, rows: list[int], bonus: int) -> None:
    """Commit a path of the tree, given by its rows below the root, and a bonus token."""
    cache.keep_path(sequence.slot, sequence.cached, [0, *rows])
    sequence.cached += 1 + len(rows)
    for token in [*(int(tree.tokens[row - 1]) for row in rows), bonus]:
        sequence.append(token)
    assert sequence.cached == sequence.length - 1


def siblings() -> DraftTree:
    """Three branches below the root, forks deeper down; rows of a path aren't neighbours."""
    tokens, parents = [31, 140, 77, 140, 8, 31, 99, 205], [0, 0, 0, 1, 2, 2, 5, 4]
    tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.full(len(tokens), NGRAM, np.int8))
    check_tree(tree)
    return tree


def chain(*tokens: int) -> DraftTree:
    return DraftTree.chain(np.array(tokens, np.int32), NGRAM)


def assert_trees(
    tiny: TinyTarget, found: Seq[torch.Tensor], sequences: Seq[Sequence], trees: Seq[DraftTree], tolerance: float = 1e-4
) -> None:
    """Each row's logits are those of the sequence that the path from the root to it makes."""
    paths = []
    for sequence, tree in zip(sequences, trees, strict=True):
        for row in range(tree.width):
            path = [int(tree.tokens[node - 1]) for node in path_to(tree, row)[1:]]
            paths.append([*sequence.history.tolist(), *path])
    for logits, expected in zip(torch.cat(list(found)), tiny.expected_last(paths), strict=True):
        assert_close(logits, expected, tolerance)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert expected.std() > 0.1
    difference = (found.float() - expected).abs().max() / expected.std()
    assert difference <= tolerance


@every_case
def test_prefill_in_chunks_and_decoding_at_an_offset(tiny: TinyTarget) -> None:
    target, cache, sequence = tiny.load(), tiny.new_cache(slots=1), start(PROMPT)
    assert_close(prefill(target, cache, sequence, chunk=8), tiny.expected(PROMPT))
    for token in (100, 4, 55):
        sequence.append(token)
        (logits,) = verify(target, cache, [sequence], [EMPTY])
        assert_close(logits, tiny.expected(sequence.history.tolist())[-1:])
        sequence.cached += 1


@every_case
def test_tree_with_siblings_and_decoding_behind_a_kept_path(tiny: TinyTarget) -> None:
    target, cache = tiny.load(), tiny.new_cache(slots=1)
    sequence, tree = prefilled(target, cache, PROMPT, root=100), siblings()
    assert_trees(tiny, verify(target, cache, [sequence], [tree]), [sequence], [tree])

    keep(cache, sequence, tree, path_to(tree, 7)[1:], bonus=12)
    assert sequence.history.tolist() == [*PROMPT, 100, 140, 8, 99, 12]
    tree = chain(60, 61)
    assert_trees(tiny, verify(target, cache, [sequence], [tree]), [sequence], [tree])


@every_case
def test_batch_with_different_lengths_and_padded_trees(tiny: TinyTarget) -> None:
    target, cache = tiny.load(), tiny.new_cache(slots=3)
    sequences = [
        prefilled(target, cache, PROMPT, root=100, slot=0),
        prefilled(target, cache, SHORT_PROMPT, root=1, slot=1),
        prefilled(target, cache, SHORT_PROMPT[:1], root=2, slot=2),
    ]
    for trees, paths in (
        ([siblings(), chain(31, 9), EMPTY], [[2, 5, 7], [1], []]),
        ([chain(14), siblings(), siblings()], [[1], [1, 4], [3]]),
        ([EMPTY, EMPTY, chain(3)], [[], [], [1]]),
    ):
        found = verify(target, cache, sequences, trees)
        assert_trees(tiny, found, sequences, trees)
        for sequence, tree, path in zip(sequences, trees, paths, strict=True):
            keep(cache, sequence, tree, path, bonus=20 + sequence.slot)


@pytest.mark.parametrize("tiny", [Case(name, "yarn") for name in ARCHITECTURES], indirect=True, ids=lambda c: c.name)
def test_float16_differs_by_rounding_only(tiny: TinyTarget) -> None:
    target, cache = tiny.load("float16"), tiny.new_cache(slots=2, dtype="float16")
    sequences = [
        prefilled(target, cache, PROMPT, root=100, slot=0),
        prefilled(target, cache, SHORT_PROMPT, root=1, slot=1),
    ]
    trees = [siblings(), chain(31)]
    found = verify(target, cache, sequences, trees)
    assert all(logits.dtype == torch.float16 for logits in found)
    assert_trees(tiny, found, sequences, trees, tolerance=2e-2)


@needs_rtx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every_case
def test_compiles_for_tensorrt_rtx(tiny: TinyTarget, dtype: str, tmp_path: Path) -> None:
    folder = tiny.export(dtype, lm_head_weight_as_input=True)
    body = target_profiles(max_batch=2, max_width=8, prefill_chunk=16, cache_rows=CACHE_ROWS)
    head = lm_head_profiles(16)
    specs = {"target": tiny.spec(dtype), "lm_head": lm_head_spec(tiny.config, dtype, weight_as_input=True)}
    for (name, spec), profiles in zip(specs.items(), (body, head), strict=True):
        config = BuildConfig(dtype, (), profiles)
        info = build_engine(RTX, folder / f"{name}.onnx", spec, config, tmp_path / f"{name}.engine")
        assert info.size_bytes == info.path.stat().st_size > 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@every_case
def test_graphs_pass_the_onnx_checker(tiny: TinyTarget, dtype: str, tmp_path: Path) -> None:
    for as_input in (False, True):
        # The checker refuses weight files that are hard links, as those of a float32 checkpoint are here.
        folder = shutil.copytree(tiny.export(dtype, lm_head_weight_as_input=as_input), tmp_path / str(as_input))
        for name in ("target", "lm_head"):
            onnx.checker.check_model(folder / f"{name}.onnx", full_check=True)


@every_case
def test_graph_declares_what_its_spec_says(tiny: TinyTarget) -> None:
    model = onnx.load(tiny.export("float16") / "target.onnx", load_external_data=False)
    spec = tiny.spec("float16")
    for declared, values in ((spec.inputs, model.graph.input), (spec.outputs, model.graph.output)):
        found = {
            value.name: tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim)
            for value in values
        }
        assert found == {tensor.name: tensor.axes for tensor in declared}
    assert len({node.name for node in model.graph.node}) == len(model.graph.node)


def rows_behind(cached: int) -> Rows:
    """One sequence: a root and a chain of two behind `cached` rows."""
    mask = torch.ones(1, 1, 3, cached + 3, dtype=torch.bool).tril(cached)
    return Rows(
        tokens=torch.tensor([[100, 31, 9]], dtype=torch.int32),
        positions=torch.arange(cached, cached + 3)[None],
        cache_length=torch.tensor([cached]),
        mask=mask,
    )


@every_case
def test_nan_behind_the_live_rows_changes_nothing(tiny: TinyTarget) -> None:
    target, cache = tiny.load(), tiny.new_cache(slots=1)
    prefill(target, cache, start(PROMPT), chunk=256)
    rows = rows_behind(len(PROMPT))
    expected = target.forward(rows, cache.view(0, 1)).hidden.clone()
    live = len(PROMPT) + 3
    cache.block[:, :, :, live:] = float("nan")
    found = target.forward(rows, cache.view(0, 1)).hidden
    assert torch.equal(found, expected)
    assert cache.block[:, :, :, live:].isnan().all()
    assert cache.block[:, :, :, :live].isfinite().all()


@every_case
def test_masked_rows_change_nothing(tiny: TinyTarget) -> None:
    """What a longer neighbour, a former tree or a former user of the slot left behind is not seen."""
    target, cache = tiny.load(), tiny.new_cache(slots=2)
    sequences = [
        prefilled(target, cache, PROMPT, root=100, slot=0),
        prefilled(target, cache, SHORT_PROMPT, root=1, slot=1),
    ]
    cache.block[:, 1, :, len(SHORT_PROMPT) :] = 1e4
    cache.block[:, 0, :, len(PROMPT) :] = -1e4
    trees = [siblings(), chain(31)]
    assert_trees(tiny, verify(target, cache, sequences, trees), sequences, trees)


@one_case
def test_padding_rows_are_finite_and_rows_behind_the_pass_stay_untouched(tiny: TinyTarget) -> None:
    target, cache = tiny.load(), tiny.new_cache(slots=3)
    sequences = [
        prefilled(target, cache, PROMPT, root=100, slot=0),
        prefilled(target, cache, SHORT_PROMPT[:1], root=1, slot=1),
    ]
    rows = verification_rows(sequences, [siblings(), EMPTY])
    width = rows.tokens.shape[1]
    assert width == siblings().width
    assert target.forward(rows, cache.view(0, 2)).hidden.isfinite().all()
    assert cache.block.isfinite().all()
    for slot, written in enumerate((len(PROMPT) + width, 1 + width, 0)):
        assert (cache.block[:, slot, :, written:] == 0).all()
        assert (cache.block[:, slot, :, :written] != 0).any(dim=-1).all()


@one_case
def test_pass_at_the_end_of_the_cache(tiny: TinyTarget) -> None:
    """The widest pass that still fits ends with the cache's last row."""
    tree = siblings()
    prompt = [(7 * i) % VOCAB for i in range(CACHE_ROWS - tree.width)]
    target, cache = tiny.load(), tiny.new_cache(slots=2)
    cache.block[:, 1] = 5.0
    sequence = prefilled(target, cache, prompt, root=100)
    assert_trees(tiny, verify(target, cache, [sequence], [tree]), [sequence], [tree])
    assert (cache.block[:, 0, :, -1] != 0).any()
    assert (cache.block[:, 1] == 5.0).all()


@one_case
def test_padding_past_the_shorter_sequences_cache_end(tiny: TinyTarget) -> None:
    """A sequence near its end in a batch with a wide tree: its padding still lands inside the cache."""
    tree = siblings()
    long = [(7 * i) % VOCAB for i in range(CACHE_ROWS - tree.width)]
    target, cache = tiny.load(), tiny.new_cache(slots=2)
    sequences = [
        prefilled(target, cache, SHORT_PROMPT, root=1, slot=0),
        prefilled(target, cache, long, root=100, slot=1),
    ]
    trees = [tree, EMPTY]
    assert_trees(tiny, verify(target, cache, sequences, trees), sequences, trees)


@one_case
def test_passes_padded_to_buckets(tiny: TinyTarget) -> None:
    """Wider and longer than any sequence of the batch needs, as for CUDA graphs; what is cached stays usable."""
    buckets = Buckets(widths=(1, 12), live_step=64, max_live=CACHE_ROWS)
    target, cache = tiny.load(), tiny.new_cache(slots=2)
    sequences = [
        prefilled(target, cache, PROMPT, root=100, slot=0),
        prefilled(target, cache, SHORT_PROMPT, root=1, slot=1),
    ]
    for trees, paths in (
        ([siblings(), chain(31)], [[2, 5, 7], [1]]),
        ([EMPTY, EMPTY], [[], []]),
        ([EMPTY, chain(4)], [[], [1]]),
    ):
        rows = verification_rows(sequences, trees, buckets)
        assert rows.mask.shape[2:] == (12 if max(tree.size for tree in trees) else 1, 64)
        found = verify(target, cache, sequences, trees, buckets)
        assert_trees(tiny, found, sequences, trees)
        for sequence, tree, path in zip(sequences, trees, paths, strict=True):
            keep(cache, sequence, tree, path, bonus=20 + sequence.slot)


@one_case
def test_two_engines_share_no_cache(tiny: TinyTarget) -> None:
    targets, caches = [tiny.load(), tiny.load()], [tiny.new_cache(slots=1), tiny.new_cache(slots=1)]
    first = prefilled(targets[0], caches[0], PROMPT, root=100)
    before = caches[0].block.clone()
    second = prefilled(targets[1], caches[1], SHORT_PROMPT, root=1)
    assert torch.equal(caches[0].block, before)
    for token in (8, 15, 160):
        for target, cache, sequence in zip(targets, caches, (first, second), strict=True):
            assert_trees(tiny, verify(target, cache, [sequence], [chain(token)]), [sequence], [chain(token)])
            keep(cache, sequence, chain(token), [1], bonus=token + 1)


@one_case
def test_cache_outputs_alias_their_inputs(tiny: TinyTarget) -> None:
    names = tensors.cache_names(tiny.config.num_layers)
    assert dict(tiny.spec("float32").aliases) == {present: past for past, present in names}
    target, cache = tiny.load(), tiny.new_cache(slots=1)
    pointers = {name: value.data_ptr() for name, value in cache.view(0, 1).tensors.items()}
    prefill(target, cache, start(PROMPT), chunk=4)
    view = cache.view(0, 1)
    assert {name: value.data_ptr() for name, value in view.tensors.items()} == pointers
    for value in view.tensors.values():
        assert (value[:, :, : len(PROMPT)] != 0).any(dim=-1).all()


def test_cases_cover_what_a_target_can_be() -> None:
    assert {case.rope for case in CASES} == set(ROPES)
    heads = [options["num_key_value_heads"] for _, options in (*ARCHITECTURES.values(), *EXTRA.values())]
    assert {1, 2, HEADS} <= set(heads)
    assert {kind for kind, _ in ARCHITECTURES.values()} == set(SUPPORTED)
