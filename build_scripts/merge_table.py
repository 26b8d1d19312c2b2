"""The README's table of methods: speed over plain decoding and acceptance length by prompt set, as Markdown.

trtspec build demo --output demo --draft-vocab 8192 --draft-lm-head int4
python build_scripts/merge_table.py demo edit chat mixed FILE.jsonl ... --limit 20 --json figures.jsonl

One process; methods are interleaved prompt by prompt. With --json, rows already in the file are not measured again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from trtspec.bench.datasets import load_dataset
from trtspec.bench.runner import SessionMethod, compare
from trtspec.cli.options import DirectoryPath
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.session import Session

METHODS = {
    "none": SpeculationConfig("none"),
    "ngram": SpeculationConfig("ngram"),
    "eagle": SpeculationConfig("eagle"),
    **{merge: SpeculationConfig("ngram-eagle", merge=merge) for merge in ("exclusive", "union", "auto")},
}


def measure(session: Session, dataset: str, limit: int | None, sampling: SamplingParams, batch: int) -> dict[str, Any]:
    """The figures of one set."""
    room = session.limits.max_seq_len - sampling.max_new_tokens
    prompts = [(item.id, session.encode(item.messages or item.text or "")) for item in load_dataset(dataset, limit)]
    contenders = [SessionMethod(session, options, name) for name, options in METHODS.items()]
    fitting = [(name, ids) for name, ids in prompts if len(ids) <= room]
    result = compare(session, contenders, fitting, sampling, batch_size=batch)
    return {"set": Path(dataset).stem, **result.to_json()}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a row for each set; the acceptance length in brackets."""
    lines = ["| set | " + " | ".join(f"`{name}`" for name in METHODS) + " |", "|---" * (len(METHODS) + 1) + "|"]
    for result in results:
        cells = []
        for row in result["methods"]:
            length, best = row["metrics"]["acceptance_length"], max(each["speedup"] for each in result["methods"])
            speed = (
                f"{row['speedup']:.2f}" if row is not result["methods"][0] else f"{row['tokens_per_second']:.1f} tok/s"
            )
            cells.append(f"**{speed}** ({length:.2f})" if row["speedup"] == best else f"{speed} ({length:.2f})")
        lines.append(f"| `{result['set']}` ({result['prompts']}) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument("engine_dir", type=DirectoryPath())
@click.argument("datasets", nargs=-1, required=True)
@click.option("--limit", type=click.IntRange(min=1), help="Prompts of each set.  [default: all]")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Keep the figures of each set, a line each.")
def main(
    engine_dir: Path,
    datasets: tuple[str, ...],
    limit: int | None,
    max_new_tokens: int,
    batch_size: int,
    temperature: float,
    json_file: Path | None,
) -> None:
    lines = json_file.read_text(encoding="utf-8").splitlines() if json_file and json_file.exists() else []
    results = [json.loads(line) for line in lines]
    sampling = SamplingParams(max_new_tokens, temperature=temperature, seed=0)
    with Session.open(engine_dir) as session:
        for dataset in datasets:
            if Path(dataset).stem not in {result["set"] for result in results}:
                results.append(measure(session, dataset, limit, sampling, batch_size))
                if json_file:
                    with json_file.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(results[-1]) + "\n")
    click.echo(table(results))
    for result in results:
        for difference in result["differences"]:
            click.echo(f"DIFFERENT on {result['set']}: {difference}")


if __name__ == "__main__":
    main()
