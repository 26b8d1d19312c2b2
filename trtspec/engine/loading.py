"""From an engine directory to a running target and its draft head."""

from __future__ import annotations

from pathlib import Path

import torch

from trtspec.checkpoint.draft_head import DraftHeadConfig
from trtspec.checkpoint.target import TargetConfig
from trtspec.config import HEAD_CHUNK, Limits
from trtspec.engine.base import TORCH_DTYPES, Buckets, Engine
from trtspec.engine.draft_head import DraftHeadRunner
from trtspec.engine.embedding import Embedding
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.onnxruntime_engine import OnnxRuntimeEngine, set_threads
from trtspec.engine.target import LmHead, Target, map_weight
from trtspec.engine.tensorrt_engine import TensorRTEngine, usable
from trtspec.engine_dir import EngineDir
from trtspec.errors import ConfigError, EngineDirError, UserError
from trtspec.graph.draft_head import draft_head_spec, fuse_spec
from trtspec.graph.draft_lm_head import draft_lm_head_spec
from trtspec.graph.proposal import ProposalConfig, proposal_spec
from trtspec.graph.target import lm_head_spec, target_spec
from trtspec.tensors import ITEM_SIZES, GraphSpec, WeightRef

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, HEAD_CHUNK)


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
        f"no runtime of {engine_dir.path} can be used here ({reasons}); take it to a machine that has what is "
        "missing, or build it with --runtime onnxruntime for the CPU"
    )


def load_target(engine_dir: EngineDir, runtime: str, config: TargetConfig) -> tuple[Target, torch.device]:
    """Load the target's engines and map its embedding table.

    Raises:
        EngineDirError: the directory's draft head is described in unknown terms.
        UserError: the KV caches do not fit the memory.
        EngineError: a runtime refuses its engine.
    """
    graphs = {name: engine_dir.path / file for name, file in engine_dir.runtimes[runtime].graphs.items()}
    head_config = draft_head_config(engine_dir)
    boundaries = head_config.boundaries if head_config else ()
    body_spec = target_spec(config, engine_dir.limits.cache_rows, engine_dir.dtype, boundaries)
    table = map_weight(engine_dir.path, engine_dir.embedding)
    on_cpu = runtime == "onnxruntime"
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    check_memory(engine_dir, config, head_config, device)
    lm_head = _load_engine(
        runtime, graphs["lm_head"], lm_head_spec(config, engine_dir.dtype, weight_as_input=not on_cpu)
    )
    body = _load_engine(runtime, graphs["target"], body_spec)
    if on_cpu:
        return Target(table, body, LmHead(lm_head)), device
    table = table.to(device)
    tied = engine_dir.lm_head == engine_dir.embedding
    weight = table if tied else map_weight(engine_dir.path, engine_dir.lm_head).to(device)
    return Target(table, body, LmHead(lm_head, weight), graph_buckets(engine_dir.limits)), device


def load_draft_head(engine_dir: EngineDir, runtime: str, target: Target) -> tuple[DraftHeadRunner, KVCache]:
    """Load the draft head's engines; what it shares with the target is not loaded again.

    Raises:
        EngineDirError: the directory has no draft head, or describes it in unknown terms.
        EngineError: a runtime refuses its engine.
    """
    config, record = draft_head_config(engine_dir), engine_dir.draft_head
    if config is None or record is None:
        raise EngineDirError(f"{engine_dir.path} has no draft head; build it again with --eagle HEAD")
    graphs = {name: engine_dir.path / file for name, file in engine_dir.runtimes[runtime].graphs.items()}
    limits, dtype, device = engine_dir.limits, engine_dir.dtype, target.embedding.table.device
    on_cpu = runtime == "onnxruntime"

    def load(ref: WeightRef | None) -> torch.Tensor | None:
        return None if ref is None else map_weight(engine_dir.path, ref).to(device)

    own_table = load(record.embedding)
    owns_lm_head = record.lm_head != "target"
    lm_head = target.lm_head
    if owns_lm_head:
        weight = None if on_cpu else load(record.lm_head_weight)
        spec = draft_lm_head_spec(config, dtype, weight_as_input=weight is not None)
        lm_head = LmHead(_load_engine(runtime, graphs["draft_lm_head"], spec), weight)
    body = _load_engine(runtime, graphs["draft_head"], draft_head_spec(config, limits.head_cache_rows, dtype))
    runner = DraftHeadRunner(
        config,
        target.embedding if own_table is None else Embedding(own_table),
        body,
        lm_head,
        fuse=_load_engine(runtime, graphs["fuse"], fuse_spec(config, dtype)) if "fuse" in graphs else None,
        token_ids=load(record.token_ids),
        owns_lm_head=owns_lm_head,
        buckets=None if on_cpu else head_buckets(limits),
    )
    return runner, _head_cache(config, limits, dtype, device)


