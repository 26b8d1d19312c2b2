"""From a checkpoint to an engine directory."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx_ir as ir

from trtspec.checkpoint.convert import place_weights, usable_in_place, written_bytes
from trtspec.checkpoint.source import DEMO, Checkpoint, check_weights, open_checkpoint
from trtspec.checkpoint.target import EMBEDDING, LM_HEAD, TargetConfig
from trtspec.config import RUNTIMES, Limits
from trtspec.engine.tensorrt_build import BuildConfig, build_engine, check_request, lm_head_profiles, target_profiles
from trtspec.engine_dir import TOKENIZER_DIR, WEIGHTS_DIR, EngineDir, RuntimeRecord, TargetRecord, record_files
from trtspec.errors import ConfigError, UserError
from trtspec.graph.target import lm_head_graph, lm_head_spec, target_graph, target_spec
from trtspec.staging import check_output, staged_directory
from trtspec.tensors import ITEM_SIZES, SERVING_DTYPES, WeightRef

logger = logging.getLogger(__name__)

DEFAULT_MAX_SEQ_LEN = 4096
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class BuildPlan:
    """What a build will do: everything decided, nothing written."""

    checkpoint: Checkpoint
    config: TargetConfig
    limits: Limits
    runtimes: tuple[str, ...]
    compute_capabilities: tuple[int, ...]
    dtype: str
    warnings: tuple[str, ...]

    @property
    def in_place(self) -> bool:
        """Whether the weights are linked from the checkpoint rather than written."""
        return usable_in_place(self.checkpoint.tensors, self.config.weight_shapes(), self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in the serving dtype."""
        return written_bytes(self.config.weight_shapes(), self.dtype)

    @property
    def kv_bytes_per_sequence(self) -> int:
        """Bytes of one KV cache slot."""
        return self.config.kv_bytes_per_token(ITEM_SIZES[self.dtype]) * self.limits.cache_rows

    @property
    def disk_bytes(self) -> int:
        """Estimated size of the engine directory, linked weights not counted."""
        engines = sum(name != "onnxruntime" for name in self.runtimes) * self.weight_bytes
        return engines + (0 if self.in_place else self.weight_bytes)


def plan_build(
    target: str | Path,
    *,
    runtimes: Sequence[str] = ("onnxruntime",),
    dtype: str | None = None,
    max_seq_len: int | None = None,
    max_batch_size: int = 8,
    max_draft_tokens: int = 32,
    compute_capabilities: Sequence[int] = (),
) -> BuildPlan:
    """Open the target and settle every choice; see `build` for the arguments."""
    checkpoint = open_checkpoint(str(target))
    config = TargetConfig.from_hf(checkpoint.hf_config, checkpoint.generation_config)
    warnings = check_weights(config, checkpoint.tensors)
    runtimes = tuple(dict.fromkeys(runtimes))
    if not runtimes or set(runtimes) - set(RUNTIMES):
        raise ConfigError(f"runtimes {', '.join(runtimes) or 'none'}: choose from {', '.join(RUNTIMES)}")
    length = min(config.max_position_embeddings, DEFAULT_MAX_SEQ_LEN) if max_seq_len is None else max_seq_len
    limits = Limits(length, max_batch_size, max_draft_tokens, prefill_chunk=min(256, length))
    _check_context(config, limits)
    plan = BuildPlan(
        checkpoint,
        config,
        limits,
        runtimes,
        tuple(compute_capabilities),
        _choose_dtype(dtype, runtimes, checkpoint),
        tuple(warnings),
    )
    if plan.compute_capabilities and "tensorrt-rtx" not in runtimes:
        raise ConfigError("--compute-capability is for --runtime tensorrt-rtx, which was not asked for")
    spec = target_spec(config, limits.cache_rows, plan.dtype)
    for runtime in runtimes:
        if runtime != "onnxruntime":
            check_request(runtime, spec, _target_build(plan, runtime))
    return plan


