"""ONNX Runtime on the CPU: sessions that read and write torch tensors where they lie."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from trtspec.engine.base import TORCH_DTYPES, CacheView
from trtspec.errors import ConfigError, EngineError
from trtspec.tensors import GraphSpec, TensorSpec

NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "int64": np.int64, "int32": np.int32, "bool": np.bool_}
_thread_lock = threading.Lock()
_process_threads: int | None = None


def set_threads(threads: int | None) -> int:
    """Fix the size of the one thread pool that all ONNX Runtime sessions of this process share.

    A pool per session would have their spinning threads fight for the cores. The first call decides; None keeps what
    was decided, or takes one thread per physical core.

    Raises:
        ConfigError: it is no positive number, or another number was fixed before in this process.
    """
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ConfigError(f"threads is {threads!r}; give an integer of at least 1")
    global _process_threads
    with _thread_lock:
        if _process_threads is None:
            _process_threads = threads or torch.get_num_threads()
            onnxruntime.set_global_thread_pool_sizes(_process_threads, 1)
        elif threads is not None and threads != _process_threads:
            raise ConfigError(
                f"this process runs ONNX Runtime on {_process_threads} threads already; {threads} needs a new process"
            )
        return _process_threads


class OnnxRuntimeEngine:
    """One graph in an ONNX Runtime session; see `engine.base.Engine`."""

    def __init__(self, model: Path, spec: GraphSpec) -> None:
        """Load `model` (its weights are read from the files it names).

        Raises:
            EngineError: ONNX Runtime refuses the graph.
        """
        self.spec = spec
        self.device = torch.device("cpu")
        set_threads(None)
        options = onnxruntime.SessionOptions()
        options.use_per_session_threads = False
        # Shapes change from step to step: planning memory by pattern would only keep stale plans.
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise EngineError(f"ONNX Runtime cannot load {model}: {error}") from error
        aliased = set(spec.aliases) | set(spec.aliases.values())
        self._inputs = [tensor for tensor in spec.inputs if tensor.name not in aliased]
        self._outputs = [tensor for tensor in spec.outputs if tensor.name not in aliased]
        self._output_axes = _axis_sources(self._inputs, self._outputs)
        self._bindings: dict[tuple[int, int] | None, _Binding] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def run(self, inputs: Mapping[str, torch.Tensor], cache: CacheView | None = None) -> dict[str, torch.Tensor]:
        """Run once; see `engine.base.Engine.run`."""
        binding = self._binding(cache)
        for tensor in self._inputs:
            binding.bind(binding.io.bind_input, tensor, inputs[tensor.name])
        sizes = {axis: inputs[name].shape[at] for axis, (name, at) in self._output_axes.items()}
        outputs = {}
        for tensor in self._outputs:
            outputs[tensor.name] = value = self._buffer(tensor, tensor.shape(sizes))
            binding.bind(binding.io.bind_output, tensor, value)
        try:
            self._session.run_with_iobinding(binding.io)
        except Exception as error:
            raise EngineError(f"ONNX Runtime failed in {self.spec.name}: {error}") from error
        return outputs

    def _buffer(self, tensor: TensorSpec, shape: tuple[int, ...]) -> torch.Tensor:
        """The start of this output's buffer, which grows to the largest size seen.

        New memory at every run would be mapped, zeroed and unmapped by the system: a third of a millisecond for the
        logits of nine rows.
        """
        size = math.prod(shape)
        buffer = self._buffers.get(tensor.name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[tensor.name] = torch.empty(size, dtype=TORCH_DTYPES[tensor.dtype])
        return buffer[:size].view(shape)

    def close(self) -> None:
        """Free the session's memory; the engine cannot be used afterwards."""
        self._bindings.clear()
        del self._session

    def _binding(self, cache: CacheView | None) -> _Binding:
        """The binding of a cache view; its many cache tensors are bound once, not at every step."""
        key = cache.key if cache else None
        if key not in self._bindings:
            binding = _Binding(self._session.io_binding())
            for present, past in self.spec.aliases.items():
                assert cache is not None, f"{self.spec.name} has a KV cache and was run without one"
                value = cache.tensors[past]
                binding.bind(binding.io.bind_input, _find(self.spec.inputs, past), value)
                binding.bind(binding.io.bind_output, _find(self.spec.outputs, present), value)
            self._bindings[key] = binding
        return self._bindings[key]


class _Binding:
    """An IOBinding that is told only what changed: in a step's cold caches each call into it costs microseconds."""

    def __init__(self, io: onnxruntime.IOBinding) -> None:
        self.io = io
        self._bound: dict[str, tuple[int, torch.Size]] = {}

    def bind(self, call: Callable[..., None], tensor: TensorSpec, value: torch.Tensor) -> None:
        """Bind a tensor's memory to an input or output, unless it is bound to it already."""
        place = (value.data_ptr(), value.shape)
        if self._bound.get(tensor.name) != place:
            call(tensor.name, "cpu", 0, NUMPY_DTYPES[tensor.dtype], value.shape, place[0])
            self._bound[tensor.name] = place


def _find(tensors: tuple[TensorSpec, ...], name: str) -> TensorSpec:
    return next(tensor for tensor in tensors if tensor.name == name)


def _axis_sources(inputs: list[TensorSpec], outputs: list[TensorSpec]) -> dict[str, tuple[str, int]]:
    """For each dynamic axis of the outputs, an input that has it and where."""
    needed = {axis for tensor in outputs for axis in tensor.axes if isinstance(axis, str)}
    sources = {
        axis: (tensor.name, at) for tensor in inputs for at, axis in enumerate(tensor.axes) if isinstance(axis, str)
    }
    return {axis: sources[axis] for axis in needed}
