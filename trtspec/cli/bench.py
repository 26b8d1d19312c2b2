"""`trtspec bench`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from trtspec.bench.datasets import BUILT_IN, BenchPrompt, load_dataset
from trtspec.bench.methods import Named, check_lengths, parse_methods, sweep
from trtspec.cli.options import SAMPLED, DirectoryPath, drafting_options, engine_options, integer_list, sampling_options
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from trtspec.bench.runner import Comparison, Contender
    from trtspec.bench.suite import PromptSet, Suite
    from trtspec.session import Session


@click.command()
@click.argument("directory", metavar="DIR", type=DirectoryPath())
@click.option(
    "--dataset",
    "datasets",
    required=True,
    multiple=True,
    help=f"{' or '.join(BUILT_IN)}, or a JSONL file: `turns` (the first counts), `messages`, or `prompt` (raw).  "
    "Repeatable.",
)
@click.option(
    "--methods",
    help="Drafting methods, separated by commas, with merges as ngram-eagle:union and draft lengths as ngram@5; the "
    "first is the base.  [default: all DIR supports]",
)
@click.option(
    "--sweep-tokens",
    metavar="N,N,...",
    callback=integer_list,
    help="Also run each method that has a draft length with these, as ngram@5.",
)
@click.option(
    "--batch-size",
    "batch_sizes",
    metavar="N,N,...",
    callback=integer_list,
    default="1",
    show_default=True,
    help="Prompts at once; several sizes are run one after the other.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Prompts of each dataset to use.  [default: all]")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Runs of each; medians count.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Groups of prompts that each method first completes untimed, 16 tokens each.",
)
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Tokens to generate at most.")
@drafting_options
@sampling_options
@click.option("--compare", type=click.Choice(["hf"]), help="Also run Hugging Face generate, plain and prompt lookup.")
@engine_options
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures to this file.")
@click.option("--report", type=DirectoryPath(), help="Write a page with plots to this directory, and the plots as PNG.")
@click.option("--force", is_flag=True, help="Replace what --report finds in its directory.")
def bench(
    directory: Path,
    datasets: tuple[str, ...],
    methods: str | None,
    sweep_tokens: list[int] | None,
    batch_sizes: list[int],
    limit: int | None,
    repeats: int,
    warmup: int,
    max_new_tokens: int,
    speculation: SpeculationConfig,
    sampling: SamplingParams,
    compare: str | None,
    runtime: str | None,
    threads: int | None,
    json_file: Path | None,
    report: Path | None,
    force: bool,
) -> None:
    """Measure the drafting methods of DIR on datasets, in one process, and check that none changes a token."""
    chosen = None if methods is None else parse_methods(methods, speculation)
    # Methods can be compared only where they draw from the same seed.
    sampling = dataclasses.replace(sampling, max_new_tokens=max_new_tokens, seed=sampling.seed or 0)
    if compare and not sampling.is_plain:
        raise ConfigError("--compare hf decodes greedily; leave the sampling options out")
    _check_outputs(directory, json_file, report, force)
    loaded = _load(datasets, limit)

    from trtspec.bench.suite import environment, run_suite
    from trtspec.session import Session

    with Session.open(directory, runtime=runtime, threads=threads) as session, _group_bar() as bar:
        _check_batches(batch_sizes, session)
        chosen = chosen or parse_methods(",".join(session.methods), speculation)
        suite = run_suite(
            session,
            _contenders(session, chosen, sweep_tokens, speculation.ngram_tokens if compare else None),
            [_tokenized(session, name, prompts, max_new_tokens) for name, prompts in loaded.items()],
            sampling,
            batch_sizes=batch_sizes,
            repeats=repeats,
            warmup=warmup,
            settings={"sweep_tokens": sweep_tokens, **_options(speculation, sampling), **environment(session)},
            progress=partial(_show_progress, bar),
        )
    click.echo(format_suite(suite))
    _write(suite.to_json(), json_file, report, force)


def _check_outputs(directory: Path, json_file: Path | None, report: Path | None, force: bool) -> None:
    """Refuse before the measurement what could not be written after it."""
    check_json_file(json_file)
    if report:
        from trtspec.bench.report import check_report

        check_report(report, force=force, engine_dir=directory)
        if json_file and report.resolve() in json_file.resolve().parents:
            raise ConfigError(
                f"--json {json_file} lies in --report {report}, which has its own bench.json; leave one out"
            )


def _check_batches(batch_sizes: Seq[int], session: Session) -> None:
    largest, slots = max(batch_sizes), session.limits.max_batch_size
    if largest > slots:
        raise ConfigError(
            f"--batch-size {largest}: {session.engine_dir.path} decodes {slots} sequences at once; build it with "
            f"--max-batch-size {largest}"
        )


def check_json_file(json_file: Path | None) -> None:
    """Raise ConfigError where the file of --json could not be written."""
    if json_file and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: there is no directory {json_file.absolute().parent}")
    if json_file and json_file.is_dir():
        raise ConfigError(f"--json {json_file} is a directory; give the name of a file")


def _write(data: dict[str, Any], json_file: Path | None, report: Path | None, force: bool) -> None:
    if json_file:
        json_file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if report:
        from trtspec.bench.report import write_report

        write_report(data, report, force=force)


def _load(datasets: Seq[str], limit: int | None) -> dict[str, list[BenchPrompt]]:
    if len(set(datasets)) < len(datasets):
        raise ConfigError("--dataset: give each one once")
    return {name: load_dataset(name, limit) for name in datasets}


def _contenders(
    session: Session, chosen: Seq[Named], sweep_tokens: list[int] | None, hf_lookup_tokens: int | None
) -> list[Contender]:
    """What is measured: the methods, these with other draft lengths, and Hugging Face generate if it is asked for."""
    from trtspec.bench.runner import SessionMethod

    methods = [*chosen, *(sweep(chosen, sweep_tokens) if sweep_tokens else ())]
    check_lengths(methods, session.limits.max_draft_tokens)
    contenders: list[Contender] = [SessionMethod(session, each.speculation, each.name) for each in methods]
    return contenders + (_huggingface(session, hf_lookup_tokens) if hf_lookup_tokens else [])


def _tokenized(session: Session, name: str, prompts: Seq[BenchPrompt], max_new_tokens: int) -> PromptSet:
    from trtspec.bench.suite import PromptSet

    return PromptSet(name, [(prompt.id, encode_prompt(session, prompt, max_new_tokens)) for prompt in prompts])


def _options(speculation: SpeculationConfig, sampling: SamplingParams) -> dict[str, Any]:
    """What the figures depend on beside the machine, for the report."""
    drafting = {name: value for name, value in vars(speculation).items() if name != "method"}
    return {**drafting, **{name: getattr(sampling, name) for name in SAMPLED}}


def _group_bar() -> Any:
    return tqdm(disable=not sys.stderr.isatty(), unit="group", leave=False)


def _show_progress(bar: Any, done: int, total: int) -> None:
    bar.total, bar.n = total, done
    bar.refresh()


def format_suite(suite: Suite) -> str:
    """The table of each comparison, under its dataset and batch size where there are several."""
    if len(suite.comparisons) == 1:
        return format_comparison(suite.comparisons[0])
    return "\n\n".join(
        f"{each.settings['dataset']}, batch {each.settings['batch_size']}\n{format_comparison(each)}"
        for each in suite.comparisons
    )


def format_comparison(result: Comparison) -> str:
    """The table of methods, and what differed."""
    data = result.to_json()
    repeated = data["settings"]["repeats"] > 1
    spread = ("min", "max") if repeated else ()
    header = ("method", "tokens/s", *spread, "speed-up", "acceptance length", "ms/step", "outside engines")
    rows: list[tuple[str, ...]] = [header]
    for row in data["methods"]:
        metrics = row["metrics"]
        rows.append(
            (
                row["method"],
                f"{row['tokens_per_second']:.1f}",
                *(f"{row['spread']['tokens_per_second'][end]:.1f}" for end in spread),
                f"{row['speedup']:.2f}",
                f"{metrics['acceptance_length']:.2f}" if metrics else "-",
                f"{row['step_ms']:.1f}" if metrics else "-",
                f"{row['outside_engines_ms_per_step']:.2f} ms" if metrics else "-",
            )
        )
    lines = [format_rows(rows)]
    if not result.differences:
        lines.append(
            f"lossless: every method gave the tokens of {result.methods[0].name} on {result.num_prompts} prompts"
        )
    for at in result.differences:
        gap = "" if at.logit_gap is None else f", logit gap {at.logit_gap:.2e}"
        lines.append(
            f"DIFFERENT: {at.method} on {at.prompt_id} at token {at.position}: {at.found} instead of {at.expected}{gap}"
        )
    return "\n".join(lines)


def format_rows(rows: list[tuple[str, ...]]) -> str:
    """Columns aligned: the first to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def encode_prompt(session: Session, prompt: BenchPrompt, max_new_tokens: int) -> list[int]:
    """Token ids; chat messages go through the template, or as plain text where there is none.

    Raises:
        PromptError: with `max_new_tokens` it is too long for the engine directory.
    """
    messages = prompt.messages or ()
    if prompt.text is not None:
        ids = session.encode(prompt.text)
    elif session.tokenizer.has_chat_template:
        ids = session.encode(messages)
    else:
        ids = session.encode("\n".join(message["content"] for message in messages))
    if len(ids) + max_new_tokens > session.limits.max_seq_len:
        raise PromptError(
            f"prompt {prompt.id} has {len(ids)} tokens; with --max-new-tokens {max_new_tokens} it exceeds the "
            f"directory's {session.limits.max_seq_len}: build with a larger --max-seq-len, or use --limit"
        )
    return ids


def _huggingface(session: Session, lookup_tokens: int) -> list[Contender]:
    from trtspec.bench.huggingface import HuggingFaceMethod, load_huggingface

    model = load_huggingface(session.engine_dir)
    eos = session.engine_dir.target.config["eos_token_ids"]
    return [HuggingFaceMethod(model, eos, None), HuggingFaceMethod(model, eos, lookup_tokens)]
