"""From a checkpoint to an engine directory."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from types import MappingProxyType

from trtspec.checkpoint.convert import place_weights, usable_in_place, written_bytes
from trtspec.checkpoint.source import DEMO, Checkpoint, check_weights, open_checkpoint
from trtspec.checkpoint.target import EMBEDDING, LM_HEAD, TargetConfig
from trtspec.config import HEAD_WIDTH, RUNTIMES, Limits
from trtspec.engine.tensorrt_build import BuildConfig, Profile, check_request, lm_head_profiles, target_profiles
from trtspec.engine_dir import (
    MANIFEST,
    TOKENIZER_DIR,
    WEIGHTS_DIR,
    EngineDir,
    RuntimeRecord,
    TargetRecord,
    record_files,
)
from trtspec.errors import ConfigError, UserError
from trtspec.graph.draft_head import draft_head_spec
from trtspec.graph.target import lm_head_graph, lm_head_spec, target_graph, target_spec
from trtspec.head_build import PlacedHead, describe_head, head_parts, place_head
from trtspec.head_plan import HeadPlan, HeadRequest, Table, lm_head_loader, plan_head
from trtspec.proposal_build import proposal_config, proposal_part, register_plugins
from trtspec.runtime_build import ONNXRUNTIME, Part, Progress, build_runtime
from trtspec.staging import check_foreign, check_output, staged_directory
from trtspec.tensors import ITEM_SIZES, SERVING_DTYPES, WeightRef

logger = logging.getLogger(__name__)

DEFAULT_MAX_SEQ_LEN = 4096
NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


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
    head: HeadPlan | None = None

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries of the target whose residual streams the draft head takes."""
        return () if self.head is None else self.head.config.boundaries

    @property
    def load_lm_head(self) -> Table:
        """Loads the target's LM head `[vocab, hidden]`."""
        return lm_head_loader(self.checkpoint, self.config)

    @property
    def in_place(self) -> bool:
        """Whether the weights are linked from the checkpoint rather than written."""
        return usable_in_place(self.checkpoint.tensors, self.config.weight_shapes(), self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in the serving dtype."""
        return written_bytes(self.config.weight_shapes(), self.dtype)

    @property
    def head_bytes(self) -> int:
        """Bytes of the draft head's weights, the LM head that it drafts with included unless it is the target's."""
        return 0 if self.head is None else self.head.weight_bytes + self.head.lm_head_bytes

    @property
    def kv_bytes_per_sequence(self) -> int:
        """Bytes of one slot of the target's KV cache."""
        return self.config.kv_bytes_per_token(ITEM_SIZES[self.dtype]) * self.limits.cache_rows

    @property
    def head_kv_bytes_per_sequence(self) -> int:
        """Bytes of one slot of the draft head's KV cache."""
        if self.head is None:
            return 0
        return self.head.config.kv_bytes_per_token(ITEM_SIZES[self.dtype]) * self.limits.head_cache_rows

    @property
    def linked_bytes(self) -> int:
        """Bytes of weights that are linked from the checkpoints rather than written; engines hold theirs themselves."""
        if ONNXRUNTIME not in self.runtimes:
            return self._shared_bytes if self.in_place else 0
        head = 0 if self.head is None else self.head.linked_bytes
        return head + (self.weight_bytes if self.in_place else 0)

    @property
    def disk_bytes(self) -> int:
        """Estimated size of the engine directory, linked weights not counted."""
        return self._shared_bytes + self._own_bytes * len(self.runtimes) - self.linked_bytes

    @property
    def peak_disk_bytes(self) -> int:
        """The same while it is built: compiled runtimes' weights lie there beside their engines until the end."""
        return self.disk_bytes + (0 if ONNXRUNTIME in self.runtimes else self._own_bytes)

    @property
    def _shared_bytes(self) -> int:
        """Of embedding and LM head, which no engine holds."""
        shared = [shape for name, shape in self.config.weight_shapes().items() if name in (EMBEDDING, LM_HEAD)]
        return sum(map(prod, shared)) * ITEM_SIZES[self.dtype]

    @property
    def _own_bytes(self) -> int:
        """Of what each runtime has of its own: ONNX Runtime as files beside the graphs, the others in their engines."""
        return self.weight_bytes + self.head_bytes - self._shared_bytes


def plan_build(
    target: str | Path,
    *,
    runtimes: Sequence[str] = ("onnxruntime",),
    dtype: str | None = None,
    max_seq_len: int | None = None,
    max_batch_size: int = 8,
    max_draft_tokens: int = 32,
    compute_capabilities: Sequence[int] = (),
    eagle: str | Path | None = None,
    use_eagle: bool = True,
    eagle_options: Mapping[str, str] = NO_OPTIONS,
    draft_vocab: int | str | Path | None = None,
    draft_lm_head: str | None = None,
) -> BuildPlan:
    """Open the target and the draft head and settle every choice; see `build` for the arguments."""
    request = HeadRequest(eagle, use_eagle, eagle_options, draft_vocab, draft_lm_head)
    checkpoint = open_checkpoint(str(target))
    config = TargetConfig.from_hf(checkpoint.hf_config, checkpoint.generation_config)
    warnings = check_weights(config, checkpoint.tensors)
    runtimes = tuple(dict.fromkeys(runtimes))
    if not runtimes or set(runtimes) - set(RUNTIMES):
        raise ConfigError(f"runtimes {', '.join(runtimes) or 'none'}: choose from {', '.join(RUNTIMES)}")
    length = min(config.max_position_embeddings, DEFAULT_MAX_SEQ_LEN) if max_seq_len is None else max_seq_len
    limits = Limits(length, max_batch_size, max_draft_tokens, prefill_chunk=min(256, length))
    _check_context(config, limits)
    if compute_capabilities and "tensorrt-rtx" not in runtimes:
        raise ConfigError("--compute-capability is for --runtime tensorrt-rtx, which was not asked for")
    dtype = _choose_dtype(dtype, runtimes, checkpoint)
    head = plan_head(request, checkpoint, config, dtype)
    if head is not None:
        warnings += head.head.warnings
        if not max_draft_tokens:
            raise ConfigError("--max-draft-tokens 0 leaves a draft head nothing to draft; raise it, or add --no-eagle")
    plan = BuildPlan(checkpoint, config, limits, runtimes, tuple(compute_capabilities), dtype, tuple(warnings), head)
    _check_compilers(plan)
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
    use_eagle: bool = True,
    eagle_options: Mapping[str, str] = NO_OPTIONS,
    draft_vocab: int | str | Path | None = None,
    draft_lm_head: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> EngineDir:
    """Build an engine directory; it appears at `output` complete or not at all.

    Args:
        target: a Hugging Face directory, a hub id, a .gguf file, or "demo".
        eagle: an EAGLE draft head's directory or hub id; None: for the target "demo" the head that comes with trtspec.
        runtimes: any of config.RUNTIMES.
        dtype: float32, float16 or bfloat16; None: float32 with onnxruntime, else the checkpoint's own.
        max_seq_len: tokens of prompt and output together; None: the model's, at most 4096.
        max_batch_size: sequences decoded at once.
        max_draft_tokens: draft tree nodes of one sequence, without the root.
        compute_capabilities: GPUs that tensorrt-rtx compiles for, such as 89; empty: 8.0 and newer.
        use_eagle: False leaves the demo target's own head out.
        eagle_options: wiring decisions that the head's files don't settle, by key of checkpoint.draft_head.OPTIONS.
        draft_vocab: tokens that the head may draft: their number N (see draft_vocab.choose_ids), a file of ids, or
            "N:FILE" with a text or .jsonl file whose most frequent tokens are taken; None: those that the head has.
        draft_lm_head: "target" for full-precision rows, "int4" for a copy with 4-bit weights; None: "target".
        force: replace a non-empty `output`.
        progress: called with a stage and the fraction of it that is done.

    Raises:
        UserError: the target, the draft head, an option or `output` cannot be used.
        EngineError: a compiler failed.
    """
    if isinstance(runtimes, str):
        raise ConfigError(f"runtimes is the string {runtimes!r}; give a tuple such as ({runtimes!r},)")
    check_build_output(target, Path(output), force=force, eagle=eagle)
    plan = plan_build(
        target,
        runtimes=runtimes,
        dtype=dtype,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        max_draft_tokens=max_draft_tokens,
        compute_capabilities=compute_capabilities,
        eagle=eagle,
        use_eagle=use_eagle,
        eagle_options=eagle_options,
        draft_vocab=draft_vocab,
        draft_lm_head=draft_lm_head,
    )
    return run_plan(plan, Path(output), force=force, progress=progress)


def check_build_output(target: str | Path, output: Path, *, force: bool, eagle: str | Path | None = None) -> None:
    """Raise UserError where a build of `target` and the head `eagle` must not write to `output`."""
    for what, given in (("target", None if str(target) == DEMO else target), ("draft head", eagle)):
        source = None if given is None else Path(given).expanduser()
        check_output(output, force=True, source=source if source is not None and source.exists() else None, what=what)
    if not (output / MANIFEST).exists():
        check_foreign(output, force=force, kind="engine directory")
    check_output(output, force=force)


def run_plan(plan: BuildPlan, output: Path, *, force: bool = False, progress: Progress | None = None) -> EngineDir:
    """Carry a plan out; see `build`."""
    report = progress or (lambda stage, fraction: None)
    for warning in plan.warnings:
        logger.warning("%s", warning)
    _check_disk(plan, output)
    with staged_directory(output, force=force) as staging:
        report("weights", 0.0)
        weights = _place(plan, staging)
        head = None if plan.head is None else place_head(plan.head, plan.load_lm_head, staging)
        report("graphs", 0.0)
        runtimes = {runtime: _build_runtime(plan, runtime, weights, head, staging, report) for runtime in plan.runtimes}
        if ONNXRUNTIME not in plan.runtimes:
            _drop_compiled_weights(staging, weights, head)
        report("tokenizer", 0.0)
        plan.checkpoint.save_tokenizer(staging / TOKENIZER_DIR)
        report("checksums", 0.0)
        _describe(plan, staging, weights, head, runtimes).write_manifest()
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
    plan: BuildPlan,
    runtime: str,
    weights: dict[str, WeightRef],
    head: PlacedHead | None,
    staging: Path,
    report: Progress,
) -> RuntimeRecord:
    parts = _parts(plan, weights, head, staging, on_cpu=runtime == ONNXRUNTIME)
    proposal = proposal_config(runtime, plan.limits)
    if proposal is not None:
        register_plugins()
        # First, because it takes seconds: what is wrong with it is known before the target compiles.
        parts = chain([proposal_part(proposal, plan.limits)], parts)
    record = build_runtime(runtime, parts, plan.dtype, _capabilities(plan, runtime), staging, report)
    return record if proposal is None else replace(record, proposal=proposal.to_json())


