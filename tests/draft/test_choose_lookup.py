"""Which lookup a session takes: from its device, the engine directory and the packages installed."""

from __future__ import annotations

import logging

import pytest
import torch
from draft.proposal_engines import SharedEngine

from trtspec.config import Limits
from trtspec.draft import choose_lookup as module
from trtspec.draft.choose_lookup import choose_lookup
from trtspec.draft.device import DeviceHistory, DeviceLookup
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.proposal_lookup import ProposalLookup
from trtspec.engine.base import Engine
from trtspec.graph.proposal import ProposalConfig
from trtspec.plugins.kernels import launch
from trtspec.proposal_build import proposal_config

LIMITS = Limits(60, max_batch_size=3, max_draft_tokens=8)
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the GPU that isn't here is the CPU's."""

    def history(slots: int, columns: int, device: torch.device) -> DeviceHistory:
        assert (slots, columns, device) == (3, 60, GPU)
        return DeviceHistory(slots, columns, torch.device("cpu"))

    monkeypatch.setattr(module, "DeviceHistory", history)


def with_triton(monkeypatch: pytest.MonkeyPatch, has_triton: bool) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: object() if has_triton else None)


def proposal() -> tuple[Engine, ProposalConfig]:
    config = proposal_config("tensorrt", LIMITS)
    assert config is not None
    return SharedEngine(config), config


def test_a_cpu_looks_up_on_the_host(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for has_triton in (True, False):
        with_triton(monkeypatch, has_triton)
        assert type(choose_lookup(torch.device("cpu"), LIMITS, None)) is NgramDrafter
    assert not caplog.records


def test_a_gpu_looks_up_with_the_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with_triton(monkeypatch, True)
    lookup = choose_lookup(GPU, LIMITS, None)
    assert isinstance(lookup, DeviceLookup)
    assert lookup._operations is launch
    assert lookup._size == LIMITS.max_draft_tokens
    assert not caplog.records


def test_a_proposal_engine_comes_first_and_the_kernels_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch, True)
    engine, config = proposal()
    lookup = choose_lookup(GPU, LIMITS, (engine, config))
    assert isinstance(lookup, ProposalLookup)
    assert lookup._engine is engine
    assert isinstance(lookup._others, DeviceLookup)
    assert lookup._others._history is lookup._history


@pytest.mark.parametrize("has_engine", [False, True])
def test_without_triton_the_host_looks_up_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_engine: bool
) -> None:
    with_triton(monkeypatch, False)
    lookup = choose_lookup(GPU, LIMITS, proposal() if has_engine else None)
    assert isinstance(lookup, ProposalLookup) == has_engine
    others = lookup._others if isinstance(lookup, ProposalLookup) else lookup
    assert isinstance(others, NgramDrafter)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "pip install 'trtspec[kernels]'" in record.message
