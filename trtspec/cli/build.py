"""`trtspec build`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtspec.cli.options import DirectoryPath
from trtspec.cli.progress import StageBar
from trtspec.config import RUNTIMES
from trtspec.tensors import SERVING_DTYPES

if TYPE_CHECKING:
    from trtspec.engine_build import BuildPlan


@click.command()
@click.argument("target")
@click.option("--output", required=True, type=DirectoryPath(), help="The engine directory to make.")
@click.option(
    "--runtime",
    "runtimes",
    multiple=True,
    type=click.Choice(RUNTIMES),
    help="What to build for; repeatable.  [default: tensorrt where a GPU and the package exist, else onnxruntime]",
)
@click.option(
    "--dtype",
    type=click.Choice(SERVING_DTYPES),
    help="Precision of weights and KV cache.  [default: float32 with onnxruntime, else the checkpoint's]",
)
@click.option("--max-seq-len", type=int, help="Tokens of prompt and output.  [default: the model's, at most 4096]")
@click.option("--max-batch-size", type=int, default=8, show_default=True, help="Sequences decoded at once.")
@click.option("--max-draft-tokens", type=int, default=32, show_default=True, help="Draft tree nodes, root excluded.")
@click.option(
    "--compute-capability",
    "compute_capabilities",
    multiple=True,
    type=int,
    help="GPU that tensorrt-rtx compiles for, such as 89; repeatable.  [default: 8.0 and newer]",
)
@click.option("--force", is_flag=True, help="Replace an existing DIR.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
def build(
    target: str,
    output: Path,
    runtimes: tuple[str, ...],
    dtype: str | None,
    max_seq_len: int | None,
    max_batch_size: int,
    max_draft_tokens: int,
    compute_capabilities: tuple[int, ...],
    force: bool,
    dry_run: bool,
) -> None:
    """Build an engine directory from TARGET: a Hugging Face directory, a hub id, a .gguf file, or demo."""
    from trtspec.engine_build import check_build_output, plan_build, run_plan

    check_build_output(target, output, force=force)
    plan = plan_build(
        target,
        runtimes=runtimes or default_runtimes(),
        dtype=dtype,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        max_draft_tokens=max_draft_tokens,
        compute_capabilities=compute_capabilities,
    )
    if dry_run:
        click.echo(describe_plan(plan))
        return
    with StageBar() as bar:
        engine_dir = run_plan(plan, output, force=force, progress=bar.report)
    size = sum(record.size for record in engine_dir.files.values())
    click.echo(f"{output}: {plan.checkpoint.name}, {plan.dtype}, {', '.join(plan.runtimes)}, {size / 1e6:.0f} MB")
    click.echo(_memory_line(plan))


def default_runtimes() -> tuple[str, ...]:
    """tensorrt where it can build, else onnxruntime."""
    from trtspec.engine.loading import runtime_problem

    return ("tensorrt",) if runtime_problem("tensorrt") is None else ("onnxruntime",)


def describe_plan(plan: BuildPlan) -> str:
    """The plan in words: parts, sizes on disk, memory."""
    config, limits = plan.config, plan.limits
    lines = [
        f"target            {plan.checkpoint.name} ({config.architecture}), from {plan.checkpoint.origin}",
        f"shape             {config.num_layers} layers, hidden {config.hidden_size}, {config.num_heads} heads / "
        f"{config.num_kv_heads} KV heads of {config.head_dim}, vocabulary {config.vocab_size}"
        f"{', LM head tied' if config.tied else ''}",
        f"rotary            {config.rope.kind}, theta {config.rope.theta:g}",
        f"precision         {plan.dtype}",
        f"runtimes          {', '.join(plan.runtimes)}",
        f"limits            {limits.max_seq_len} tokens per sequence, {limits.max_batch_size} sequences, "
        f"{limits.max_draft_tokens} draft tokens",
        f"disk              {plan.disk_bytes / 1e6:.0f} MB"
        + (f" ({plan.weight_bytes / 1e6:.0f} MB of weights linked, not copied)" if plan.in_place else ""),
        f"memory            {_memory_line(plan)}",
        "draft head        none: methods none and ngram",
        *(f"warning           {warning}" for warning in plan.warnings),
    ]
    return "\n".join(lines)


def _memory_line(plan: BuildPlan) -> str:
    per_sequence, slots = plan.kv_bytes_per_sequence, plan.limits.max_batch_size
    widest = max(plan.limits.prefill_chunk, plan.limits.max_batch_size * plan.limits.max_width)
    workspace = widest * (plan.config.vocab_size + 4 * plan.config.intermediate_size) * 4
    return (
        f"weights {plan.weight_bytes / 1e6:.0f} MB, KV cache {per_sequence / 1e6:.1f} MB per sequence "
        f"({per_sequence * slots / 1e6:.0f} MB for {slots}), workspace about {workspace / 1e6:.0f} MB"
    )
