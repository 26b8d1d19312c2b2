"""Compiles a graph into a TensorRT or TensorRT-RTX engine; both offer the same builder, chosen in `load_tensorrt`."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch

from trtspec.engine.tensorrt_network import (
    ParsedNetwork,
    check_network,
    head_dim,
    layer_counts,
    message,
    parse_network,
)
from trtspec.engine.tensorrt_package import RUNTIMES, cuda_problem, load_tensorrt, tensorrt_logger
from trtspec.errors import ConfigError, EngineError
from trtspec.tensors import SERVING_DTYPES, GraphSpec

try:
    import resource
except ImportError:  # Windows, where TensorRT-RTX runs too
    resource = None  # type: ignore[assignment]

__all__ = [
    "RUNTIMES",
    "BuildConfig",
    "EngineInfo",
    "ParsedNetwork",
    "Profile",
    "batch_profiles",
    "build_engine",
    "check_network",
    "check_request",
    "layer_counts",
    "lm_head_profiles",
    "load_tensorrt",
    "parse_network",
    "target_profiles",
]

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Profile:
    """The sizes that an engine is compiled for: (min, opt, max) of each named axis."""

    name: str
    sizes: Mapping[str, tuple[int, int, int]]

    def __post_init__(self) -> None:
        for axis, (low, best, high) in self.sizes.items():
            if not 1 <= low <= best <= high:
                raise ConfigError(
                    f"profile {self.name}: axis {axis} has (min, opt, max) = ({low}, {best}, {high}); "
                    "expected 1 <= min <= opt <= max"
                )


@dataclass(frozen=True)
class BuildConfig:
    """What to compile for."""

    dtype: str
    compute_capabilities: tuple[int, ...]
    """TensorRT-RTX only: target GPUs such as (86, 89); empty lets the compiler choose (8.0 and newer)."""
    profiles: tuple[Profile, ...]
    workspace_bytes: int | None = None
    """Limit of the scratch memory per execution; None leaves TensorRT's own limit."""

    def __post_init__(self) -> None:
        if self.dtype not in SERVING_DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not one of {', '.join(SERVING_DTYPES)}")
        if not self.profiles:
            raise ConfigError("an engine needs at least one optimisation profile")
        if len(set(self.compute_capabilities)) != len(self.compute_capabilities):
            raise ConfigError(f"compute capabilities {self.compute_capabilities} name one twice")


@dataclass(frozen=True)
class EngineInfo:
    """What a build produced."""

    path: Path
    size_bytes: int
    seconds: float
    peak_rss_bytes: int | None
    """Highest resident memory of this process so far; None where the system doesn't tell."""
    runtime_version: str
    """An engine runs only with the version that built it."""


def target_profiles(max_batch: int, max_width: int, prefill_chunk: int, cache_rows: int) -> tuple[Profile, Profile]:
    """The target's two profiles: decode (many sequences, few rows each) and prefill (one sequence, many rows)."""
    for option, value in (("max_width", max_width), ("prefill_chunk", prefill_chunk)):
        if value > cache_rows:
            raise ConfigError(f"{option} {value} is more than the KV cache's {cache_rows} rows; lower it")
    live_len = _range(cache_rows)
    decode = {"batch": _range(max_batch), "width": _range(max_width), "live_len": live_len}
    prefill = {"batch": (1, 1, 1), "width": (1, prefill_chunk, prefill_chunk), "live_len": live_len}
    return Profile("decode", decode), Profile("prefill", prefill)


def lm_head_profiles(max_rows: int) -> tuple[Profile]:
    """The LM head's profile: 1 to `max_rows` rows."""
    return (Profile("rows", {"rows": _range(max_rows)}),)


def batch_profiles(max_batch: int) -> tuple[Profile]:
    """The profile of a graph whose only named axis is the batch: 1 to `max_batch` sequences."""
    return (Profile("batch", {"batch": _range(max_batch)}),)


