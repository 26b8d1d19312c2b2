"""`trtspec demo`: the main job on a fresh machine."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.bench import format_rows
from trtspec.cli.progress import StageBar, note
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.bench.runner import Comparison
    from trtspec.session import Session

KEPT = Path("trtspec-demo")
EDIT = """Correct the spelling mistakes in this text and write out the whole text again:

The train to Milbrook leaves at nine o'clock every morning. Passengers shoud arrive ten minutes before departure and \
show their tickets at the gate. Bicycles may be taken on the train for a small fee. The journey takes about two hours \
and passes throgh three villages, a long tunnel and a beautiful valley. Coffee and sandwiches are sold in the last \
carriage. The train returns from Milbrook at five o'clock in the evening."""
# A head that drafts with the target's whole LM head spends most of its time there.
DRAFT_LM_HEAD: dict[str, Any] = {"draft_vocab": 8192, "draft_lm_head": "int4"}
CHAT = "Why is the sky blue during the day and red at sunset? Explain it to a child."


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Where to build.  [default: a temporary directory]")
@click.option("--keep", is_flag=True, help=f"Keep the engine directory (without --output: as ./{KEPT}).")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def demo(output: Path | None, keep: bool, as_json: bool) -> None:
    """Fetch SmolLM2-135M-Instruct, build engines, and generate with every drafting method side by side."""
    from trtspec.engine_build import build

    scratch = None if output or keep else Path(tempfile.mkdtemp(prefix="trtspec-demo-"))
    directory = output or (scratch / "engine" if scratch else KEPT)
    try:
        note("building engines for the demo target (the first time it is fetched: 93 MB)")
        with StageBar() as bar:
            build("demo", directory, max_seq_len=2048, progress=bar.report, **DRAFT_LM_HEAD)
        comparisons = _compare(directory)
    finally:
        if scratch:
            shutil.rmtree(scratch)
    if as_json:
        click.echo(json.dumps({name: result.to_json() for name, result in comparisons.items()}, ensure_ascii=False))
    else:
        click.echo(_table(comparisons))
        if not scratch:
            click.echo(f"engine directory: {directory} (try: trtspec run {directory} --prompt 'Tell me a story')")
    if any(result.differences for result in comparisons.values()):
        raise TrtspecError("the methods gave different tokens (listed above); please report this")


def _compare(directory: Path) -> dict[str, Comparison]:
    from trtspec.bench.runner import SessionMethod, compare
    from trtspec.session import Session

    def run(session: Session, name: str, text: str) -> Comparison:
        note(f"generating: {name}")
        contenders = [SessionMethod(session, SpeculationConfig(method)) for method in session.methods]
        prompt = session.encode([{"role": "user", "content": text}])
        return compare(session, contenders, [(name, prompt)], SamplingParams(max_new_tokens=192), repeats=3)

    with Session.open(directory) as session:
        return {name: run(session, name, text) for name, text in (("edit", EDIT), ("chat", CHAT))}


def _table(comparisons: dict[str, Comparison]) -> str:
    rows: list[tuple[str, ...]] = [("prompt", "method", "tokens/s", "speed-up", "acceptance length")]
    lines = []
    for name, result in comparisons.items():
        data: dict[str, Any] = result.to_json()
        for row in data["methods"]:
            figures = (f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f}")
            rows.append((name, row["method"], *figures, f"{row['metrics']['acceptance_length']:.2f}"))
        lines += [
            f"{name}: {at.method} differs from {data['baseline']} at token {at.position}" for at in result.differences
        ]
    return "\n".join([format_rows(rows), *(lines or ["all methods gave the same tokens"])])
