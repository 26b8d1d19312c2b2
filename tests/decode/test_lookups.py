"""Serving with lookups on the device: the outputs are the target's, and the drafts those of the host's lookup.

The device is the CPU here: the proposal graph runs in ONNX Runtime, the operations in the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import pytest
import torch
from draft.lookup_stories import nodes
from draft.proposal_engines import SharedEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Request, ToyTarget, reference
from toy_cases import CAPACITY, Setting, batches, new_head, settings_of_a_server
from toy_server import Server, outcome

from trtspec.config import MERGES, Limits, SamplingParams, SpeculationConfig
from trtspec.draft.device import DeviceHistory, DeviceLookup
from trtspec.draft.lookup import Lookup
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.proposal_lookup import ProposalLookup
from trtspec.draft.proposer import Ask, Lap, Proposal
from trtspec.graph.proposal import ProposalConfig
from trtspec.plugins import reference as operations
from trtspec.proposal_build import proposal_config

LOOKUPS = ("kernels", "engine", "engine without kernels")
Nodes = tuple[list[int], list[int], list[int]]


def make_lookup(kind: str, limits: Limits, options: SpeculationConfig) -> tuple[Lookup, SharedEngine | None]:
    """A lookup on the device, and its engine, which is built for some options."""
    history = DeviceHistory(limits.max_batch_size, limits.max_seq_len, torch.device("cpu"))
    kernels = DeviceLookup(history, limits.max_draft_tokens, operations)
    config = proposal_config("tensorrt", limits)
    if kind == "kernels" or config is None:
        return kernels, None
    config = ProposalConfig(
        **{
            **vars(config),
            "ngram_min": options.ngram_min,
            "ngram_max": options.ngram_max,
            "ngram_branches": options.ngram_branches,
            "latest": options.ngram_occurrence == "latest",
            "size": limits.max_draft_tokens * options.ngram_branches,
        }
    )
    engine = SharedEngine(config)
    return ProposalLookup(engine, config, history, kernels if kind == "engine" else NgramDrafter()), engine


def serve(setting: Setting, batch: Seq[Request], lookup: Lookup) -> list[list[Nodes]]:
    """Serve requests, whose outputs must be the target's own; returns each step's drafts."""
    target, head, limits, _ = setting
    server = Server(target, limits, lookup, head, setting.policy())  # type: ignore[arg-type]
    drafts: list[list[Nodes]] = []
    propose = server.drafters.propose

    def watched(asks: Seq[Ask], lap: Lap) -> Proposal:
        proposal = propose(asks, lap)
        drafts.append([nodes(tree) for tree in proposal.trees])
        return proposal

    server.drafters.propose = watched  # type: ignore[method-assign]
    generations = [server.add(index, request) for index, request in enumerate(batch)]
    server.run()
    for generation, request in zip(generations, batch, strict=True):
        assert outcome(generation, server) == reference(target, request, CAPACITY)
    return drafts


@settings(max_examples=120, deadline=None)
@given(settings_of_a_server(), batches, st.sampled_from(LOOKUPS))
def test_lookups_on_the_device_change_no_output(setting: Setting, batch: list[Request], kind: str) -> None:
    serve(setting, batch, make_lookup(kind, setting.limits, batch[0].speculation)[0])


@settings(max_examples=120, deadline=None)
@given(settings_of_a_server(), batches, st.sampled_from(LOOKUPS))
def test_drafts_are_those_of_the_hosts_lookup(setting: Setting, batch: list[Request], kind: str) -> None:
    """With one branch, because the host's search may end before it has found more."""
    batch = [
        dataclasses.replace(request, speculation=dataclasses.replace(request.speculation, ngram_branches=1))
        for request in batch
    ]
    lookup, _ = make_lookup(kind, setting.limits, batch[0].speculation)
    assert serve(setting, batch, lookup) == serve(setting, batch, NgramDrafter())


PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)
METHODS = [
    SpeculationConfig(method="ngram"),
    *(SpeculationConfig(method="ngram-eagle", merge=merge, eagle_tokens=4, hybrid_ngram_min=3) for merge in MERGES),
]


@pytest.mark.parametrize("options", METHODS, ids=lambda options: f"{options.method} {options.merge}")
def test_the_engine_looks_up_once_a_step(options: SpeculationConfig) -> None:
    limits = Limits(max_seq_len=CAPACITY, max_batch_size=3, max_draft_tokens=12)
    target = ToyTarget(surprise=12)
    setting = Setting(target, new_head(target), limits, 1)
    batch = [Request((*PROMPT, n), SamplingParams(max_new_tokens=30), options) for n in range(5)]
    lookup, engine = make_lookup("engine", limits, options)
    drafts = serve(setting, batch, lookup)
    assert engine is not None
    assert 10 < engine.runs <= len(drafts)
    assert sum(bool(sources) for step in drafts for _, _, sources in step) > 10
