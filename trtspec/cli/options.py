"""Options that several commands share; defaults come from the configuration classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from trtspec.config import OCCURRENCES, RUNTIMES, SamplingParams, SpeculationConfig

SAMPLING, SPECULATION = SamplingParams(), SpeculationConfig()


class DirectoryPath(click.Path):
    """A directory's path; an empty string is refused, not taken for the current directory."""

    name = "path"

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or a usage error."""
        if value == "":
            self.fail("is empty; give a directory", param, ctx)
        return super().convert(value, param, ctx)


Command = TypeVar("Command", bound=Callable[..., Any])


def ngram_options(command: Command) -> Command:
    """--ngram-min, --ngram-max, --ngram-tokens, --ngram-occurrence."""
    occurrences = click.Choice(OCCURRENCES)
    for option in (
        click.option(
            "--ngram-occurrence",
            type=occurrences,
            default=SPECULATION.ngram_occurrence,
            show_default=True,
            help="Which of several equally long matches.",
        ),
        click.option(
            "--ngram-tokens",
            default=SPECULATION.ngram_tokens,
            show_default=True,
            help="Draft tokens at most, within DIR's own limit.",
        ),
        click.option("--ngram-max", default=SPECULATION.ngram_max, show_default=True, help="Longest match looked for."),
        click.option(
            "--ngram-min", default=SPECULATION.ngram_min, show_default=True, help="Shortest match that drafts."
        ),
    ):
        command = option(command)
    return command


def eagle_options(command: Command) -> Command:
    """--eagle-tokens, --eagle-topk, --eagle-depth, --tree-nodes."""
    for option in (
        click.option(
            "--tree-nodes",
            default=SPECULATION.tree_nodes,
            show_default=True,
            help="Draft tokens of an EAGLE tree, within DIR's own limit.",
        ),
        click.option(
            "--eagle-depth",
            default=SPECULATION.eagle_depth,
            show_default=True,
            help="Levels that an EAGLE tree grows behind its first.",
        ),
        click.option(
            "--eagle-topk",
            default=SPECULATION.eagle_topk,
            show_default=True,
            help="Tokens the head proposes behind a node; more than 1 makes a tree.",
        ),
        click.option(
            "--eagle-tokens",
            default=SPECULATION.eagle_tokens,
            show_default=True,
            help="Draft tokens of an EAGLE chain (--eagle-topk 1).",
        ),
    ):
        command = option(command)
    return command


def engine_options(command: Command) -> Command:
    """--runtime and --threads."""
    threads = click.IntRange(min=1)
    for option in (
        click.option("--threads", type=threads, help="CPU threads of this process.  [default: one per core]"),
        click.option(
            "--runtime", type=click.Choice(RUNTIMES), help="Runtime.  [default: the first of DIR's usable here]"
        ),
    ):
        command = option(command)
    return command
