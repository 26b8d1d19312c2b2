"""The wrong wirings that matter lower the acceptance length of the demo head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from wrong_wirings import COSTLY, RIGHT, Wiring, acceptance_length, build_wiring, measure, open_wiring

from trtspec.bench.datasets import load_dataset

pytestmark = pytest.mark.slow
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def prompts() -> Sequence[Any]:
    return [item.messages for item in load_dataset("chat", 5)]


@pytest.fixture(scope="module")
def right(prompts: Sequence[Any], tmp_path_factory: pytest.TempPathFactory) -> float:
    directory = tmp_path_factory.mktemp("right") / "engines"
    build_wiring(RIGHT, directory)
    with open_wiring(RIGHT, directory) as session:
        return acceptance_length(session, prompts, NEW_TOKENS)


@pytest.mark.parametrize("wiring", COSTLY, ids=lambda wiring: wiring.name)
def test_wrong_wiring_costs_acceptance(wiring: Wiring, prompts: Sequence[Any], right: float) -> None:
    (wrong,) = measure(wiring, [prompts], NEW_TOKENS)
    assert wrong < right - 0.05
