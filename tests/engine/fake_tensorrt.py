"""Stands in for TensorRT's runtime and CUDA on a machine without a GPU, and records what it was asked to do.

Its one graph is: hidden_states = 2 * inputs_embeds; every KV cache gets the call's number in its first element.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import types
from enum import Enum

import torch

from trtspec.engine.tensorrt_build import Profile
from trtspec.graph.proposal import ProposalConfig
from trtspec.plugins import reference
from trtspec.tensors import HIDDEN_STATES, INPUTS_EMBEDS, GraphSpec


class DataType(Enum):
    FLOAT, INT64, BOOL, INT32 = range(4)


DTYPES = {"float32": DataType.FLOAT, "int64": DataType.INT64, "bool": DataType.BOOL, "int32": DataType.INT32}


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory: tuple[int, int] | None = None
        self.profile: int | None = None

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = (address, size)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address
        self.addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        spec = self.engine.spec
        return [t.name for t in spec.inputs if t.name not in self.shapes and any(isinstance(a, str) for a in t.axes)]

    def execute_async_v3(self, stream: int) -> bool:
        self.engine.calls.append(self)
        if not self.engine.capturing:
            self.execute()
        return self.engine.succeeds

    def execute(self) -> None:
        spec = self.engine.spec
        self.engine.executions += 1
        assert self.addresses.keys() == {t.name for t in (*spec.inputs, *spec.outputs)}
        elements = torch.Size(self.shapes[INPUTS_EMBEDS]).numel()
        memory = ctypes.c_float * elements
        source = memory.from_address(self.addresses[INPUTS_EMBEDS])
        destination = memory.from_address(self.addresses[HIDDEN_STATES])
        for index in range(elements):
            destination[index] = 2 * source[index]
        for output, past in spec.aliases.items():
            assert self.addresses[output] == self.addresses[past]
            ctypes.c_float.from_address(self.addresses[output]).value = self.engine.executions


class ProposalContext(FakeContext):
    """The proposal graph instead, by the reference of its operations."""

    def execute(self) -> None:
        engine = self.engine
        engine.executions += 1
        [batch] = {shape[0] for shape in self.shapes.values()}
        memory = {name: self._memory(tensor.shape({"batch": batch}), name) for name, tensor in engine.tensors.items()}
        inputs = [memory[tensor.name] for tensor in engine.spec.inputs]
        history, lengths, *eagle, room, limits = inputs
        assert engine.proposal is not None
        draft = reference.ngram_draft(history, lengths, **engine.proposal.lookup.attributes)
        counts = torch.minimum(draft.counts, limits)
        tree = reference.merge_drafts(draft.tokens, counts, *eagle, room, **engine.proposal.merge.attributes)
        for tensor, value in zip(engine.spec.outputs, (*tree, draft.match_lengths), strict=True):
            memory[tensor.name].copy_(value)

    def _memory(self, shape: tuple[int, ...], name: str) -> torch.Tensor:
        """What lies at a tensor's address, int32."""
        memory = (ctypes.c_int32 * math.prod(shape)).from_address(self.addresses[name])
        return torch.frombuffer(memory, dtype=torch.int32).view(shape)


class FakeEngine:
    device_memory_size_v2 = 4096

    def __init__(self, spec: GraphSpec, profiles: tuple[Profile, ...], proposal: ProposalConfig | None = None) -> None:
        """`proposal`: of the proposal graph, which is run instead."""
        self.spec = spec
        self.proposal = proposal
        self.profiles = profiles
        self.tensors = {t.name: t for t in (*spec.inputs, *spec.outputs)}
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(profiles)
        self.calls: list[FakeContext] = []
        self.contexts: list[FakeContext] = []
        self.capturing = False
        self.executions = 0
        self.succeeds = True

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name in {t.name for t in self.spec.inputs} else "OUTPUT"

    def get_tensor_dtype(self, name: str) -> DataType:
        return DTYPES[self.tensors[name].dtype]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(axis, str) else axis for axis in self.tensors[name].axes)

    def get_tensor_location(self, name: str) -> str:
        return "DEVICE"

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.spec.aliases.get(name)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        sizes = self.profiles[profile].sizes
        return [self.tensors[name].shape({axis: sizes[axis][bound] for axis in sizes}) for bound in range(3)]

    def create_execution_context(self, strategy: str) -> FakeContext:
        assert strategy == "USER_MANAGED"
        self.contexts.append(FakeContext(self) if self.proposal is None else ProposalContext(self))
        return self.contexts[-1]


