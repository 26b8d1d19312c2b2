"""What is known of a draft head while it is being read, and the decisions made on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtspec.checkpoint.draft_head.names import RenamedSource, name_in_file
from trtspec.checkpoint.target import TargetConfig
from trtspec.errors import CheckpointError


@dataclass(frozen=True)
class Decision:
    """A wiring decision and where it came from: "tensor", "config", "option" or "default"."""

    name: str
    value: Any
    origin: str
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Value, origin and, where there is one, note."""
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return {"value": value, "origin": self.origin, **({"note": self.note} if self.note else {})}


@dataclass
class Findings:
    """Decisions and warnings, in the order in which they were found; `unused` names tensors that are left out."""

    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)

    def decide(self, name: str, value: Any, origin: str, note: str = "") -> None:
        """Record a decision."""
        self.decisions.append(Decision(name, value, origin, note))

    def warn(self, text: str) -> None:
        """Record a warning of one line."""
        self.warnings.append(text)


@dataclass(frozen=True)
class Reading:
    """A draft head's file under canonical names, its configuration as one flat mapping, and the target.

    `config` is config.json with nested model configurations merged into it; `options` are the user's, parsed.
    """

    kind: str
    source_format: str
    config: Mapping[str, Any]
    tensors: RenamedSource
    target: TargetConfig
    options: Mapping[str, Any]
    findings: Findings

    def has(self, name: str) -> bool:
        """Whether the file has the tensor of this canonical name."""
        return name in self.tensors.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor of this canonical name.

        Raises:
            CheckpointError: it is missing.
        """
        if not self.has(name):
            raise self.missing(name)
        return self.tensors.tensors[name].shape

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows and columns of a tensor.

        Raises:
            CheckpointError: it is missing, or no matrix.
        """
        shape = self.shape(name)
        if len(shape) != 2:
            raise CheckpointError(f"{self.name(name)} has shape {list(shape)}, expected a matrix")
        return shape[0], shape[1]

    def vector(self, name: str) -> int:
        """Length of a one-dimensional tensor.

        Raises:
            CheckpointError: it is missing, or has more axes.
        """
        shape = self.shape(name)
        if len(shape) != 1:
            raise CheckpointError(f"{self.name(name)} has shape {list(shape)}, expected one axis")
        return shape[0]

    def name(self, canonical: str) -> str:
        """What the file calls a weight, or files of its kind do."""
        part = self.tensors.parts.get(canonical)
        return name_in_file(self.kind, canonical) if part is None else part.name

    def missing(self, name: str, reason: str = "") -> CheckpointError:
        """The error for a tensor that the file should have."""
        because = f" ({reason})" if reason else ""
        return CheckpointError(
            f"the draft head has no tensor {name_in_file(self.kind, name)}{because}; it is incomplete, or no "
            f"{self.kind} head: fetch it again"
        )

    def leave_out(self, name: str, reason: str) -> None:
        """Leave a tensor of the file unused, with a warning."""
        self.findings.unused.add(name)
        self.findings.warn(f"{self.name(name)} is ignored: {reason}")

    def flag(self, *keys: str) -> bool | None:
        """The one value that these keys have, at top level or inside eagle_config; None where all are missing.

        Raises:
            CheckpointError: a value is not true or false, or two contradict each other.
        """
        found = {f"{place}{key}": value for key in keys for place, value in self._places(key)}
        for name, value in found.items():
            if not isinstance(value, bool):
                raise CheckpointError(f"config.json: {name} is {value!r}, expected true or false")
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name} {str(value).lower()}" for name, value in found.items())
            raise CheckpointError(f"config.json contradicts itself: {listed}; make them equal")
        return next(iter(found.values()), None)

    def integer(self, key: str) -> int | None:
        """A count at top level; None where it is missing or null.

        Raises:
            CheckpointError: it is no integer of at least 1.
        """
        value = self.config.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {key} is {value!r}, expected an integer of at least 1")
        return value

    def entry(self, key: str) -> Any:
        """The value of a key at top level, else inside eagle_config; None where it is missing or null."""
        return next((value for _, value in self._places(key)), None)

    def compare(self, key: str, value: int) -> None:
        """Warn where a count of config.json disagrees with what the tensors show."""
        stated = self.integer(key)
        if stated is not None and stated != value:
            self.findings.warn(f"config.json says {key} {stated}, the tensors show {value}: the tensors are followed")

    def _places(self, key: str) -> list[tuple[str, Any]]:
        nested = self.config.get("eagle_config") or {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"config.json: eagle_config is a {type(nested).__name__}, expected an object")
        both = [("", self.config.get(key)), ("eagle_config.", nested.get(key))]
        return [(place, value) for place, value in both if value is not None]
