"""Lookup and merge on the device against the host's, with the reference, the kernels and the proposal graph."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft.lookup_stories import COLUMNS, Story, check_story, contents, nodes, speculations, stories
from draft.proposal_engines import SharedEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.config import Limits, SamplingParams, SpeculationConfig
from trtspec.draft.device import (
    MOST_BRANCHES,
    MOST_KERNELS,
    DeviceHistory,
    DeviceLookup,
    pack,
    packed_size,
    unpack,
)
from trtspec.draft.ngram import LookupAsk, Match, MergeAsk, NgramDrafter
from trtspec.draft.proposal_lookup import ProposalLookup
from trtspec.draft.tree import EAGLE, EMPTY, DraftTree
from trtspec.graph.proposal import ProposalConfig
from trtspec.plugins import reference
from trtspec.plugins.definition import MergedDraft, NgramDraft
from trtspec.plugins.kernels import launch
from trtspec.proposal_build import proposal_config
from trtspec.sequence import Sequence

CPU = torch.device("cpu")
KERNELS = Path(__file__).with_name("interpreted_lookup.py")


class Counted:
    """The reference, and how it was called."""

    def __init__(self) -> None:
        self.lookups: list[dict[str, int]] = []
        self.lengths: list[list[int]] = []
        self.merges: list[tuple[int, ...]] = []

    def ngram_draft(self, history: torch.Tensor, lengths: torch.Tensor, **options: Any) -> NgramDraft:
        self.lookups.append({name: value for name, value in options.items() if name != "out"})
        self.lengths.append(lengths.tolist())
        return reference.ngram_draft(history, lengths, **options)

    def merge_drafts(self, *inputs: torch.Tensor, **options: Any) -> MergedDraft:
        self.merges.append(tuple(inputs[0].shape))
        return reference.merge_drafts(*inputs, **options)


def on_reference(story: Story) -> DeviceLookup:
    return DeviceLookup(DeviceHistory(story.slots, COLUMNS, CPU), story.max_draft_tokens, reference)


def built(limit: int, **changes: Any) -> ProposalConfig:
    """What a directory's proposal engine is built for."""
    config = proposal_config("tensorrt", Limits(COLUMNS, max_batch_size=3, max_draft_tokens=limit))
    assert config is not None
    return ProposalConfig(**{**vars(config), **changes})


