"""`trtspec build`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.options import DirectoryPath, parse_pairs
from trtspec.cli.progress import StageBar
from trtspec.config import RUNTIMES
from trtspec.tensors import SERVING_DTYPES

if TYPE_CHECKING:
    from trtspec.engine_build import BuildPlan
    from trtspec.head_plan import HeadPlan


class ComputeCapability(click.types.IntParamType):
    """A GPU's compute capability, as NVIDIA writes it (8.9) or as compilers do (89)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Major and minor version as one number."""
        match = re.fullmatch(r"(\d{1,2})\.?(\d)", str(value))
        if not match:
            self.fail(f"{value!r} is no compute capability; give one such as 89, for 8.9", param, ctx)
        return int(match[1] + match[2])


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
    type=ComputeCapability(),
    help="GPU that tensorrt-rtx compiles for, such as 89 (or 8.9); repeatable.  [default: 80 and newer]",
)
@click.option(
    "--eagle",
    metavar="HEAD",
    help="EAGLE draft head: a directory or a hub id.  [default: none; for demo the one that comes with trtspec]",
)
@click.option("--no-eagle", is_flag=True, help="Leave the demo target's own draft head out.")
@click.option(
    "--eagle-option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="A wiring decision that the head's files don't settle (trtspec inspect shows them all); repeatable.",
)
@click.option(
    "--draft-vocab",
    metavar="N|FILE|N:FILE",
    help="Tokens that may be drafted: N, the head's most frequent in training where it says, then the lowest ids; "
    "the ids in FILE (a JSON array or integers); or the N most frequent ones of a text or .jsonl FILE.  "
    "[default: the head's]",
)
@click.option(
    "--draft-lm-head",
    type=click.Choice(("target", "int4")),
    help="LM head of the drafts: the target's (or the head's own), or a copy with 4-bit weights.  [default: target]",
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
    eagle: str | None,
    no_eagle: bool,
    options: tuple[str, ...],
    draft_vocab: str | None,
    draft_lm_head: str | None,
    force: bool,
    dry_run: bool,
) -> None:
    """Build an engine directory from TARGET: a Hugging Face directory, a hub id, a .gguf file, or demo."""
    from trtspec.engine_build import check_build_output, plan_build, run_plan

    check_build_output(target, output, force=force, eagle=eagle)
    plan = plan_build(
        target,
        runtimes=runtimes or default_runtimes(),
        dtype=dtype,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        max_draft_tokens=max_draft_tokens,
        compute_capabilities=compute_capabilities,
        eagle=eagle,
        use_eagle=not no_eagle,
        eagle_options=parse_pairs(options),
        draft_vocab=draft_vocab,
        draft_lm_head=draft_lm_head,
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
        + (f" ({plan.linked_bytes / 1e6:.0f} MB of weights linked, not copied)" if plan.linked_bytes else ""),
        f"memory            {_memory_line(plan)}",
        *(_head_lines(plan, plan.head) if plan.head else ["draft head        none: methods none and ngram"]),
        *(f"warning           {warning}" for warning in plan.warnings),
    ]
    return "\n".join(lines)


def _head_lines(plan: BuildPlan, head: HeadPlan) -> list[str]:
    """The draft head's size and wiring; every decision with who made it."""
    drafted = f"{head.config.draft_vocab_size} of {head.config.vocab_size} tokens"
    size = "no weights of its own" if head.lm_head == "target" else f"{head.lm_head_bytes / 1e6:.1f} MB"
    lines = [
        f"draft head        {head.name}, from {head.origin}: {head.weight_bytes / 1e6:.1f} MB, "
        f"KV cache {plan.head_kv_bytes_per_sequence / 1e6:.2f} MB per sequence",
        f"draft LM head     {head.lm_head}: {drafted}, {size}",
    ]
    for decision in head.head.decisions:
        value = "all" if decision.value is None else decision.value
        value = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        note = f": {decision.note}" if decision.note else ""
        lines.append(f"  {decision.name:<23} {value} ({decision.origin}{note})")
    return lines


def _memory_line(plan: BuildPlan) -> str:
    slots, of_head = plan.limits.max_batch_size, plan.head_kv_bytes_per_sequence
    per_sequence = plan.kv_bytes_per_sequence + of_head
    widest = max(plan.limits.prefill_chunk, plan.limits.max_batch_size * plan.limits.max_width)
    workspace = widest * (plan.config.vocab_size + 4 * plan.config.intermediate_size) * 4
    return (
        f"weights {plan.weight_bytes / 1e6:.0f} MB, "
        + (f"draft head {plan.head_bytes / 1e6:.0f} MB, " if plan.head else "")
        + f"KV cache {per_sequence / 1e6:.1f} MB per sequence "
        + (f"with {of_head / 1e6:.1f} MB for the draft head " if plan.head else "")
        + f"({per_sequence * slots / 1e6:.0f} MB for {slots}), workspace about {workspace / 1e6:.0f} MB"
    )