class FakeParser:
    """Reads any graph as an empty network, and keeps what it was told before."""

    def __init__(self, network: object, logger: object) -> None:
        self.network = network
        self.flags: list[str] = []

    def set_flag(self, flag: str) -> None:
        self.flags.append(flag)

    def parse_from_file(self, path: str) -> bool:
        return True


def install_parser(monkeypatch, module_path: str, *, has_flags: bool = True) -> None:
    """Put a fake builder and parser in the place of TensorRT's; networks are what they were created with.

    Args:
        has_flags: whether the package knows plugins that are compiled ahead of time, and a parser that prefers them.
    """
    flags = {"ENABLE_PLUGIN_OVERRIDE": "plugins first"} if has_flags else {}
    creation = {"PREFER_AOT_PYTHON_PLUGINS": 2} if has_flags else {}
    fake = types.SimpleNamespace(
        Builder=lambda logger: types.SimpleNamespace(create_network=lambda flags: flags),
        NetworkDefinitionCreationFlag=types.SimpleNamespace(STRONGLY_TYPED=1, **creation),
        OnnxParserFlag=types.SimpleNamespace(**flags),
        OnnxParser=FakeParser,
    )
    monkeypatch.setattr(f"{module_path}.load_tensorrt", lambda runtime: fake)
    logger = types.SimpleNamespace(take_errors=list)
    monkeypatch.setattr(f"{module_path}.tensorrt_logger", lambda runtime: logger)


class FakeStream:
    cuda_stream = 7

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeGraph:
    def __init__(self) -> None:
        self.context: FakeContext | None = None
        self.was_reset = False

    def replay(self) -> None:
        assert self.context is not None and not self.was_reset
        self.context.execute()

    def reset(self) -> None:
        self.was_reset = True


def install(monkeypatch, engine: FakeEngine | None, module_path: str) -> list[FakeGraph]:
    """Put the fakes in the place of TensorRT and CUDA; returns the graphs that get captured."""
    graphs: list[FakeGraph] = []
    fake = types.SimpleNamespace(
        __version__="0.0",
        Runtime=lambda logger: types.SimpleNamespace(deserialize_cuda_engine=lambda data: engine),
        TensorIOMode=types.SimpleNamespace(INPUT="INPUT", OUTPUT="OUTPUT"),
        TensorLocation=types.SimpleNamespace(DEVICE="DEVICE"),
        ExecutionContextAllocationStrategy=types.SimpleNamespace(USER_MANAGED="USER_MANAGED"),
    )

    @contextlib.contextmanager
    def capture(graph, stream, capture_error_mode):
        assert engine is not None
        engine.capturing = True
        yield
        engine.capturing = False
        graph.context = engine.calls[-1]
        graphs.append(graph)

    monkeypatch.setattr(f"{module_path}.load_tensorrt", lambda runtime: fake)
    monkeypatch.setattr(f"{module_path}.cuda_problem", lambda: None)
    errors = types.SimpleNamespace(take_errors=lambda: ["the reason"])
    monkeypatch.setattr(f"{module_path}.tensorrt_logger", lambda runtime: errors)
    for name, value in {
        "Stream": lambda device: FakeStream(),
        "current_stream": lambda device: FakeStream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "graph": capture,
        "CUDAGraph": FakeGraph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return graphs
