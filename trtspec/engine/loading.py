"""From an engine directory to a running target."""

from __future__ import annotations

from pathlib import Path

import torch

from trtspec.checkpoint.target import TargetConfig
from trtspec.config import Limits
from trtspec.engine.base import Buckets, Engine
from trtspec.engine.onnxruntime_engine import OnnxRuntimeEngine, set_threads
from trtspec.engine.target import Target, map_weight
from trtspec.engine.tensorrt_engine import TensorRTEngine, usable
from trtspec.engine_dir import EngineDir
from trtspec.errors import EngineDirError, UserError
from trtspec.graph.target import lm_head_spec, target_spec
from trtspec.tensors import ITEM_SIZES


def runtime_problem(runtime: str) -> str | None:
    """Why a runtime cannot be used on this machine, or None."""
    return None if runtime == "onnxruntime" else usable(runtime)


def choose_runtime(engine_dir: EngineDir, runtime: str | None, threads: int | None) -> str:
    """The runtime asked for, or the first of the directory's that is usable here (compiled ones first).

    Raises:
        UserError: it is not in the directory, or none is usable.
    """
    built = sorted(engine_dir.runtimes, key=("tensorrt", "tensorrt-rtx", "onnxruntime").index)
    if runtime is not None and runtime not in built:
        raise EngineDirError(
            f"{engine_dir.path} was built for {', '.join(built)}, not for {runtime}; build it with --runtime {runtime}"
        )
    problems = {}
    for name in [runtime] if runtime else built:
        problem = runtime_problem(name)
        if problem is None:
            if name == "onnxruntime":
                set_threads(threads)
            return name
        problems[name] = problem
    if runtime is not None and len(built) > 1:
        others = ", ".join(name for name in built if name != runtime)
        raise UserError(f"{runtime} can't be used here ({problems[runtime]}); this directory also holds {others}")
    reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    raise UserError(
        f"no runtime of {engine_dir.path} can be used here ({reasons}); build it with --runtime onnxruntime"
    )


def load_target(engine_dir: EngineDir, runtime: str, config: TargetConfig) -> tuple[Target, torch.device]:
    """Load the target's engines and map its embedding table.

    Raises:
        UserError: the KV cache does not fit the memory.
        EngineError: a runtime refuses its engine.
    """
    graphs = {name: engine_dir.path / file for name, file in engine_dir.runtimes[runtime].graphs.items()}
    body_spec = target_spec(config, engine_dir.limits.cache_rows, engine_dir.dtype)
    table = map_weight(engine_dir.path, engine_dir.embedding)
    if runtime == "onnxruntime":
        head_spec = lm_head_spec(config, engine_dir.dtype, weight_as_input=False)
        device = torch.device("cpu")
        check_memory(engine_dir, config, device)
        head: Engine = OnnxRuntimeEngine(graphs["lm_head"], head_spec)
        return Target(table, OnnxRuntimeEngine(graphs["target"], body_spec), head), device
    device = torch.device("cuda", torch.cuda.current_device())
    check_memory(engine_dir, config, device)
    head_spec = lm_head_spec(config, engine_dir.dtype, weight_as_input=True)
    table = table.to(device)
    tied = engine_dir.lm_head == engine_dir.embedding
    weight = table if tied else map_weight(engine_dir.path, engine_dir.lm_head).to(device)
    body = TensorRTEngine(runtime, graphs["target"], body_spec)
    lm_head = TensorRTEngine(runtime, graphs["lm_head"], head_spec)
    return Target(table, body, lm_head, weight, graph_buckets(engine_dir.limits)), device


def graph_buckets(limits: Limits) -> Buckets:
    """Widths and live lengths that CUDA graphs are captured for."""
    widths = [width for width in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if width < limits.max_width]
    return Buckets((*widths, limits.max_width), live_step=64, max_live=limits.cache_rows)


def check_memory(engine_dir: EngineDir, config: TargetConfig, device: torch.device) -> None:
    """Raise UserError where weights and KV cache exceed the memory that is free."""
    limits, size = engine_dir.limits, ITEM_SIZES[engine_dir.dtype]
    cache = config.kv_bytes_per_token(size) * limits.cache_rows * limits.max_batch_size
    weights = sum(record.size for name, record in engine_dir.files.items() if not name.startswith("tokenizer/"))
    free = _free_bytes(device)
    if cache + weights > free:
        raise UserError(
            f"{engine_dir.path} needs {weights / 1e9:.1f} GB for weights and {cache / 1e9:.1f} GB for the KV cache of "
            f"{limits.max_batch_size} sequences of {limits.max_seq_len} tokens; {free / 1e9:.1f} GB are free: build "
            "with a smaller --max-batch-size or --max-seq-len"
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
