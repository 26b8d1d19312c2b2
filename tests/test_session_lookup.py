"""Sessions whose lookups run on the device: the tokens are those of plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from draft.proposal_engines import SharedEngine

import trtspec
from trtspec.draft.device import DeviceHistory, DeviceLookup
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.proposal_lookup import ProposalLookup
from trtspec.plugins import reference
from trtspec.proposal_build import proposal_config

PROMPTS = ["one two three one two three one two", "a b c a b c a", "The cat sat. The cat"]
SAMPLING = trtspec.SamplingParams(max_new_tokens=60, ignore_eos=True)
NONE, NGRAM = (trtspec.SpeculationConfig(method=method) for method in ("none", "ngram"))
LATEST = dataclasses.replace(NGRAM, ngram_min=1, ngram_occurrence="latest", ngram_branches=2)


@pytest.fixture
def session(tiny_dir: Path) -> Iterator[trtspec.Session]:
    with trtspec.Session.open(tiny_dir) as opened:
        yield opened


def check(session: trtspec.Session) -> None:
    """All options give what `none` gives, and not because nothing is drafted."""
    drafted = 0
    for sampling in (SAMPLING, dataclasses.replace(SAMPLING, temperature=0.9, seed=3)):
        plain = session.generate(PROMPTS, sampling, NONE)
        for options in (NGRAM, LATEST):
            found = session.generate(PROMPTS, sampling, options)
            assert [each.token_ids for each in found] == [each.token_ids for each in plain]
            drafted += sum(each.stats.draft_tokens for each in found)
    assert drafted > 50


def test_a_cpu_session_looks_up_on_the_host(session: trtspec.Session) -> None:
    assert type(session._drafters.ngram) is NgramDrafter


def test_a_proposal_engine_in_a_session(session: trtspec.Session) -> None:
    limits = session.limits
    config = proposal_config("tensorrt", limits)
    assert config is not None
    history = DeviceHistory(limits.max_batch_size, limits.max_seq_len, torch.device("cpu"))
    engine, others = SharedEngine(config), DeviceLookup(history, limits.max_draft_tokens, reference)
    session._drafters.ngram = ProposalLookup(engine, config, history, others)
    check(session)
    assert engine.runs > 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
@pytest.mark.parametrize("runtime", ["tensorrt-rtx", "tensorrt"])
def test_a_gpu_session_looks_up_on_the_gpu(tiny_hf_dir: Path, tmp_path: Path, runtime: str) -> None:
    if find_spec(runtime.replace("-", "_")) is None or find_spec("triton") is None:
        pytest.skip(f"{runtime} and triton are not both installed")
    trtspec.build(tiny_hf_dir, tmp_path / "engines", runtimes=(runtime,), dtype="float16")
    with trtspec.Session.open(tmp_path / "engines", runtime=runtime) as session:
        kind = ProposalLookup if runtime == "tensorrt" else DeviceLookup
        assert isinstance(session._drafters.ngram, kind)
        check(session)
