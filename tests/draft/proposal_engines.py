"""Proposal graphs in ONNX Runtime, which runs the function bodies of the plugin's nodes."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
import torch

from trtspec.engine.base import CacheView
from trtspec.engine.onnxruntime_engine import OnnxRuntimeEngine
from trtspec.graph.proposal import ProposalConfig, proposal_graph, proposal_spec


@functools.cache
def _engine(config: ProposalConfig) -> OnnxRuntimeEngine:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "proposal.onnx"
        ir.save(proposal_graph(config), path)
        return OnnxRuntimeEngine(path, proposal_spec(config))


class SharedEngine:
    """An engine that outlives those that close it."""

    def __init__(self, config: ProposalConfig) -> None:
        self._engine = _engine(config)
        self.spec, self.device = self._engine.spec, self._engine.device
        self.runs = 0

    def run(self, inputs: Mapping[str, torch.Tensor], cache: CacheView | None = None) -> dict[str, torch.Tensor]:
        self.runs += 1
        assert cache is None
        assert {name: (value.dtype, value.is_contiguous()) for name, value in inputs.items()} == {
            tensor.name: (torch.int32, True) for tensor in self.spec.inputs
        }
        return self._engine.run(inputs)

    def close(self) -> None:
        pass
