"""The target graph against transformers: prefill, decoding, draft trees and batches, for every architecture and rope."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiny_targets import CACHE_ROWS, CASES, HEADS, VOCAB, Case, TinyTarget, save_case

from trtspec import tensors
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.decode.rows import prefill_rows, select_rows, verification_rows
from trtspec.draft.tree import EMPTY, NGRAM, DraftTree, check_tree
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
        hidden = target.forward(rows, cache.view(sequence.slot, 1))
        logits.append(target.logits(hidden[0]).clone())
        sequence.cached += rows.tokens.shape[1]
    return torch.cat(logits)


def prefilled(target: Target, cache: KVCache, prompt: Seq[int], root: int, slot: int = 0) -> Sequence:
    """A sequence with its prompt in the cache and a root behind it."""
    sequence = start(prompt, slot)
    prefill(target, cache, sequence, 256)
    sequence.append(root)
    return sequence


def verify(target: Target, cache: KVCache, sequences: Seq[Sequence], trees: Seq[DraftTree]) -> list[torch.Tensor]:
    """Logits of root and draft tokens of each sequence, `[tree width, vocab]`."""
    hidden = target.forward(verification_rows(sequences, trees), cache.view(0, len(sequences)))
    logits = target.logits(select_rows(hidden, trees))
    return list(logits.clone().split([tree.width for tree in trees]))


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
    tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), (NGRAM,) * len(tokens))
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
            path = [int(tree.tokens[node - 1]) for node in tree.path_to(row)[1:]]
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

    keep(cache, sequence, tree, tree.path_to(7)[1:], bonus=12)
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