def build_engine(
    runtime: str,
    onnx_path: Path,
    spec: GraphSpec,
    config: BuildConfig,
    output_path: Path,
    progress: Callable[[str, float], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> EngineInfo:
    """Compile a graph and write the engine; `output_path` appears only when it is complete.

    Args:
        progress: called in this thread with the compiler's phase and the fraction done.
        cancelled: asked in this thread every few milliseconds; true ends the build with an EngineError. An exception
            that reaches this thread, KeyboardInterrupt too, also stops the compiler and is raised after the clean-up.
            The compiler stops at its next step, which may take seconds.

    Raises:
        UserError: the request can't be compiled; found before the build starts.
        EngineError: the compiler failed, or the graph isn't what `spec` says.
    """
    check_request(runtime, spec, config)
    started = time.monotonic()
    parsed = parse_network(runtime, onnx_path, spec)
    check_network(parsed, spec)
    builder_config = _builder_config(parsed, spec, config)
    state = BuildState(progress, cancelled)
    monitor = _progress_monitor(parsed.tensorrt, state)
    builder_config.progress_monitor = monitor
    _compile(parsed, builder_config, spec, state, output_path)
    return EngineInfo(
        path=output_path,
        size_bytes=output_path.stat().st_size,
        seconds=time.monotonic() - started,
        peak_rss_bytes=_peak_rss_bytes(),
        runtime_version=str(parsed.tensorrt.__version__),
    )


def check_request(runtime: str, spec: GraphSpec, config: BuildConfig) -> None:
    """Raise UserError for what the runtime is known not to compile."""
    capabilities = _capabilities(runtime, config)
    if config.dtype == "bfloat16" and any(capability < 80 for capability in capabilities):
        raise ConfigError(f"bfloat16 needs compute capability 80 or newer, found {min(capabilities)}; use float16")
    if runtime == "tensorrt-rtx" and config.dtype == "float32" and any(capability < 80 for capability in capabilities):
        raise ConfigError(
            f"{runtime} multiplies no float32 matrices at compute capability {min(capabilities)}; use --dtype float16"
        )
    for tensor in spec.inputs:
        if tensor.dtype in SERVING_DTYPES and tensor.dtype != config.dtype:
            raise ConfigError(
                f"{spec.name} was exported in {tensor.dtype} and the engine is asked for in {config.dtype}; "
                "use one dtype for both"
            )
    dim = head_dim(spec)
    if dim is not None and dim % 8:
        raise ConfigError(f"head_dim {dim} is no multiple of 8, which {runtime} needs; use the runtime onnxruntime")


def _capabilities(runtime: str, config: BuildConfig) -> tuple[int, ...]:
    """The compute capabilities that the engine will be for; empty where the compiler chooses."""
    trt = load_tensorrt(runtime)
    if runtime == "tensorrt-rtx":
        known = sorted(int(name[2:]) for name in trt.ComputeCapability.__members__ if name.startswith("SM"))
        for capability in config.compute_capabilities:
            if capability not in known:
                raise ConfigError(
                    f"tensorrt-rtx {trt.__version__} builds for the compute capabilities "
                    f"{', '.join(map(str, known))}, not for {capability}; leave --compute-capability out for those "
                    "from 80 on, or build with --runtime tensorrt on that GPU"
                )
        return config.compute_capabilities
    if config.compute_capabilities:
        raise ConfigError(
            f"{runtime} compiles for the GPU it runs on; leave the compute capabilities out, "
            "or use the runtime tensorrt-rtx"
        )
    problem = cuda_problem()
    if problem:
        raise ConfigError(
            f"{runtime} builds only on the GPU that will run the engine ({problem}); build there, "
            "or use the runtime tensorrt-rtx, which builds without a GPU"
        )
    major, minor = torch.cuda.get_device_capability()
    return (10 * major + minor,)


class BuildState:
    """What the compiler's threads and the caller's thread tell each other."""

    def __init__(self, progress: Callable[[str, float], None] | None, cancelled: Callable[[], bool] | None) -> None:
        self.stop = threading.Event()
        self._progress = progress
        self._cancelled = cancelled
        self._lock = threading.Lock()
        self._phases: dict[str, _Phase] = {}
        self._latest: tuple[str, float] | None = None
        self._reported = 0.0

    def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
        """A phase begins, within one step of its parent."""
        with self._lock:
            self._phases[phase] = _Phase(parent, max(num_steps, 1))
            self._latest = (phase, self._fraction(phase))

    def step_complete(self, phase: str, step: int) -> bool:
        """A step of a phase is done; false asks the compiler to stop."""
        with self._lock:
            if phase in self._phases:
                self._phases[phase].num_done = step + 1
                self._latest = (phase, self._fraction(phase))
        return not self.stop.is_set()

    def phase_finish(self, phase: str) -> None:
        """A phase is over."""
        with self._lock:
            finished = self._phases.pop(phase, None)
            if finished is not None and finished.parent is None:
                self._latest = (phase, 1.0)

    def poll(self) -> None:
        """Report progress, and raise EngineError if the caller wants the build stopped."""
        with self._lock:
            latest, self._latest = self._latest, None
        if latest is not None and self._progress is not None:
            # Phases differ in how well they guess their own length; a bar must not run backwards.
            self._reported = max(self._reported, latest[1])
            self._progress(latest[0], self._reported)
        if self._cancelled is not None and self._cancelled():
            raise EngineError("the engine build was cancelled")

    def _fraction(self, name: str) -> float:
        """The share of the outermost phase that is done, seen from a phase inside it."""
        share = 0.0
        current: str | None = name
        while current is not None and current in self._phases:
            phase = self._phases[current]
            share = min(1.0, (phase.num_done + share) / phase.num_steps)
            current = phase.parent
        return share


@dataclass
class _Phase:
    parent: str | None
    num_steps: int
    num_done: int = 0


def _compile(parsed: ParsedNetwork, builder_config: Any, spec: GraphSpec, state: BuildState, output_path: Path) -> None:
    """Compile into a temporary file beside `output_path`, then rename it."""
    partial = output_path.with_name(f".{output_path.name}.{os.getpid()}.partial")
    trt_logger = tensorrt_logger(parsed.runtime)
    trt_logger.stopping = state.stop
    try:
        if not _supervise(lambda: _write_engine(parsed, builder_config, partial), state):
            raise EngineError(message(f"{parsed.runtime} could not build {spec.name}", parsed.errors()))
        partial.replace(output_path)
    finally:
        partial.unlink(missing_ok=True)
        trt_logger.stopping = threading.Event()


def _supervise(job: Callable[[], bool], state: BuildState) -> bool:
    """Run the compiler in another thread, so that this one can report, and be interrupted, at any time."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(job)
        try:
            while not concurrent.futures.wait([future], timeout=POLL_SECONDS).done:
                state.poll()
            state.poll()
            return future.result()
        except BaseException:
            state.stop.set()
            raise


def _write_engine(parsed: ParsedNetwork, builder_config: Any, path: Path) -> bool:
    """Compile into a file; false if the compiler gave up."""
    try:
        with path.open("wb") as file:
            if hasattr(parsed.builder, "build_serialized_network_to_stream"):
                writer = _stream_writer(parsed.tensorrt, file)
                built = parsed.builder.build_serialized_network_to_stream(parsed.network, builder_config, writer)
                if writer.error is not None:
                    raise writer.error
                return bool(built)
            plan = parsed.builder.build_serialized_network(parsed.network, builder_config)
            if plan is None:
                return False
            file.write(plan)
            return True
    except OSError as error:
        raise EngineError(f"could not write the engine to {path}: {error}") from error


def _stream_writer(trt: ModuleType, file: BinaryIO) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            # An exception must not cross the compiler's C++ frames.
            try:
                return file.write(data)
            except OSError as error:
                self.error = error
                return 0

    return Writer()


def _progress_monitor(trt: ModuleType, state: BuildState) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            state.phase_start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return state.step_complete(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            state.phase_finish(phase_name)

    return Monitor()


def _builder_config(parsed: ParsedNetwork, spec: GraphSpec, config: BuildConfig) -> Any:
    trt = parsed.tensorrt
    result = parsed.builder.create_builder_config()
    if config.dtype == "float32":
        # On by default, and not what somebody who asks for float32 expects: 10 bits of mantissa.
        result.clear_flag(trt.BuilderFlag.TF32)
    if config.workspace_bytes is not None:
        result.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, config.workspace_bytes)
    if config.compute_capabilities:
        result.num_compute_capabilities = len(config.compute_capabilities)
        for index, capability in enumerate(config.compute_capabilities):
            if not result.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), index):
                raise EngineError(message(f"{parsed.runtime} refused compute capability {capability}", parsed.errors()))
    for profile in config.profiles:
        result.add_optimization_profile(_optimization_profile(parsed, spec, profile))
    return result


def _optimization_profile(parsed: ParsedNetwork, spec: GraphSpec, profile: Profile) -> Any:
    result = parsed.builder.create_optimization_profile()
    for tensor in spec.inputs:
        named = [axis for axis in tensor.axes if isinstance(axis, str)]
        for axis in named:
            if axis not in profile.sizes:
                raise ConfigError(f"profile {profile.name} says nothing about axis {axis} of {spec.name}")
        if named:
            shapes = [tensor.shape({axis: profile.sizes[axis][bound] for axis in named}) for bound in range(3)]
            result.set_shape(tensor.name, *shapes)
    return result


def _range(high: int) -> tuple[int, int, int]:
    return (1, (1 + high) // 2, high)


def _peak_rss_bytes() -> int | None:
    if resource is None:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
