"""What `trtspec bench` compares, by name: `method[:merge][@draft length]`, such as ngram@5."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import NamedTuple

from trtspec.config import AUTO, HEAD_METHODS, SpeculationConfig
from trtspec.errors import ConfigError


class Named(NamedTuple):
    """A drafting configuration and what the tables call it."""

    name: str
    speculation: SpeculationConfig


def parse_methods(names: str, base: SpeculationConfig) -> list[Named]:
    """The configurations that a list such as `none,ngram@5,ngram-eagle:union` means; `base` has all else.

    Raises:
        ConfigError: an unknown method, a merge or a draft length where there is none, or the same name twice.
    """
    chosen = [name.strip() for name in names.split(",")]
    if not all(chosen) or len(set(chosen)) != len(chosen):
        raise ConfigError(f"--methods {names!r}: give each method once, separated by commas")
    return [_parse(name, base) for name in chosen]


def sweep(chosen: Seq[Named], lengths: Seq[int]) -> list[Named]:
    """Each of the methods with each of the draft lengths, where it has one; what is chosen already is left out.

    Raises:
        ConfigError: no method has a draft length.
    """
    varied = [each for each in chosen if draft_length(each.name) is None and _has_length(each.speculation)]
    if not varied:
        names = ", ".join(each.name for each in chosen)
        raise ConfigError(
            f"--sweep-tokens: none of {names} has a draft length to vary. The merge auto sizes drafts itself, and "
            "EAGLE trees follow --tree-nodes; give --methods with ngram, eagle, or ngram-eagle:union"
        )
    known = {each.name for each in chosen}
    swept = [_with_length(each, length) for each in varied for length in lengths]
    return [each for each in swept if each.name not in known]


def draft_length(name: str) -> int | None:
    """The draft length in a method's name, or None: not every name has one."""
    _, at, length = name.partition("@")
    return int(length) if at else None


def check_lengths(chosen: Seq[Named], max_draft_tokens: int) -> None:
    """Raise ConfigError where a name promises more draft tokens than an engine directory verifies."""
    for name, _ in chosen:
        length = draft_length(name)
        if length is not None and length > max_draft_tokens:
            raise ConfigError(
                f"{name}: the engine directory verifies {max_draft_tokens} draft tokens at most; "
                f"build it with --max-draft-tokens {length}, or draft less"
            )


def _parse(name: str, base: SpeculationConfig) -> Named:
    stem, at, length = name.partition("@")
    method, _, merge = stem.partition(":")
    speculation = dataclasses.replace(base, method=method, merge=merge or base.merge)
    if merge and method != "ngram-eagle":
        raise ConfigError(f"--methods {name}: only ngram-eagle has merges")
    if not at:
        return Named(name, speculation)
    if not length.isdecimal() or not _has_length(speculation):
        raise ConfigError(
            f"--methods {name}: only ngram, EAGLE chains, and the merges exclusive and union of both take a draft "
            "length, as in ngram@5"
        )
    return _with_length(Named(stem, speculation), int(length))


def _with_length(named: Named, length: int) -> Named:
    name = f"{named.name}@{length}"
    base = named.speculation
    ngram = base.ngram_tokens if base.method == "eagle" else length
    eagle = base.eagle_tokens if base.method == "ngram" else length
    try:
        speculation = dataclasses.replace(base, ngram_tokens=ngram, eagle_tokens=eagle)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return Named(name, speculation)


def _has_length(speculation: SpeculationConfig) -> bool:
    if speculation.method in HEAD_METHODS and speculation.eagle_topk > 1:
        return False
    return speculation.method != "none" and not (speculation.method == "ngram-eagle" and speculation.merge == AUTO)
