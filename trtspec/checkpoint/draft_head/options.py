"""The wiring decisions a user can make for a draft head where neither tensors nor config.json settle them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trtspec.checkpoint.draft_head.config import EAGLE, EAGLE3, KINDS
from trtspec.errors import ConfigError


@dataclass(frozen=True)
class Option:
    """One key that --eagle-option accepts; `parse` raises ValueError with what it expected."""

    help: str
    parse: Callable[[str], Any]
    kinds: tuple[str, ...] = KINDS


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("a number above 0")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("an integer of at least 1")
    return int(text)


def _boundaries(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    values = [int(part) for part in parts if part.isdecimal()]
    if len(values) != len(parts) or values != sorted(set(values)):
        raise ValueError("ascending integers such as 2,16,29, boundary b being the target's state after b layers")
    return tuple(values)


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(" or ".join(choices))
        return text

    return parse


OPTIONS: dict[str, Option] = {
    "aux_layers": Option(
        "boundaries of the target whose states the head takes, such as 2,16,29: b is the state after b layers",
        _boundaries,
        (EAGLE3,),
    ),
    "norm_before_residual": Option(
        "layer 0's attention is added to the normed hidden state (true) or to the raw one (false)", _boolean, (EAGLE3,)
    ),
    "norm_output": Option(
        "the head feeds back its hidden state after the output norm (true) or before it (false)", _boolean
    ),
    "output_norm": Option("a norm is applied before the LM head", _boolean),
    "input_norm": Option("layer 0 applies its input_layernorm", _boolean, (EAGLE,)),
    "double_hidden_norm": Option(
        "experimental, for heads that Model-Optimizer trained with a plain Llama layer: layer 0 attends over "
        "hidden_norm(input_layernorm(h)) in place of hidden_norm(h)",
        _boolean,
        (EAGLE3,),
    ),
    "embedding": Option("whose embedding table is used where both have one: target or head", _choice("target", "head")),
    "rope_theta": Option("base of the rotary embedding, in place of config.json's", _positive),
    "rope_scaling": Option("none: plain rotary embedding, without config.json's scaling", _choice("none")),
    "rms_norm_eps": Option("epsilon of the head's norms, in place of config.json's", _positive),
    "max_positions": Option("positions the head was trained for, in place of config.json's", _count),
}


def parse_options(options: Mapping[str, str]) -> dict[str, Any]:
    """The options' values by key.

    Raises:
        ConfigError: a key is unknown, or a value is not what its key takes.
    """
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in OPTIONS:
            raise ConfigError(f"EAGLE option {key!r} is unknown; choose one of: {', '.join(OPTIONS)}")
        try:
            values[key] = OPTIONS[key].parse(text)
        except ValueError as error:
            raise ConfigError(f"EAGLE option {key} is {text!r}; expected {error}") from None
    return values


def check_kind(options: Mapping[str, Any], kind: str) -> None:
    """Raise ConfigError where an option is given that this kind of head does not have."""
    for key in options:
        if kind not in OPTIONS[key].kinds:
            raise ConfigError(
                f"EAGLE option {key} is for {OPTIONS[key].kinds[0]} heads, this head is {kind}; leave it out"
            )
