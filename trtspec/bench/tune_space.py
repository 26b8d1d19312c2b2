"""What `trtspec tune` tries: other values of the settings that act under a method, a few at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from trtspec.config import AUTO, EXCLUSIVE, HEAD_METHODS, MERGES, OCCURRENCES, SpeculationConfig
from trtspec.errors import ConfigError

METHOD, SHAPE = "method", "eagle shape"
"""The steps that change several fields together; all others are named by the one they change."""
_VALUES: dict[str, tuple[Any, ...]] = {
    "ngram_tokens": (3, 5, 8, 10, 16, 24, 32),
    "ngram_min": (1, 2, 3, 4),
    "ngram_max": (3, 5, 8, 12),
    "ngram_branches": (1, 2, 3),
    "ngram_occurrence": OCCURRENCES,
    "hybrid_ngram_min": (2, 3, 4, 6, 8),
    "eagle_topk": (2, 4, 8),
    "eagle_depth": (1, 2, 3, 4, 6),
    "tree_nodes": (4, 7, 10, 15, 24, 32),
}
"""What a step of one field tries."""
_CHAINS = (1, 2, 3, 4, 5, 7)
"""EAGLE chains by their lengths."""
_TREES = ((2, 1, 4), (2, 2, 7), (4, 3, 15), (8, 4, 24))
"""EAGLE trees by eagle_topk, eagle_depth and tree_nodes."""
_LOOKUP = ("ngram_tokens", "ngram_min", "ngram_max", "ngram_branches", "ngram_occurrence")
_AUTO_LOOKUP = ("ngram_min", "ngram_max", "ngram_occurrence")
"""Of a lookup that the policy sizes: it takes the first branch, and cuts it itself."""
_TAIL = ("hybrid_ngram_min", "ngram_tokens")
"""Of a lookup behind EAGLE's own path, which is there for chains only."""
_CAPPED = ("ngram_tokens", "eagle_tokens", "tree_nodes")
"""What a directory's max_draft_tokens cuts."""


@dataclass(frozen=True)
class Space:
    """The settings that an engine directory can be run with."""

    methods: tuple[str, ...]
    max_draft_tokens: int

    def steps(self, settings: SpeculationConfig) -> list[str]:
        """The names of the steps from these settings, in the order in which they promise most."""
        method, is_tree = settings.method, settings.eagle_topk > 1
        tree = ("eagle_topk", "eagle_depth", "tree_nodes") if is_tree else ()
        if method == "ngram":
            names: tuple[str, ...] = _LOOKUP
        elif method == "eagle":
            names = (SHAPE, *tree)
        elif method == "ngram-eagle" and settings.merge == AUTO:
            names = (*_AUTO_LOOKUP, SHAPE, *(tree or _TAIL))
        elif method == "ngram-eagle":
            trusted = ("hybrid_ngram_min",) if settings.merge == EXCLUSIVE or not is_tree else ()
            names = ("ngram_tokens", SHAPE, *tree, *trusted, *_LOOKUP[1:])
        else:
            names = ()
        return [METHOD, *names]

    def alternatives(self, step: str, settings: SpeculationConfig) -> list[SpeculationConfig]:
        """What a step tries in place of these settings: each does something else, and they are not among them."""
        if step == METHOD:
            found = self._methods(settings)
        elif step == SHAPE:
            found = _shapes(settings)
        else:
            found = [_changed(settings, **{step: value}) for value in _VALUES[step]]
        different: dict[Hashable, SpeculationConfig] = {}
        for each in found:
            if each is not None:
                different.setdefault(self.key(each), each)
        different.pop(self.key(settings), None)
        return list(different.values())

    def key(self, settings: SpeculationConfig) -> Hashable:
        """Equal for settings that do the same in this directory."""
        acting = self.acting(settings)
        return tuple((name, value) for name, value in self._effective(settings).items() if name in acting)

    def label(self, settings: SpeculationConfig) -> str:
        """The method, and what acts under it with other values than SpeculationConfig's defaults."""
        plain, acting = SpeculationConfig(), self.acting(settings)
        merge = f":{settings.merge}" if settings.method == "ngram-eagle" else ""
        values = ((name, getattr(settings, name)) for name in acting if name not in ("method", "merge"))
        changed = [f"{name}={value}" for name, value in values if value != getattr(plain, name)]
        return " ".join((f"{settings.method}{merge}", *changed))

    def acting(self, settings: SpeculationConfig) -> tuple[str, ...]:
        """The fields that do anything under these settings' method."""
        fields = {name for name in self.steps(settings) if name not in (METHOD, SHAPE)} | {"method"}
        if settings.method in HEAD_METHODS:
            # `auto` says itself how long a chain is.
            sized = settings.method == "ngram-eagle" and settings.merge == AUTO
            fields |= {"eagle_topk"} | ({"eagle_tokens"} if settings.eagle_topk == 1 and not sized else set())
        if settings.method == "ngram-eagle":
            fields.add("merge")
        return tuple(field.name for field in dataclasses.fields(settings) if field.name in fields)

    def _methods(self, settings: SpeculationConfig) -> list[SpeculationConfig | None]:
        found = []
        for method in self.methods:
            merges = MERGES if method == "ngram-eagle" else (settings.merge,)
            found += [_changed(settings, method=method, merge=merge) for merge in merges]
        return found

    def _effective(self, settings: SpeculationConfig) -> dict[str, Any]:
        values = dataclasses.asdict(settings)
        return {**values, **{name: min(values[name], self.max_draft_tokens) for name in _CAPPED}}


def _shapes(settings: SpeculationConfig) -> list[SpeculationConfig | None]:
    # Where the length doesn't act, the first is all that is tried.
    lengths = (settings.eagle_tokens, *_CHAINS)
    chains = [_changed(settings, eagle_topk=1, eagle_tokens=length) for length in lengths]
    trees = [_changed(settings, eagle_topk=k, eagle_depth=depth, tree_nodes=nodes) for k, depth, nodes in _TREES]
    return chains + trees


def _changed(settings: SpeculationConfig, **fields: Any) -> SpeculationConfig | None:
    """The settings with other values, or None where those don't fit the others."""
    try:
        return dataclasses.replace(settings, **fields)
    except ConfigError:
        return None
