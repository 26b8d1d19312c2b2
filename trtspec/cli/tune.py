"""`trtspec tune`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence as Seq
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec import __version__
from trtspec.bench.datasets import BUILT_IN, BenchPrompt, load_dataset
from trtspec.bench.tune import LEAST_GROUPS, Budget, Outcome, Search, Tried, fill_groups
from trtspec.bench.tune_space import Space
from trtspec.cli.bench import check_json_file, encode_prompt, format_rows
from trtspec.cli.options import DirectoryPath, engine_options
from trtspec.cli.progress import StageBar
from trtspec.config import SamplingParams
from trtspec.engine_defaults import DefaultsOrigin, TunedDefaults
from trtspec.engine_dir import MANIFEST, EngineDir
from trtspec.errors import ConfigError, EngineDirError, PromptError

if TYPE_CHECKING:
    from trtspec.session import Session


@click.command()
@click.argument("directory", metavar="DIR", type=DirectoryPath())
@click.option(
    "--dataset",
    help=f"Prompts like those to come: {' or '.join(BUILT_IN)}, or a JSONL file: `turns` (the first counts), "
    "`messages`, or `prompt` (raw).",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts at once.")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts to use.  [default: all]")
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Tokens to generate at most.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Time for the search, the last run included.",
)
@engine_options
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all that was tried to this file.")
@click.option("--dry-run", is_flag=True, help="Search, but leave engine.json as it is.")
@click.option("--reset", is_flag=True, help="Only remove the defaults that an earlier run wrote into DIR.")
def tune(
    directory: Path,
    dataset: str | None,
    batch_size: int,
    limit: int | None,
    max_new_tokens: int,
    minutes: float,
    runtime: str | None,
    threads: int | None,
    json_file: Path | None,
    dry_run: bool,
    reset: bool,
) -> None:
    """Find the fastest drafting settings for DIR by measuring, and make them its defaults.

    Methods, merges and draft sizes are tried on the prompts beside the settings in force, greedily, and every token is
    compared with plain decoding's. What is faster than the settings at the start by more than the noise in a last run
    on all prompts becomes DIR's defaults; run, bench and sessions use them where nothing else is asked for.
    """
    if reset:
        _reset(directory, dataset)
        return
    if dataset is None:
        raise click.UsageError("Missing option '--dataset'; it is left out with --reset only.")
    if not math.isfinite(minutes):
        raise click.UsageError(f"--minutes {minutes:g}: give a number of minutes")
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    _check_outputs(directory, json_file, dry_run)
    prompts = load_dataset(dataset, limit)

    from trtspec.session import Session

    with Session.open(directory, runtime=runtime, threads=threads) as session:
        groups = _groups(session, prompts, batch_size, max_new_tokens)
        space = Space(session.methods, session.limits.max_draft_tokens)
        outcome = _search(session, space, groups, sampling, 60 * minutes)
        origin = _origin(session, outcome, dataset, len(prompts), batch_size, max_new_tokens)
        settings = {"dataset": dataset, "prompts": len(prompts), "batch_size": batch_size, "minutes": minutes}
        report = {**_report(session, space, outcome, settings), "max_new_tokens": max_new_tokens}
    defaults = TunedDefaults(outcome.best, origin) if origin else None
    click.echo(format_outcome(space, outcome, batch_size, minutes))
    if defaults and not dry_run:
        session.engine_dir.store_defaults(defaults)
    click.echo(_told(space, directory, outcome, dry_run))
    if json_file:
        report.update(defaults=defaults.to_json() if defaults else None, written=bool(defaults and not dry_run))
        json_file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _reset(directory: Path, dataset: str | None) -> None:
    if dataset is not None:
        raise click.UsageError("--reset only removes the defaults; leave --dataset out, or --reset")
    # Read apart, because defaults that can't be used are the best reason to remove them.
    EngineDir.load(directory, with_defaults=False).store_defaults(None)
    click.echo(f"{directory / MANIFEST} has no tuned defaults any more")


def _check_outputs(directory: Path, json_file: Path | None, dry_run: bool) -> None:
    """Refuse before the search what could not be written after it."""
    check_json_file(json_file)
    if not dry_run and directory.is_dir() and not os.access(directory, os.W_OK):
        raise EngineDirError(f"{directory} can't be written; make it writable, or add --dry-run")


def _groups(
    session: Session, prompts: Seq[BenchPrompt], batch_size: int, max_new_tokens: int
) -> list[list[tuple[str, list[int]]]]:
    """The prompts' ids and tokens, as they are completed together."""
    if batch_size > session.limits.max_batch_size:
        raise ConfigError(
            f"--batch-size {batch_size}: the engine directory decodes {session.limits.max_batch_size} prompts at once; "
            f"give at most that, or build it with --max-batch-size {batch_size}"
        )
    places = fill_groups(len(prompts), batch_size)
    if len(places) < LEAST_GROUPS:
        raise PromptError(
            f"{len(prompts)} prompts in batches of {batch_size} make {len(places)} groups, and with fewer than "
            f"{LEAST_GROUPS} gains can't be told from noise; give more prompts, or a smaller --batch-size"
        )
    encoded = [(prompt.id, encode_prompt(session, prompt, max_new_tokens)) for prompt in prompts]
    return [[encoded[at] for at in group] for group in places]


