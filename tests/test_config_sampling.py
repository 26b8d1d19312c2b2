"""What SamplingParams accepts and refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trtspec.config import SamplingParams
from trtspec.errors import ConfigError

HUGE = 10**400
NUMBERS = {
    "temperature": ([0, 1e-6, 1, 0.7, 100], [-0.1, -1, 1e-7, 1e7, HUGE]),
    "top_p": ([1, 0.5, 1e-9], [0, 0.0, -0.5, 1.01, HUGE]),
    "min_p": ([0, 1, 0.05], [-0.01, 1.5]),
    "repetition_penalty": ([1, 0.5, 2, 1.1], [0, -1, -0.0, 1e7]),
    "presence_penalty": ([-2, 2, 0, 0.5], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2, 0, 0.5], [-2.1, 2.1]),
}
INTEGERS: dict[str, tuple[list[Any], list[Any]]] = {
    "top_k": ([0, 1, 50, 10**9], [-1, 1.0, "5", True, None]),
    "seed": ([None, 0, 2**64 - 1], [-1, 2**64, 1.0, "1", False]),
    "logprobs": ([None, 0, 20], [-1, 21, 1.0, "1", True]),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NUMBERS for value in NUMBERS[name][0]])
def test_numbers(name: str, value: float) -> None:
    found = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]
    assert found == value
    assert type(found) is float


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in INTEGERS for value in INTEGERS[name][0]])
def test_integers(name: str, value: int | None) -> None:
    assert getattr(SamplingParams(**{name: value}), name) is value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in NUMBERS for value in (*NUMBERS[name][1], math.nan, math.inf, -math.inf, True, "1", None)]
    + [(name, value) for name in INTEGERS for value in INTEGERS[name][1]],
)
def test_refused(name: str, value: Any) -> None:
    """The message names the field and the value, and says what to give."""
    with pytest.raises(ConfigError, match=rf"^{name} is .*; give ") as refused:
        SamplingParams(**{name: value})
    assert repr(value) in str(refused.value)


def test_kinds() -> None:
    plain, sampled = SamplingParams(top_k=3, top_p=0.5, min_p=0.1, seed=4), SamplingParams(temperature=0.1)
    assert plain.is_greedy
    assert plain.is_plain
    assert not plain.has_penalties
    assert not sampled.is_greedy
    assert not sampled.is_plain
    for name, value in (("repetition_penalty", 1.1), ("presence_penalty", -0.1), ("frequency_penalty", 0.1)):
        penalised = SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert penalised.has_penalties
        assert penalised.is_greedy
        assert not penalised.is_plain
