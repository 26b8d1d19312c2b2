"""The proposal engine as TensorRT is told to run it: bindings, batch sizes and captured graphs, over a stand-in."""

from __future__ import annotations

from pathlib import Path

import fake_tensorrt
import pytest
import torch
from draft.lookup_stories import COLUMNS, Story, check_story

from trtspec.config import Limits, SpeculationConfig
from trtspec.draft.device import DeviceHistory
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.proposal_lookup import ProposalLookup
from trtspec.engine import tensorrt_engine
from trtspec.engine.tensorrt_build import batch_profiles
from trtspec.engine.tensorrt_engine import TensorRTEngine
from trtspec.graph.proposal import proposal_spec
from trtspec.proposal_build import proposal_config

LIMITS = Limits(COLUMNS, max_batch_size=3, max_draft_tokens=8)


def test_lookups_through_the_tensorrt_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = proposal_config("tensorrt", LIMITS)
    assert config is not None
    spec, plan = proposal_spec(config), tmp_path / "proposal.engine"
    plan.write_bytes(b"plan")
    fake = fake_tensorrt.FakeEngine(spec, batch_profiles(LIMITS.max_batch_size), config)
    graphs = fake_tensorrt.install(monkeypatch, fake, tensorrt_engine.__name__)

    def make(story: Story) -> ProposalLookup:
        history = DeviceHistory(story.slots, COLUMNS, torch.device("cpu"))
        engine = TensorRTEngine("tensorrt", plan, spec, device=torch.device("cpu"))
        return ProposalLookup(engine, config, history, NgramDrafter())

    for seed in range(6):
        check_story(Story(3, 8, [SpeculationConfig(method="ngram", ngram_tokens=1 + seed)], 12, seed), make)
    assert fake.executions > 60
    assert len(graphs) > 6