def load_proposal(engine_dir: EngineDir, runtime: str) -> tuple[Engine, ProposalConfig] | None:
    """Load the engine of the proposal graph; None where the directory has none for this runtime.

    Raises:
        EngineDirError: it is described in terms that this version doesn't know.
        EngineError: the runtime refuses its engine.
    """
    record = engine_dir.runtimes[runtime]
    if record.proposal is None:
        return None
    try:
        config = ProposalConfig.from_json(record.proposal)
    except (KeyError, TypeError, ConfigError) as error:
        raise EngineDirError(
            f"{engine_dir.path} describes its proposal graph in terms that this trtspec doesn't know ({error}); build "
            "it again"
        ) from None
    return _load_engine(runtime, engine_dir.path / record.graphs["proposal"], proposal_spec(config)), config


def draft_head_config(engine_dir: EngineDir) -> DraftHeadConfig | None:
    """The draft head's record, or None where the directory has none.

    Raises:
        EngineDirError: it is described in terms that this version doesn't know.
    """
    if engine_dir.draft_head is None:
        return None
    try:
        return DraftHeadConfig.from_json(engine_dir.draft_head.config)
    except (KeyError, TypeError, ConfigError) as error:
        raise EngineDirError(
            f"{engine_dir.path} describes its draft head in terms that this trtspec doesn't know ({error}); build it "
            "again"
        ) from None


def graph_buckets(limits: Limits) -> Buckets:
    """Widths and live lengths that CUDA graphs are captured for."""
    widths = [width for width in _WIDTHS if width < limits.max_width]
    return Buckets((*widths, limits.max_width), live_step=64, max_live=limits.cache_rows)


def head_buckets(limits: Limits) -> Buckets:
    """The same for a draft head's passes."""
    return Buckets(_WIDTHS, live_step=64, max_live=limits.head_cache_rows)


def check_memory(
    engine_dir: EngineDir, config: TargetConfig, head_config: DraftHeadConfig | None, device: torch.device
) -> None:
    """Raise UserError where weights and KV caches exceed the memory that is free."""
    limits, size = engine_dir.limits, ITEM_SIZES[engine_dir.dtype]
    cache = config.kv_bytes_per_token(size) * limits.cache_rows * limits.max_batch_size
    if head_config is not None:
        cache += head_config.kv_bytes_per_token(size) * limits.head_cache_rows * limits.max_batch_size
    weights = sum(record.size for name, record in engine_dir.files.items() if not name.startswith("tokenizer/"))
    free = _free_bytes(device)
    if cache + weights > free:
        raise UserError(
            f"{engine_dir.path} needs {weights / 1e9:.1f} GB for weights and {cache / 1e9:.1f} GB for the KV cache of "
            f"{limits.max_batch_size} sequences of {limits.max_seq_len} tokens; {free / 1e9:.1f} GB are free: build "
            "with a smaller --max-batch-size or --max-seq-len"
        )


def _load_engine(runtime: str, file: Path, spec: GraphSpec) -> Engine:
    return OnnxRuntimeEngine(file, spec) if runtime == "onnxruntime" else TensorRTEngine(runtime, file, spec)


def _head_cache(config: DraftHeadConfig, limits: Limits, dtype: str, device: torch.device) -> KVCache:
    return KVCache(
        num_layers=config.num_layers,
        slots=limits.max_batch_size,
        num_kv_heads=config.num_kv_heads,
        rows=limits.head_cache_rows,
        head_dim=config.head_dim,
        dtype=TORCH_DTYPES[dtype],
        device=device,
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
