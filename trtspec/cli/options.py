"""Options that several commands share; defaults come from the configuration classes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from trtspec.config import MERGES, OCCURRENCES, RUNTIMES, SamplingParams, SpeculationConfig
from trtspec.engine_dir import MANIFEST, EngineDir
from trtspec.errors import ConfigError, EngineDirError

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


def integer_list(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    """Callback of an option that takes different positive integers, separated by commas."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(numbers) < len(parts) or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise click.BadParameter(
            f"{value!r}: give different integers of at least 1, separated by commas", ctx=ctx, param=param
        )
    return numbers


Command = TypeVar("Command", bound=Callable[..., Any])


DRAFTING: dict[str, tuple[str, Any]] = {
    "merge": (
        "How ngram-eagle combines its drafters; auto sizes drafts itself, by measured cost.",
        click.Choice(MERGES),
    ),
    "ngram_min": ("Shortest match that drafts.", None),
    "ngram_max": ("Longest match looked for.", None),
    "ngram_tokens": ("Draft tokens at most, within DIR's own limit.", None),
    "ngram_occurrence": ("Which of several equally long matches.", click.Choice(OCCURRENCES)),
    "ngram_branches": ("Continuations with different first tokens at most.", None),
    "hybrid_ngram_min": ("Shortest match for which --merge exclusive leaves EAGLE out.", None),
    "eagle_tokens": ("Draft tokens of an EAGLE chain (--eagle-topk 1).", None),
    "eagle_topk": ("Tokens the head proposes behind a node; more than 1 makes a tree.", None),
    "eagle_depth": ("Levels that an EAGLE tree grows behind its first.", None),
    "tree_nodes": ("Draft tokens of an EAGLE tree, within DIR's own limit.", None),
}
"""Help and type of the options that are fields of SpeculationConfig, in the order of --help."""
SAMPLED: dict[str, tuple[str, Any]] = {
    "temperature": ("Flattens (>1) or sharpens the distribution that tokens are drawn from; 0: the likeliest.", None),
    "top_k": ("Draw from so many of the likeliest tokens; 0: from all.", None),
    "top_p": ("Draw from the likeliest tokens that together have this probability.", None),
    "min_p": ("Draw from tokens at least this probable relative to the likeliest.", None),
    "repetition_penalty": ("Above 1: tokens of prompt and output become less likely.", None),
    "presence_penalty": ("Taken off the logits of tokens in the output; -2 to 2.", None),
    "frequency_penalty": ("The same for each time that they occur in it; -2 to 2.", None),
    "seed": ("Decides what is drawn, whatever the method or batch.", click.IntRange(0, 2**64 - 1)),
}
"""The same for SamplingParams: how tokens are chosen."""


def drafting_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of DRAFTING, handed to the command as one argument `speculation` (without a method).

    Where the command has an argument `directory`, or a `source` that is an engine directory, options that are not given
    come from its tuned defaults; --help shows what holds where it has none.
    """
    return _with_fields(command, DRAFTING, "speculation", SPECULATION, _with_tuned)


def is_engine_directory(path: str) -> bool:
    """Whether a path that may also name a target is an engine directory."""
    return bool(path) and (Path(path) / MANIFEST).exists()


def _with_tuned(given: dict[str, Any], arguments: dict[str, Any]) -> SpeculationConfig:
    """The options given, and the directory's defaults for all others."""
    source = arguments.get("source", "")
    directory = arguments.get("directory", source if is_engine_directory(source) else None)
    try:
        tuned = None if directory is None else EngineDir.load(directory).defaults
    except EngineDirError:
        # Options that are wrong for any directory are told first.
        dataclasses.replace(SPECULATION, **given)
        raise
    base = SPECULATION if tuned is None else dataclasses.replace(tuned.speculation, method=None)
    try:
        return dataclasses.replace(base, **given)
    except ConfigError as error:
        if base == SPECULATION:
            raise
        # Perhaps only one side of what doesn't fit together was given.
        raise ConfigError(f"{error}; options left out are those that {directory} was tuned to") from None


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of SAMPLED, handed to the command as one argument `sampling` (without what ends a sequence)."""
    return _with_fields(command, SAMPLED, "sampling", SAMPLING, lambda given, _: SamplingParams(**given))


def _with_fields(
    command: Callable[..., None],
    table: dict[str, tuple[str, Any]],
    argument: str,
    defaults: Any,
    make: Callable[[dict[str, Any], dict[str, Any]], Any],
) -> Callable[..., None]:
    """Options that are fields of a dataclass, handed to the command as an instance of it.

    Args:
        make: the instance, from the options that the user gave and the command's other arguments.
    """

    @functools.wraps(command)
    def with_instance(**arguments: Any) -> None:
        source = click.get_current_context().get_parameter_source
        values = {name: arguments.pop(name) for name in table}
        given = {name: value for name, value in values.items() if source(name) is not ParameterSource.DEFAULT}
        command(**{argument: make(given, arguments)}, **arguments)

    decorated = with_instance
    for name, (text, kind) in reversed(table.items()):
        default = getattr(defaults, name)
        shown = "drawn" if default is None else True
        option = click.option(f"--{name.replace('_', '-')}", type=kind, default=default, show_default=shown, help=text)
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