def _parts(
    plan: BuildPlan, weights: dict[str, WeightRef], head: PlacedHead | None, staging: Path, *, on_cpu: bool
) -> Iterator[Part]:
    """The graphs of one runtime that compute with weights."""
    config, limits, dtype, boundaries = plan.config, plan.limits, plan.dtype, plan.boundaries
    yield Part(
        target_spec(config, limits.cache_rows, dtype, boundaries),
        _target_profiles(limits),
        partial(
            target_graph, config, weights, staging, cache_rows=limits.cache_rows, dtype=dtype, boundaries=boundaries
        ),
    )
    drafts_with_it = plan.head is not None and plan.head.lm_head == "target"
    widest = max(limits.max_width, HEAD_WIDTH) if drafts_with_it else limits.max_width
    yield Part(
        lm_head_spec(config, dtype, weight_as_input=not on_cpu),
        lm_head_profiles(limits.max_batch_size * widest),
        partial(lm_head_graph, config, weights, staging, dtype=dtype, weight_as_input=not on_cpu),
    )
    if plan.head is not None and head is not None:
        yield from head_parts(plan.head, head, plan.load_lm_head, staging, limits, on_cpu=on_cpu)


def _capabilities(plan: BuildPlan, runtime: str) -> tuple[int, ...]:
    return plan.compute_capabilities if runtime == "tensorrt-rtx" else ()


