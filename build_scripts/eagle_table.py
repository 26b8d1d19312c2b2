"""Acceptance and speed of the demo's EAGLE head on prompt sets, as JSON lines: one process, methods interleaved.

trtspec build demo --output demo --draft-vocab 8192 --draft-lm-head int4
python build_scripts/eagle_table.py demo FILE.jsonl ... --limit 20
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from trtspec.bench.datasets import load_dataset
from trtspec.bench.runner import SessionMethod, compare
from trtspec.cli.main import main as run_command
from trtspec.cli.options import DirectoryPath
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.session import Session


def settings() -> dict[str, SpeculationConfig]:
    """Name and options of each row."""
    eagle = SpeculationConfig(method="eagle")
    tree = dataclasses.replace(eagle, eagle_topk=4, eagle_depth=3, tree_nodes=15)
    return {
        "none": SpeculationConfig(method="none"),
        **{f"chain of {n}": dataclasses.replace(eagle, eagle_tokens=n) for n in (1, 2, 3)},
        "tree of 15": tree,
    }


@click.command(help=__doc__)
@click.argument("engine_dir", type=DirectoryPath())
@click.argument("datasets", nargs=-1, required=True)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Prompts of each set.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True)
def main(engine_dir: Path, datasets: tuple[str, ...], limit: int, max_new_tokens: int) -> None:
    with Session.open(engine_dir) as session:
        for dataset in datasets:
            prompts = [
                (item.id, session.encode(item.messages or item.text or "")) for item in load_dataset(dataset, limit)
            ]
            contenders = [SessionMethod(session, speculation, name) for name, speculation in settings().items()]
            result = compare(session, contenders, prompts, SamplingParams(max_new_tokens)).to_json()
            plain = result["methods"][0]
            for row in result["methods"]:
                metrics = row["metrics"]
                figures = {
                    "set": Path(dataset).stem,
                    "method": row["method"],
                    "speedup": round(row["speedup"], 3),
                    "tokens_per_second": round(row["tokens_per_second"], 1),
                    "acceptance_length": round(metrics["acceptance_length"], 3),
                    "per_position": [round(value, 3) for value in metrics["acceptance_per_position"]],
                    "step_ms": round(row["step_ms"], 2),
                    "draft_ms_per_token": round(metrics["draft_ms_per_token"], 3),
                    "draft_share_of_plain_step": round(metrics["draft_ms_per_token"] / plain["step_ms"], 4),
                    "stage_ms": {stage: round(value, 1) for stage, value in metrics["stage_ms"].items()},
                    "lossless": result["lossless"],
                }
                click.echo(json.dumps(figures))
            for difference in result["differences"]:
                click.echo(json.dumps(difference))


if __name__ == "__main__":
    run_command(main, "eagle_table.py")
