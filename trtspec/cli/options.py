"""Options that several commands share; defaults come from the configuration classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from trtspec.config import OCCURRENCES, RUNTIMES, SamplingParams, SpeculationConfig
from trtspec.errors import ConfigError

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


DRAFTING: dict[str, tuple[str, Any]] = {
    "ngram_min": ("Shortest match that drafts.", None),
    "ngram_max": ("Longest match looked for.", None),
    "ngram_tokens": ("Draft tokens at most, within DIR's own limit.", None),
    "ngram_occurrence": ("Which of several equally long matches.", click.Choice(OCCURRENCES)),
    "eagle_tokens": ("Draft tokens of an EAGLE chain (--eagle-topk 1).", None),
    "eagle_topk": ("Tokens the head proposes behind a node; more than 1 makes a tree.", None),
    "eagle_depth": ("Levels that an EAGLE tree grows behind its first.", None),
    "tree_nodes": ("Draft tokens of an EAGLE tree, within DIR's own limit.", None),
}
"""Help and type of the options that are fields of SpeculationConfig, in the order of --help."""


def drafting_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of DRAFTING, handed to the command as one argument `speculation` (without a method)."""

    @functools.wraps(command)
    def with_speculation(**arguments: Any) -> None:
        chosen = {name: arguments.pop(name) for name in DRAFTING}
        command(speculation=SpeculationConfig(**chosen), **arguments)

    decorated = with_speculation
    for name, (text, kind) in reversed(DRAFTING.items()):
        default = getattr(SPECULATION, name)
        option = click.option(f"--{name.replace('_', '-')}", type=kind, default=default, show_default=True, help=text)
        decorated = option(decorated)
    return decorated


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


def parse_pairs(options: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE options as a mapping."""
    pairs: dict[str, str] = {}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator or not key:
            raise ConfigError(f"--eagle-option {option!r}: expected KEY=VALUE")
        if key in pairs:
            raise ConfigError(f"--eagle-option {key} is given twice")
        pairs[key] = value
    return pairs