def _target_profiles(limits: Limits) -> tuple[Profile, ...]:
    return target_profiles(limits.max_batch_size, limits.max_width, limits.prefill_chunk, limits.cache_rows)


def _drop_compiled_weights(staging: Path, weights: dict[str, WeightRef], head: PlacedHead | None) -> None:
    """Remove weight files of which nothing but compiled parts is needed."""
    kept = {weights[name].location for name in (EMBEDDING, LM_HEAD) if name in weights}
    files = {ref.location for ref in weights.values()}
    if head is not None:
        kept, files = kept | head.tables, files | head.files
    for location in files - kept:
        (staging / location).unlink()


def _describe(
    plan: BuildPlan,
    staging: Path,
    weights: dict[str, WeightRef],
    head: PlacedHead | None,
    runtimes: dict[str, RuntimeRecord],
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
        draft_head=None if plan.head is None or head is None else describe_head(plan.head, head),
    )


def _check_compilers(plan: BuildPlan) -> None:
    """Raise UserError for what a runtime is known not to compile."""
    limits = plan.limits
    specs = [target_spec(plan.config, limits.cache_rows, plan.dtype, plan.boundaries)]
    if plan.head is not None:
        specs.append(draft_head_spec(plan.head.config, limits.head_cache_rows, plan.dtype))
    for runtime in plan.runtimes:
        if runtime != ONNXRUNTIME:
            build_config = BuildConfig(plan.dtype, _capabilities(plan, runtime), _target_profiles(limits))
            for spec in specs:
                check_request(runtime, spec, build_config)
        if proposal_config(runtime, limits) is not None:
            register_plugins()


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
    free, needed = shutil.disk_usage(existing).free, plan.peak_disk_bytes
    if free < needed:
        raise UserError(
            f"{existing} has {free / 1e6:.0f} MB free and the build needs about {needed / 1e6:.0f} MB; "
            "free some or choose another --output"
        )
