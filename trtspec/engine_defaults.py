"""Drafting settings that were measured to be the fastest, kept in an engine directory as its defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from trtspec.config import SpeculationConfig

_PLAIN = SpeculationConfig()


@dataclass(frozen=True)
class DefaultsOrigin:
    """Where defaults come from."""

    dataset: str
    """As it was named to `trtspec tune`."""
    prompts: int
    batch_size: int
    max_new_tokens: int
    gain: float
    """Tokens per second by those of the settings before."""
    machine: str
    """What the measurement holds for: runtime, processor, threads."""
    date: str
    """ISO 8601, UTC."""
    trtspec_version: str


@dataclass(frozen=True)
class TunedDefaults:
    """What takes the place of SpeculationConfig's own defaults."""

    speculation: SpeculationConfig
    """With a method."""
    origin: DefaultsOrigin

    def to_json(self) -> dict[str, Any]:
        """A JSON object; of the settings, the method and what differs from SpeculationConfig's defaults."""
        return {"speculation": differing(self.speculation), "origin": asdict(self.origin)}

    @classmethod
    def from_json(cls, data: Any, methods: tuple[str, ...]) -> TunedDefaults:
        """The object that `to_json` made.

        Args:
            methods: those that the directory supports.

        Raises:
            ValueError, ConfigError: a field is unknown, missing or has a value that cannot be used.
        """
        data = _object(data, "defaults", {"speculation", "origin"})
        names = {field.name for field in fields(SpeculationConfig)}
        settings = _object(data["speculation"], "speculation", {"method"}, names)
        if settings["method"] not in methods:
            raise ValueError(f"method {settings['method']!r} is none of: {', '.join(methods)}")
        return cls(SpeculationConfig(**settings), _origin(data["origin"]))


def differing(speculation: SpeculationConfig) -> dict[str, Any]:
    """The method, and the fields whose values are not SpeculationConfig's defaults."""
    values = asdict(speculation)
    return {name: value for name, value in values.items() if name == "method" or value != getattr(_PLAIN, name)}


def _origin(data: Any) -> DefaultsOrigin:
    kinds = {field.name: {"str": str, "int": int, "float": float}[str(field.type)] for field in fields(DefaultsOrigin)}
    values = _object(data, "origin", set(kinds))
    for name, value in values.items():
        # JSON writes 1.0 as a float; true and false are integers to Python.
        if type(value) is not kinds[name]:
            raise ValueError(f"origin.{name} is {value!r}; expected {kinds[name].__name__}")
    if values["prompts"] < 1 or values["batch_size"] < 1 or values["max_new_tokens"] < 1:
        raise ValueError("origin holds a count below 1")
    if not math.isfinite(values["gain"]) or values["gain"] <= 0:
        raise ValueError(f"origin.gain is {values['gain']!r}; expected a number above 0")
    return DefaultsOrigin(**values)


def _object(data: Any, name: str, needed: set[str], known: set[str] | None = None) -> Mapping[str, Any]:
    """`data` as an object with all the needed keys and no unknown one."""
    if not isinstance(data, dict):
        raise ValueError(f"{name} is {data!r}; expected an object")
    if missing := sorted(needed - data.keys()):
        raise ValueError(f"{name} lacks {', '.join(missing)}")
    if unknown := sorted(data.keys() - (known or needed)):
        raise ValueError(f"{name} has the unknown field {unknown[0]}")
    return data
