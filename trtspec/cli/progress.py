"""Progress on a terminal; nothing when stderr is piped."""

from __future__ import annotations

import sys
from types import TracebackType

import click
from tqdm import tqdm


def note(text: str) -> None:
    """Say what comes next, on a terminal."""
    if sys.stderr.isatty():
        click.echo(text, err=True)


class StageBar:
    """A bar that follows (stage, fraction) reports."""

    def __init__(self) -> None:
        bar_format = "{desc:<32} {percentage:3.0f}%|{bar:20}| {elapsed}"
        self._bar = tqdm(total=1.0, disable=not sys.stderr.isatty(), bar_format=bar_format, leave=False)

    def __enter__(self) -> StageBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def report(self, stage: str, fraction: float) -> None:
        """Show a stage and the fraction of it that is done."""
        self._bar.set_description_str(stage, refresh=False)
        self._bar.n = fraction
        self._bar.refresh()
