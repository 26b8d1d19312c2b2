"""One runtime's files: a graph per part, written for ONNX Runtime or compiled for TensorRT's runtimes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from trtspec.engine.tensorrt_build import BuildConfig, Profile, build_engine
from trtspec.engine_dir import RuntimeRecord
from trtspec.tensors import GraphSpec

Progress = Callable[[str, float], None]
ONNXRUNTIME, TENSORRT = "onnxruntime", "tensorrt"


@dataclass(frozen=True)
class Part:
    """A graph that is to become an engine, under the name that its declaration has."""

    spec: GraphSpec
    profiles: tuple[Profile, ...]
    """The sizes that it is compiled for; ONNX Runtime needs none."""
    graph: Callable[[], ir.Model]
    """Makes it; weight files relative to the engine directory."""


def build_runtime(
    runtime: str,
    parts: Iterable[Part],
    dtype: str,
    compute_capabilities: tuple[int, ...],
    directory: Path,
    report: Progress,
) -> RuntimeRecord:
    """Write or compile the parts into an engine directory.

    Raises:
        EngineError: a compiler failed.
    """
    if runtime == ONNXRUNTIME:
        files = {}
        for part in parts:
            files[part.spec.name] = f"{part.spec.name}.onnx"
            ir.save(part.graph(), directory / files[part.spec.name])
        return RuntimeRecord(files)
    (directory / runtime).mkdir()
    engines = {}
    for part in parts:
        engines[part.spec.name] = f"{runtime}/{part.spec.name}.engine"
        build_config = BuildConfig(dtype, compute_capabilities, part.profiles)
        _compile(runtime, part, build_config, directory, directory / engines[part.spec.name], report)
    return RuntimeRecord(engines, compute_capabilities)


def _compile(
    runtime: str, part: Part, build_config: BuildConfig, directory: Path, output: Path, report: Progress
) -> None:
    # Beside the weights that it points to; the compiled engine replaces it.
    onnx = directory / f"{runtime}-{part.spec.name}.onnx"
    ir.save(part.graph(), onnx)
    stage = f"{runtime} {part.spec.name}"
    # The compiler's own phase names are many and say little.
    build_engine(
        runtime, onnx, part.spec, build_config, output, progress=lambda phase, fraction: report(stage, fraction)
    )
    onnx.unlink()
