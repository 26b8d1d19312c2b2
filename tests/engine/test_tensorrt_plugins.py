"""Which plugins the ONNX parser is told to take."""

from __future__ import annotations

from pathlib import Path

import fake_tensorrt
import pytest

from trtspec import tensors
from trtspec.engine import tensorrt_network
from trtspec.engine.tensorrt_network import ParsedNetwork, parse_network

SPEC = tensors.proposal_spec(max_len=8, branches=1, eagle_nodes=1, size=1)
STRONGLY_TYPED, PREFER_AOT = 1 << 1, 1 << 2


def parse(monkeypatch: pytest.MonkeyPatch, runtime: str, *, has_flags: bool = True) -> ParsedNetwork:
    fake_tensorrt.install_parser(monkeypatch, tensorrt_network.__name__, has_flags=has_flags)
    return parse_network(runtime, Path("proposal.onnx"), SPEC)


def test_tensorrt_prefers_plugins_that_were_compiled_ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = parse(monkeypatch, "tensorrt")
    assert parsed.network == STRONGLY_TYPED | PREFER_AOT
    assert parsed.parser.flags == ["plugins first"]


def test_tensorrt_rtx_takes_no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = parse(monkeypatch, "tensorrt-rtx")
    assert parsed.network == STRONGLY_TYPED
    assert parsed.parser.flags == []


def test_older_tensorrt_has_no_such_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = parse(monkeypatch, "tensorrt", has_flags=False)
    assert parsed.network == STRONGLY_TYPED
    assert parsed.parser.flags == []