def _search(
    session: Session, space: Space, groups: list[list[tuple[str, list[int]]]], sampling: SamplingParams, seconds: float
) -> Outcome:
    from trtspec.bench.tune_measure import SessionMeasure

    # Pass times are measured before the time of the search begins.
    session.prepare()
    measure = SessionMeasure(session, groups, sampling, space.label)
    with StageBar() as bar:
        return Search(space, measure, len(groups), Budget(seconds), bar.report).run(session.default_speculation)


def _origin(
    session: Session, outcome: Outcome, dataset: str, prompts: int, batch_size: int, max_new_tokens: int
) -> DefaultsOrigin | None:
    """Where new defaults come from; None where there are none."""
    if outcome.gain is None:
        return None
    return DefaultsOrigin(
        dataset=dataset,
        prompts=prompts,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        gain=round(outcome.gain.factor, 4),
        machine=session.machine,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        trtspec_version=__version__,
    )


def format_outcome(space: Space, outcome: Outcome, batch_size: int, minutes: float) -> str:
    """The table of what was tried, and how the search ended."""
    rows: list[tuple[str, ...]] = [
        ("settings", "step", "tokens/s", "by the start", "spread", "prompts", "verdict"),
    ]
    rows.append((space.label(outcome.start), "start", "-", "1.00", "-", "-", "-"))
    rows += [_row(space, each, batch_size) for each in outcome.tried if each.groups]
    if outcome.confirmation is not None:
        rows.append(_row(space, outcome.confirmation, batch_size))
    lines = [format_rows(rows), "lossless: all settings gave the tokens of none on all prompts that they saw"]
    if not outcome.in_time:
        lines.append(f"the search ended before all steps were gone through: --minutes {minutes:g} was over")
    return "\n".join(lines)


def _row(space: Space, tried: Tried, batch_size: int) -> tuple[str, ...]:
    ratio = tried.ratio
    low, high = ratio.interval if ratio else (0.0, 0.0)
    return (
        space.label(tried.settings),
        tried.step,
        "-" if tried.tokens_per_second is None else f"{tried.tokens_per_second:.1f}",
        f"{ratio.factor:.2f}" if ratio else "-",
        f"{low:.2f}-{high:.2f}" if ratio else "-",
        str(tried.groups * batch_size),
        tried.verdict,
    )


def _told(space: Space, directory: Path, outcome: Outcome, dry_run: bool) -> str:
    """The result in a sentence."""
    gain, noise = outcome.gain, outcome.noise
    if gain is not None:
        done = "is left as it was (--dry-run)" if dry_run else "has it as its default"
        low, high = gain.interval
        return (
            f"{space.label(outcome.best)} is {gain.factor:.2f} times as fast as {space.label(outcome.start)} "
            f"({low:.2f} to {high:.2f}); {directory / MANIFEST} {done}"
        )
    if noise is None:
        return "nothing could be compared in that time; give more --minutes, or shorter answers with --max-new-tokens"
    return (
        f"nothing tried was faster than the current settings by more than the noise of {100 * noise:.1f} %; "
        "the defaults are left as they were"
    )


def _report(session: Session, space: Space, outcome: Outcome, settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON object of --json, without what is written."""
    from trtspec.bench.suite import environment

    return {
        "settings": {**settings, **environment(session)},
        "start": asdict(outcome.start),
        "best": asdict(outcome.best),
        "tried": [_tried_json(space, each) for each in outcome.tried],
        "confirmation": _tried_json(space, outcome.confirmation) if outcome.confirmation else None,
        "confirmed": outcome.gain is not None,
        "noise": outcome.noise,
        "in_time": outcome.in_time,
        "seconds": outcome.seconds,
    }


def _tried_json(space: Space, tried: Tried) -> dict[str, Any]:
    return {
        "step": tried.step,
        "label": space.label(tried.settings),
        "settings": asdict(tried.settings),
        "ratio": tried.ratio.factor if tried.ratio else None,
        "spread": list(tried.ratio.interval) if tried.ratio else None,
        "tokens_per_second": tried.tokens_per_second,
        "groups": tried.groups,
        "verdict": tried.verdict,
    }
