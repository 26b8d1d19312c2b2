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

from trtspec.bench.datasets import BUILT_IN, load_dataset
from trtspec.cli.options import DirectoryPath, drafting_options, engine_options, sampling_options
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from trtspec.bench.runner import Comparison, Contender
    from trtspec.session import Session


@click.command()
@click.argument("directory", metavar="DIR", type=DirectoryPath())
@click.option(
    "--dataset",
    required=True,
    help=f"{' or '.join(BUILT_IN)}, or a JSONL file: `turns` (the first counts), `messages`, or `prompt` (raw).",
)
@click.option(
    "--methods",
    help="Drafting methods, separated by commas, with merges as ngram-eagle:union; the first is the base.  "
    "[default: all DIR supports]",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts at once.")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts to use.  [default: all]")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of each; medians count."
)
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Tokens to generate at most.")
@drafting_options
@sampling_options
@click.option("--compare", type=click.Choice(["hf"]), help="Also run Hugging Face generate, plain and prompt lookup.")
@engine_options
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures to this file.")
def bench(
    directory: Path,
    dataset: str,
    methods: str | None,
    batch_size: int,
    limit: int | None,
    repeats: int,
    max_new_tokens: int,
    speculation: SpeculationConfig,
    sampling: SamplingParams,
    compare: str | None,
    runtime: str | None,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Measure the drafting methods of DIR on a dataset, in one process, and check that none changes a token."""
    chosen = None if methods is None else _with_methods(speculation, _method_names(methods))
    # Methods can be compared only where they draw from the same seed.
    sampling = dataclasses.replace(sampling, max_new_tokens=max_new_tokens, seed=sampling.seed or 0)
    if compare and not sampling.is_plain:
        raise ConfigError("--compare hf decodes greedily; leave the sampling options out")
    _check_json_file(json_file)
    prompts = load_dataset(dataset, limit)

    from trtspec.bench.runner import SessionMethod
    from trtspec.bench.runner import compare as run_comparison
    from trtspec.session import Session

    with Session.open(directory, runtime=runtime, threads=threads) as session, _group_bar() as bar:
        encoded = [(prompt.id, _encode(session, prompt, max_new_tokens)) for prompt in prompts]
        speculations = _with_methods(speculation, session.methods) if chosen is None else chosen
        contenders: list[Contender] = [SessionMethod(session, *each) for each in speculations]
        if compare:
            contenders += _huggingface(session, speculation.ngram_tokens)
        result = run_comparison(
            session,
            contenders,
            encoded,
            sampling,
            batch_size=batch_size,
            repeats=repeats,
            settings={"dataset": dataset, **_settings(session, speculation)},
            progress=partial(_show_progress, bar),
        )
    click.echo(format_comparison(result))
    if json_file:
        json_file.write_text(json.dumps(result.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _method_names(methods: str) -> list[str]:
    names = [name.strip() for name in methods.split(",")]
    if not all(names) or len(set(names)) != len(names):
        raise ConfigError(f"--methods {methods!r}: give each method once, separated by commas")
    return names


def _with_methods(speculation: SpeculationConfig, names: Seq[str]) -> list[tuple[SpeculationConfig, str]]:
    """The configuration of each name, which may end with a merge."""
    chosen = []
    for name in names:
        method, _, merge = name.partition(":")
        chosen.append((dataclasses.replace(speculation, method=method, merge=merge or speculation.merge), name))
        if merge and method != "ngram-eagle":
            raise ConfigError(f"--methods {name}: only ngram-eagle has merges")
    return chosen


def _check_json_file(json_file: Path | None) -> None:
    if json_file and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: there is no directory {json_file.absolute().parent}")
    if json_file and json_file.is_dir():
        raise ConfigError(f"--json {json_file} is a directory; give the name of a file")


def _settings(session: Session, speculation: SpeculationConfig) -> dict[str, Any]:
    """What the figures depend on, for the report."""
    options = {name: value for name, value in vars(speculation).items() if name != "method"}
    engine_dir = session.engine_dir
    return {**options, "target": engine_dir.target.name, "runtime": session.runtime, "dtype": engine_dir.dtype}


def _group_bar() -> Any:
    return tqdm(disable=not sys.stderr.isatty(), unit="group", leave=False)


def _show_progress(bar: Any, done: int, total: int) -> None:
    bar.total, bar.n = total, done
    bar.refresh()


def format_comparison(result: Comparison) -> str:
    """The table of methods, and what differed."""
    header = ("method", "tokens/s", "speed-up", "acceptance length", "ms/step", "outside engines")
    rows: list[tuple[str, ...]] = [header]
    for row in result.to_json()["methods"]:
        metrics = row["metrics"]
        rows.append(
            (
                row["method"],
                f"{row['tokens_per_second']:.1f}",
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


def _encode(session: Session, prompt: Any, max_new_tokens: int) -> list[int]:
    """Token ids; chat messages go through the template, or as plain text where there is none."""
    if prompt.text is not None:
        ids = session.encode(prompt.text)
    elif session.tokenizer.has_chat_template:
        ids = session.encode(prompt.messages)
    else:
        ids = session.encode("\n".join(message["content"] for message in prompt.messages))
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
