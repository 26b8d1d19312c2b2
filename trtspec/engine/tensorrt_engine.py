"""Runs TensorRT and TensorRT-RTX engines on CUDA tensors, with one CUDA graph per shape that comes back."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtspec.engine.base import TORCH_DTYPES, CacheView
from trtspec.engine.tensorrt_binding import Bucket, GraphCache, ProfileRanges, check_inputs, select_profile
from trtspec.engine.tensorrt_network import check_aliases, check_tensors, message
from trtspec.engine.tensorrt_package import cuda_problem, load_tensorrt, tensorrt_logger
from trtspec.errors import ConfigError, EngineError, TrtspecError
from trtspec.tensors import GraphSpec, TensorSpec


def usable(runtime: str) -> str | None:
    """Why engines of a runtime can't be run here (package, driver or device missing), or None if they can."""
    try:
        load_tensorrt(runtime)
    except TrtspecError as error:
        return str(error)
    return cuda_problem()


class BoundContext:
    """An execution context and what was last bound to it."""

    def __init__(self, context: Any, name: str, errors: Callable[[], list[str]]) -> None:
        self._context = context
        self._name = name
        self._errors = errors
        self._bucket: Bucket | None = None

    def select_profile(self, index: int, stream: int) -> None:
        """Choose the optimisation profile; once, before anything is bound."""
        self._require(self._context.set_optimization_profile_async(index, stream), f"select profile {index}")

    def is_bound(self, bucket: Bucket) -> bool:
        """Whether `bucket` was the last to be bound, so that nothing needs binding."""
        return bucket == self._bucket

    def bind(self, bucket: Bucket, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Set every dynamic input's shape and every tensor's address."""
        self._bucket = None
        for name, shape in shapes.items():
            self._require(self._context.set_input_shape(name, shape), f"take {name} of shape {shape}")
        for name, address in addresses.items():
            self._require(self._context.set_tensor_address(name, address), f"bind {name}")
        missing = self._context.infer_shapes()
        self._require(not missing, f"infer its shapes: {', '.join(missing)} not given")
        self._bucket = bucket

    def enqueue(self, stream: int) -> None:
        """Start one execution on a stream."""
        self._require(self._context.execute_async_v3(stream), "run")

    def _require(self, success: bool, what: str) -> None:
        if not success:
            raise EngineError(message(f"the engine of {self._name} could not {what}", self._errors()))


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    context: BoundContext
    """Holds the state that the graph's kernels read; must live as long as the graph."""


class TensorRTEngine:
    """One compiled graph; see `engine.base.Engine`. Used by one thread at a time.

    Inputs are copied into buffers of the engine's own, so that a captured graph finds them where it looks; inputs
    without a dynamic axis (a shared weight) and the KV cache are bound where they lie, and must stay there as long as
    they are in use.
    """

    def __init__(
        self,
        runtime: str,
        plan: Path,
        spec: GraphSpec,
        *,
        device: torch.device | None = None,
        stream: torch.cuda.Stream | None = None,
        max_graphs: int = 32,
    ) -> None:
        """Load a plan.

        Args:
            device: CUDA device with its index, as tensors name it; the current one by default.
            stream: the stream that the engine runs on, not the default stream; engines of a session may share one.
            max_graphs: how many CUDA graphs are kept, the least recently used goes first; 0 captures none.

        Raises:
            DependencyError: the runtime's package is not installed.
            ConfigError: there is no GPU here.
            EngineError: the plan can't be loaded, or isn't what `spec` says.
        """
        self._trt = load_tensorrt(runtime)
        problem = cuda_problem()
        if problem:
            raise ConfigError(f"{runtime} engines need a GPU ({problem}); use the runtime onnxruntime")
        self.spec = spec
        self.device = device if device is not None else torch.device("cuda", torch.cuda.current_device())
        self._logger = tensorrt_logger(runtime)
        self._stream = stream or torch.cuda.Stream(self.device)
        # TensorRT-RTX swaps kernels once it has specialised them for a shape; only its own capture waits for that.
        self._native_graphs = hasattr(self._trt, "CudaGraphStrategy")
        self._max_graphs = max_graphs
        self._graphs: GraphCache[_Captured] = GraphCache(max_graphs)
        self._contexts: dict[int, BoundContext] = {}
        with torch.cuda.device(self.device):
            self._engine = self._load(plan)
            self._check_plan(plan)
            self._allocate()

    def run(self, inputs: Mapping[str, torch.Tensor], cache: CacheView | None = None) -> dict[str, torch.Tensor]:
        """Run once; see `engine.base.Engine.run`.

        Work is ordered after the caller's current stream, and the caller's stream after it; nothing waits on the host.
        """
        sizes = check_inputs(self.spec.name, (*self._copied, *self._fixed), inputs, self.device)
        self._check_cache(cache, sizes)
        bucket = self._bucket(sizes, inputs, cache)
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            for tensor in self._copied:
                self._view(tensor, sizes).copy_(inputs[tensor.name], non_blocking=True)
            self._execute(bucket, sizes, inputs, cache)
        caller.wait_stream(self._stream)
        return {tensor.name: self._view(tensor, sizes) for tensor in self._outputs}

    def close(self) -> None:
        """Free the engine's memory; nothing may be run afterwards."""
        self._stream.synchronize()
        for captured in self._graphs.clear():
            captured.graph.reset()
        self._contexts.clear()
        self._buffers.clear()
        # TensorRT wants its objects destroyed in this order: contexts, engine, runtime.
        del self._scratch, self._engine, self._runtime

    def _load(self, plan: Path) -> Any:
        self._logger.take_errors()
        self._runtime = self._trt.Runtime(self._logger)
        try:
            with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                engine = self._runtime.deserialize_cuda_engine(data)
        except (OSError, ValueError) as error:
            raise EngineError(f"could not read the engine {plan}: {error}") from error
        if engine is None:
            what = f"could not load {plan}; rebuild it with the version installed here ({self._trt.__version__})"
            raise EngineError(message(what, self._logger.take_errors()))
        return engine

    def _check_plan(self, plan: Path) -> None:
        """Raise EngineError where the plan's tensors aren't those of the declaration."""
        engine, trt = self._engine, self._trt
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        for mode, kind, declared in (
            (trt.TensorIOMode.INPUT, "input", self.spec.inputs),
            (trt.TensorIOMode.OUTPUT, "output", self.spec.outputs),
        ):
            found = {
                name: (engine.get_tensor_dtype(name), tuple(engine.get_tensor_shape(name)))
                for name in names
                if engine.get_tensor_mode(name) == mode
            }
            check_tensors(f"{plan}: {kind}", declared, found)
        outputs = [tensor.name for tensor in self.spec.outputs]
        check_aliases(str(plan), self.spec, {name: engine.get_aliased_input_tensor(name) for name in outputs})
        for name in names:
            if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
                raise EngineError(f"{plan}: {name} is wanted in host memory; rebuild the graph")

    def _allocate(self) -> None:
        """Sort the tensors (copied into buffers, bound where they lie, KV cache), and make the buffers."""
        cached = set(self.spec.aliases.values())
        plain = [tensor for tensor in self.spec.inputs if tensor.name not in cached]
        self._cached = [tensor for tensor in self.spec.inputs if tensor.name in cached]
        self._copied = [tensor for tensor in plain if _is_dynamic(tensor)]
        self._fixed = [tensor for tensor in plain if not _is_dynamic(tensor)]
        self._outputs = [tensor for tensor in self.spec.outputs if tensor.name not in self.spec.aliases]
        self._ranges = self._profile_ranges()
        self._buffers = {tensor.name: self._buffer(tensor) for tensor in (*self._copied, *self._outputs)}
        # Contexts run one after another on one stream, so they share their scratch memory.
        scratch_bytes = int(self._engine.device_memory_size_v2)
        self._scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=self.device)

    def _profile_ranges(self) -> Sequence[ProfileRanges]:
        """The sizes that each profile of the plan admits."""
        result = []
        for profile in range(self._engine.num_optimization_profiles):
            ranges: dict[str, tuple[int, int]] = {}
            for tensor in (*self._copied, *self._cached):
                low, _, high = self._engine.get_tensor_profile_shape(tensor.name, profile)
                for index, axis in enumerate(tensor.axes):
                    if isinstance(axis, str):
                        ranges[axis] = (low[index], high[index])
            result.append(ranges)
        return result

    def _buffer(self, tensor: TensorSpec) -> torch.Tensor:
        """Room for the largest shape that a profile admits, `[elements]`."""
        largest = ({axis: high for axis, (_, high) in ranges.items()} for ranges in self._ranges)
        elements = max(math.prod(tensor.shape(sizes)) for sizes in largest)
        return torch.empty(elements, dtype=TORCH_DTYPES[tensor.dtype], device=self.device)

    def _view(self, tensor: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor:
        """The front of a tensor's buffer in its present shape; the address is the same for every shape."""
        shape = tensor.shape(sizes)
        return self._buffers[tensor.name][: math.prod(shape)].view(shape)

    def _check_cache(self, cache: CacheView | None, sizes: Mapping[str, int]) -> None:
        if (cache is None) == bool(self._cached):
            raise EngineError(f"{self.spec.name} {'needs a' if self._cached else 'has no'} KV cache")
        if cache is not None and cache.key[1] != sizes["batch"]:
            raise EngineError(f"{self.spec.name}: the KV cache view has {cache.key[1]} slots, batch {sizes['batch']}")

    def _bucket(self, sizes: Mapping[str, int], inputs: Mapping[str, torch.Tensor], cache: CacheView | None) -> Bucket:
        # One address stands for the whole cache: a key means one memory, unless the cache was allocated anew.
        bound = tuple(inputs[tensor.name].data_ptr() for tensor in self._fixed)
        if cache is not None:
            bound = (*bound, *cache.key, cache.tensors[self._cached[0].name].data_ptr())
        return Bucket(select_profile(self.spec.name, self._ranges, sizes), tuple(sorted(sizes.items())), bound)

    def _execute(
        self,
        bucket: Bucket,
        sizes: Mapping[str, int],
        inputs: Mapping[str, torch.Tensor],
        cache: CacheView | None,
    ) -> None:
        captured = self._graphs.get(bucket)
        if captured is not None:
            captured.graph.replay()
            return
        capture = not self._native_graphs and self._graphs.comes_back(bucket)
        context = self._new_context(bucket.profile) if capture else self._context(bucket.profile)
        if not context.is_bound(bucket):
            shapes, addresses = self._bindings(sizes, inputs, cache)
            context.bind(bucket, shapes, addresses)
        # Also before a capture: TensorRT does work after a change of shape that can't be captured.
        context.enqueue(self._stream.cuda_stream)
        if capture:
            self._capture(bucket, context)

    def _capture(self, bucket: Bucket, context: BoundContext) -> None:
        """Keep the bucket's execution as a CUDA graph; recording doesn't execute it."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                context.enqueue(self._stream.cuda_stream)
        except (RuntimeError, EngineError) as error:
            raise EngineError(
                f"could not capture {self.spec.name} as a CUDA graph (max_graphs=0 does without): {error}"
            ) from error
        evicted = self._graphs.put(bucket, _Captured(graph, context))
        if evicted is not None:
            self._stream.synchronize()
            evicted.graph.reset()

    def _bindings(
        self, sizes: Mapping[str, int], inputs: Mapping[str, torch.Tensor], cache: CacheView | None
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """(shape of every dynamic input, address of every tensor); an alias has its input's address."""
        addresses = {name: buffer.data_ptr() for name, buffer in self._buffers.items()}
        addresses.update((tensor.name, inputs[tensor.name].data_ptr()) for tensor in self._fixed)
        if cache is not None:
            cache_sizes = check_inputs(self.spec.name, self._cached, cache.tensors, self.device)
            if cache_sizes["batch"] != sizes["batch"]:
                raise EngineError(
                    f"{self.spec.name}: the KV cache has batch {cache_sizes['batch']}, not {sizes['batch']}"
                )
            addresses.update((tensor.name, cache.tensors[tensor.name].data_ptr()) for tensor in self._cached)
            addresses.update((output, addresses[source]) for output, source in self.spec.aliases.items())
        shapes = {tensor.name: tensor.shape(sizes) for tensor in (*self._copied, *self._cached)}
        return shapes, addresses

    def _context(self, profile: int) -> BoundContext:
        """The context that runs a profile without a graph."""
        if profile not in self._contexts:
            self._contexts[profile] = self._new_context(profile)
        return self._contexts[profile]

    def _new_context(self, profile: int) -> BoundContext:
        trt = self._trt
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._native_graphs:
            options = self._engine.create_runtime_config()
            options.set_execution_context_allocation_strategy(strategy)
            graphs = trt.CudaGraphStrategy
            options.cuda_graph_strategy = graphs.WHOLE_GRAPH_CAPTURE if self._max_graphs else graphs.DISABLED
            context = self._engine.create_execution_context(options)
        else:
            context = self._engine.create_execution_context(strategy)
        if context is None:
            raise EngineError(message(f"no execution context for {self.spec.name}", self._logger.take_errors()))
        if self._scratch.numel():
            context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        result = BoundContext(context, self.spec.name, self._logger.take_errors)
        result.select_profile(profile, self._stream.cuda_stream)
        return result


def _is_dynamic(tensor: TensorSpec) -> bool:
    return any(isinstance(axis, str) for axis in tensor.axes)