@settings(max_examples=300, deadline=None)
@given(stories(speculations(), st.integers(0, 9)))
def test_the_device_answers_as_the_host_does(story: Story) -> None:
    check_story(story, on_reference)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_answer_as_the_host_does() -> None:
    options = ["-o", "addopts=", "--noconftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(KERNELS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "1 passed" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("seed", range(4))
def test_a_gpu_answers_as_the_host_does(seed: int) -> None:
    def make(story: Story) -> DeviceLookup:
        return DeviceLookup(DeviceHistory(story.slots, COLUMNS, torch.device("cuda")), story.max_draft_tokens, launch)

    options = [
        SpeculationConfig(method="ngram"),
        SpeculationConfig(method="ngram", ngram_min=1, ngram_occurrence="latest", ngram_branches=3),
    ]
    check_story(Story(3, 8, options, 30, seed), make)


# Options that the engine was built for, and others in the same batch.
usual = st.builds(SpeculationConfig, method=st.just("ngram"), ngram_tokens=st.integers(1, 9))


@settings(max_examples=200, deadline=None)
@given(stories(st.one_of(usual, usual, speculations()), st.just(8)), st.booleans())
def test_the_proposal_engine_answers_as_the_host_does(story: Story, has_kernels: bool) -> None:
    def make(story: Story) -> ProposalLookup:
        history = DeviceHistory(story.slots, COLUMNS, CPU)
        others = DeviceLookup(history, story.max_draft_tokens, reference) if has_kernels else NgramDrafter()
        config = built(story.max_draft_tokens)
        return ProposalLookup(SharedEngine(config), config, history, others)

    check_story(story, make)


BRANCHED = {"ngram_branches": 3, "ngram_min": 1, "size": 24}
branched = st.builds(
    SpeculationConfig,
    method=st.just("ngram"),
    ngram_min=st.just(1),
    ngram_branches=st.just(3),
    ngram_tokens=st.integers(1, 9),
)


@settings(max_examples=100, deadline=None)
@given(stories(branched, st.just(8)))
def test_a_proposal_engine_with_branches(story: Story) -> None:
    """The matches are told apart in the tree, which holds all of them."""
    config = built(story.max_draft_tokens, **BRANCHED)

    def make(story: Story) -> ProposalLookup:
        history = DeviceHistory(story.slots, COLUMNS, CPU)
        return ProposalLookup(SharedEngine(config), config, history, DeviceLookup(history, 8, reference))

    check_story(story, make)


def sequence_of(tokens: list[int], **options: Any) -> Sequence:
    return Sequence.start(0, tokens, COLUMNS, SamplingParams(), SpeculationConfig(method="ngram", **options))


REPEATED = [1, 2, 3, 4, 5, 1, 2, 3]


def test_sequences_with_equal_options_share_a_launch() -> None:
    counted = Counted()
    lookup = DeviceLookup(DeviceHistory(5, COLUMNS, CPU), 6, counted)
    asks = [
        LookupAsk(sequence_of(REPEATED), 6),
        LookupAsk(sequence_of(REPEATED, ngram_tokens=2), 2),
        LookupAsk(sequence_of(REPEATED, ngram_min=1), 3),
        LookupAsk(sequence_of(REPEATED), 0),
        LookupAsk(sequence_of([*REPEATED, 9]), 4),
    ]
    found = lookup.lookups(asks)
    assert [contents(matches) for matches in found] == [contents(right) for right in NgramDrafter().lookups(asks)]
    usual = {"ngram_min": 2, "ngram_max": 5, "num_tokens": 6, "branches": 1, "latest": 0}
    assert counted.lookups == [usual, {**usual, "ngram_min": 1}]
    assert counted.lengths == [[8, 8, 0, 0, 9], [0, 0, 8, 0, 0]]


@pytest.mark.parametrize(
    ("options", "num_tokens", "launched"),
    [
        ({}, 1, 6),
        ({"ngram_tokens": 3}, 3, 6),
        ({"ngram_occurrence": "latest"}, 6, 6),
        ({"ngram_occurrence": "latest", "ngram_tokens": 3}, 3, 3),
        ({"ngram_occurrence": "latest", "ngram_tokens": 3}, 6, 6),
        # The last place that 2 tokens follow isn't the last that 3 follow.
        ({"ngram_occurrence": "latest", "ngram_tokens": 3}, 2, None),
        ({"ngram_max": 32}, 6, 6),
        ({"ngram_max": 33}, 6, None),
        ({"ngram_min": 33, "ngram_max": 40}, 6, None),
    ],
)
def test_what_the_operations_define_otherwise_is_looked_up_on_the_host(
    options: dict[str, Any], num_tokens: int, launched: int | None
) -> None:
    counted = Counted()
    ask = LookupAsk(sequence_of(REPEATED, **options), num_tokens)
    [found] = DeviceLookup(DeviceHistory(1, COLUMNS, CPU), 6, counted).lookups([ask])
    assert [lookup["num_tokens"] for lookup in counted.lookups] == ([launched] if launched else [])
    assert contents(found) == contents(NgramDrafter().matches(*ask[:2]))


def test_requests_compile_few_kernels() -> None:
    counted = Counted()
    lookup = DeviceLookup(DeviceHistory(1, COLUMNS, CPU), 6, counted)
    asks = [LookupAsk(sequence_of(REPEATED, ngram_min=1, ngram_max=n), 6) for n in range(1, 25)]
    asks.append(LookupAsk(sequence_of(REPEATED, ngram_branches=MOST_BRANCHES + 1), 6))
    for ask in 2 * asks:
        [found] = lookup.lookups([ask])
        assert contents(found) == contents(NgramDrafter().matches(*ask[:2]))
    assert [options["ngram_max"] for options in counted.lookups] == 2 * list(range(1, MOST_KERNELS + 1))


def test_large_merges_are_made_on_the_host() -> None:
    counted = Counted()
    lookup = DeviceLookup(DeviceHistory(2, COLUMNS, CPU), 256, counted)
    match = Match(np.array([4, 5, 1], np.int32), 3)
    asks = [MergeAsk(n, sequence_of(REPEATED, ngram_branches=2 + n), 6, [match], CHAIN, 4) for n in range(2)]
    assert [nodes(tree) for tree in lookup.merges(asks)] == [nodes(tree) for tree in NgramDrafter().merges(asks)]
    assert counted.merges == [(1, 2, 256)]


def test_only_what_is_new_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    history = DeviceHistory(2, COLUMNS, CPU)
    sent: list[int] = []
    from_numpy = torch.from_numpy

    def counting(array: np.ndarray) -> torch.Tensor:
        sent.append(len(array))
        return from_numpy(array)

    monkeypatch.setattr(torch, "from_numpy", counting)
    first, second = sequence_of(REPEATED), sequence_of([7] * 12)
    lengths = np.array([8, 12])
    assert history.send([(0, first), (1, second)], [lengths])[0].tolist() == [8, 12]
    assert history.tokens[0, :8].tolist() == REPEATED and history.tokens[1, :12].tolist() == [7] * 12
    first.append(9)
    history.send([(0, first), (1, second)], [lengths])
    assert history.tokens[0, :9].tolist() == [*REPEATED, 9]
    history.send([(0, first)], [lengths])
    # Moved: its new slot holds another one's tokens.
    history.send([(0, second)], [lengths])
    assert history.tokens[0, :12].tolist() == [7] * 12
    assert sent == [20 + 20 + 4, 4 + 4 + 4, 4, 12 + 12 + 4]


def test_a_new_user_of_a_slot_sees_nothing_of_the_last_one() -> None:
    lookup = DeviceLookup(DeviceHistory(1, COLUMNS, CPU), 6, reference)
    assert lookup.lookups([LookupAsk(sequence_of(REPEATED * 3), 6)])[0]
    assert lookup.lookups([LookupAsk(sequence_of([1, 2]), 6)]) == [[]]


def test_parts_of_a_transfer_are_aligned() -> None:
    arrays = [np.arange(5), np.arange(6).reshape(2, 3), np.zeros(0, np.int64), np.array(7)]
    shapes = [array.shape for array in arrays]
    packed = pack(arrays)
    assert (packed.dtype, len(packed)) == (np.dtype(np.int32), packed_size(shapes))
    parts = unpack(torch.from_numpy(packed), shapes)
    assert [part.tolist() for part in parts] == [array.tolist() for array in arrays]
    assert all(part.storage_offset() % 4 == 0 and part.is_contiguous() for part in parts)


CHAIN = DraftTree.chain(np.array([4, 8], np.int32), EAGLE)


def test_one_launch_merges_the_drafts_of_a_batch() -> None:
    counted = Counted()
    lookup = DeviceLookup(DeviceHistory(3, COLUMNS, CPU), 6, counted)
    match = Match(np.array([4, 5, 1], np.int32), 3)
    asks = [
        MergeAsk(0, sequence_of(REPEATED), 6, [match], CHAIN, 4),
        MergeAsk(1, sequence_of(REPEATED), 6, [], CHAIN, 4),
        MergeAsk(2, sequence_of(REPEATED), 6, [match], EMPTY, 4),
        MergeAsk(3, sequence_of(REPEATED), 6, [match], CHAIN, 2),
    ]
    trees = lookup.merges(asks)
    assert counted.merges == [(2, 1, 6)]
    assert trees[1] is CHAIN
    assert [nodes(tree) for tree in trees] == [nodes(tree) for tree in NgramDrafter().merges(asks)]
    assert lookup.merges(asks[1:3])[0] is CHAIN
    assert lookup.merges([]) == []
    assert len(counted.merges) == 1


def test_one_run_of_the_engine_looks_up_and_merges() -> None:
    shared, counted = SharedEngine(built(6)), Counted()
    history = DeviceHistory(3, COLUMNS, CPU)
    lookup = ProposalLookup(shared, built(6), history, DeviceLookup(history, 6, counted))
    other = sequence_of(REPEATED, ngram_min=1)
    asks = [LookupAsk(sequence_of(REPEATED), 6, merged=True), LookupAsk(other, 6, merged=True)]
    first, second = lookup.lookups(asks)
    assert (shared.runs, len(counted.lookups), first) == (0, 1, [])
    merge_asks = [MergeAsk(0, asks[0].sequence, 6, first, CHAIN, 6), MergeAsk(1, other, 6, second, CHAIN, 6)]
    trees = lookup.merges(merge_asks)
    assert (shared.runs, len(counted.merges)) == (1, 1)
    assert nodes(trees[0]) == nodes(trees[1])
    assert trees[0].tokens.tolist() == [4, 5, 1, 2, 3, 8]


def test_the_engine_and_the_rest_are_closed() -> None:
    closed: list[object] = []

    class Closing(NgramDrafter):
        def close(self) -> None:
            closed.append(self)

    class ClosingEngine(SharedEngine):
        def close(self) -> None:
            closed.append(self)

    others, own = Closing(), ClosingEngine(built(6))
    ProposalLookup(own, built(6), DeviceHistory(1, COLUMNS, CPU), others).close()
    assert closed == [own, others]