def build(
    target: str | Path,
    output: str | Path,
    eagle: str | Path | None = None,
    runtimes: Sequence[str] = ("onnxruntime",),
    *,
    dtype: str | None = None,
    max_seq_len: int | None = None,
    max_batch_size: int = 8,
    max_draft_tokens: int = 32,
    compute_capabilities: Sequence[int] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> EngineDir:
    """Build an engine directory; it appears at `output` complete or not at all.

    Args:
        target: a Hugging Face directory, a hub id, a .gguf file, or "demo".
        eagle: reserved for a draft head; only None yet.
        runtimes: any of config.RUNTIMES.
        dtype: float32, float16 or bfloat16; None: float32 with onnxruntime, else the checkpoint's own.
        max_seq_len: tokens of prompt and output together; None: the model's, at most 4096.
        max_batch_size: sequences decoded at once.
        max_draft_tokens: draft tree nodes of one sequence, without the root.
        compute_capabilities: GPUs that tensorrt-rtx compiles for, such as 89; empty: 8.0 and newer.
        force: replace a non-empty `output`.
        progress: called with a stage and the fraction of it that is done.

    Raises:
        UserError: the target, an option or `output` cannot be used.
        EngineError: a compiler failed.
    """
    if eagle is not None:
        raise ConfigError("EAGLE draft heads can't be built in yet; leave eagle out and draft with method ngram")
    if isinstance(runtimes, str):
        raise ConfigError(f"runtimes is the string {runtimes!r}; give a tuple such as ({runtimes!r},)")
    check_build_output(target, Path(output), force=force)
    plan = plan_build(
        target,
        runtimes=runtimes,
        dtype=dtype,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        max_draft_tokens=max_draft_tokens,
        compute_capabilities=compute_capabilities,
    )
    return run_plan(plan, Path(output), force=force, progress=progress)


def check_build_output(target: str | Path, output: Path, *, force: bool) -> None:
    """Raise UserError where a build of `target` must not write to `output`."""
    source = Path(target).expanduser()
    is_path = str(target) != DEMO and source.exists()
    check_output(output, force=force, source=source if is_path else None)


def run_plan(plan: BuildPlan, output: Path, *, force: bool = False, progress: Progress | None = None) -> EngineDir:
    """Carry a plan out; see `build`."""
    report = progress or (lambda stage, fraction: None)
    for warning in plan.warnings:
        logger.warning("%s", warning)
    _check_disk(plan, output)
    with staged_directory(output, force=force) as staging:
        report("weights", 0.0)
        weights = _place(plan, staging)
        report("graphs", 0.0)
        runtimes = {runtime: _build_runtime(plan, runtime, weights, staging, report) for runtime in plan.runtimes}
        if "onnxruntime" not in plan.runtimes:
            _drop_compiled_weights(staging, weights)
        report("tokenizer", 0.0)
        plan.checkpoint.save_tokenizer(staging / TOKENIZER_DIR)
        report("checksums", 0.0)
        _describe(plan, staging, weights, runtimes).write_manifest()
    report("done", 1.0)
    return EngineDir.load(output)


def _place(plan: BuildPlan, staging: Path) -> dict[str, WeightRef]:
    """Weights of the parts that every runtime shares, and those of the body, which TensorRT engines swallow."""
    shapes, source = plan.config.weight_shapes(), plan.checkpoint.tensors
    if plan.in_place:
        return place_weights(source, shapes, staging, WEIGHTS_DIR, "", plan.dtype)
    shared = {name: shape for name, shape in shapes.items() if name in (EMBEDDING, LM_HEAD)}
    body = {name: shape for name, shape in shapes.items() if name not in shared}
    return {
        **place_weights(source, shared, staging, WEIGHTS_DIR, "embedding.safetensors", plan.dtype),
        **place_weights(source, body, staging, WEIGHTS_DIR, "body.safetensors", plan.dtype),
    }


def _build_runtime(
    plan: BuildPlan, runtime: str, weights: dict[str, WeightRef], staging: Path, report: Progress
) -> RuntimeRecord:
    on_cpu = runtime == "onnxruntime"
    graphs = {
        "target": target_graph(plan.config, weights, staging, cache_rows=plan.limits.cache_rows, dtype=plan.dtype),
        "lm_head": lm_head_graph(plan.config, weights, staging, dtype=plan.dtype, weight_as_input=not on_cpu),
    }
    if on_cpu:
        for name, graph in graphs.items():
            ir.save(graph, staging / f"{name}.onnx")
        return RuntimeRecord({name: f"{name}.onnx" for name in graphs})
    (staging / runtime).mkdir()
    files = {name: f"{runtime}/{name}.engine" for name in graphs}
    for name, graph in graphs.items():
        _compile(plan, runtime, name, graph, staging, staging / files[name], report)
    return RuntimeRecord(files, plan.compute_capabilities if runtime == "tensorrt-rtx" else ())


def _compile(
    plan: BuildPlan, runtime: str, name: str, graph: ir.Model, staging: Path, output: Path, report: Progress
) -> None:
    """Compile one graph for TensorRT or TensorRT-RTX."""
    limits = plan.limits
    if name == "target":
        spec, build_config = target_spec(plan.config, limits.cache_rows, plan.dtype), _target_build(plan, runtime)
    else:
        spec = lm_head_spec(plan.config, plan.dtype, weight_as_input=True)
        profiles = lm_head_profiles(limits.max_batch_size * limits.max_width)
        build_config = BuildConfig(plan.dtype, _target_build(plan, runtime).compute_capabilities, profiles)
    # Beside the weights that it points to; the compiled engine replaces it.
    onnx = staging / f"{runtime}-{name}.onnx"
    ir.save(graph, onnx)
    progress = partial(_report_phase, report, f"{runtime} {name}")
    build_engine(runtime, onnx, spec, build_config, output, progress=progress)
    onnx.unlink()


def _report_phase(report: Progress, stage: str, phase: str, fraction: float) -> None:
    """The compiler's own phase names are many and say little."""
    report(stage, fraction)


def _target_build(plan: BuildPlan, runtime: str) -> BuildConfig:
    limits = plan.limits
    profiles = target_profiles(limits.max_batch_size, limits.max_width, limits.prefill_chunk, limits.cache_rows)
    return BuildConfig(plan.dtype, plan.compute_capabilities if runtime == "tensorrt-rtx" else (), profiles)


def _drop_compiled_weights(staging: Path, weights: dict[str, WeightRef]) -> None:
    """Remove weight files of which nothing but compiled parts is needed."""
    kept = {weights[name].location for name in (EMBEDDING, LM_HEAD) if name in weights}
    for location in {ref.location for ref in weights.values()} - kept:
        (staging / location).unlink()


def _describe(
    plan: BuildPlan, staging: Path, weights: dict[str, WeightRef], runtimes: dict[str, RuntimeRecord]
) -> EngineDir:
    from trtspec import __version__

    return EngineDir(
        path=staging,
        trtspec_version=__version__,
        dtype=plan.dtype,
        limits=plan.limits,
        target=TargetRecord(
            plan.checkpoint.name, plan.checkpoint.origin, plan.config.to_json(), dict(plan.checkpoint.hf_config)
        ),
        embedding=weights[EMBEDDING],
        lm_head=weights[EMBEDDING if plan.config.tied else LM_HEAD],
        runtimes=runtimes,
        files=record_files(staging),
    )


def _check_context(config: TargetConfig, limits: Limits) -> None:
    if limits.max_seq_len > config.max_position_embeddings:
        raise ConfigError(
            f"--max-seq-len {limits.max_seq_len} is more than the model's {config.max_position_embeddings} positions"
        )
    if config.sliding_window and limits.max_seq_len > config.sliding_window:
        raise ConfigError(
            f"the model uses a sliding window of {config.sliding_window} tokens, which is not supported; "
            f"--max-seq-len {config.sliding_window} or less never reaches it"
        )


def _choose_dtype(dtype: str | None, runtimes: Sequence[str], checkpoint: Checkpoint) -> str:
    if dtype is None:
        own = checkpoint.tensors.tensors[EMBEDDING].dtype
        dtype = "float32" if "onnxruntime" in runtimes else own if own in SERVING_DTYPES else "float16"
    if dtype not in SERVING_DTYPES:
        raise ConfigError(f"--dtype {dtype!r}: choose from {', '.join(SERVING_DTYPES)}")
    if dtype == "bfloat16" and "onnxruntime" in runtimes:
        raise ConfigError("ONNX Runtime's CPU kernels have no bfloat16; choose --dtype float32 or float16")
    return dtype


def _check_disk(plan: BuildPlan, output: Path) -> None:
    existing = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    free, needed = shutil.disk_usage(existing).free, plan.disk_bytes
    if free < needed:
        raise UserError(
            f"{existing} has {free / 1e6:.0f} MB free and the build needs about {needed / 1e6:.0f} MB; "
            "free some or choose another --output"
        )
