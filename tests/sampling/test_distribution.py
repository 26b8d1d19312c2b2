"""Sampled tokens are distributed as the oracle's exact probabilities say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import penalised, probabilities

from trtspec.config import SamplingParams
from trtspec.sampling import Sampler
from trtspec.sampling.filters import filter_logits
from trtspec.sampling.noise import GumbelNoise
from trtspec.sampling.penalties import TokenCounts

LOGITS = [1.5, -0.5, 2.0, 0.0, 1.0, 1.5]
SEEDS, POSITIONS = 200, 1000
PROMPT, OUTPUT = [0, 3], [2, 2, 1]
# What one in a thousand samples of the true distribution exceeds, by degrees of freedom.
CHI_SQUARED = {1: 10.828, 2: 13.816, 3: 16.266, 4: 18.467, 5: 20.515}


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    """float32 `[200_000, 6]`, of many seeds and positions."""
    rows = [GumbelNoise(seed, len(LOGITS)) for seed in range(SEEDS)]
    return np.array([stream.at(position) for stream in rows for position in range(POSITIONS)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"temperature": 1.4, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "temperature": 0.8, "top_p": 0.95},
    ],
)
def test_chi_squared(noise: np.ndarray, options: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, "seed": 0, **options})
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    exact = np.array(probabilities(penalised(LOGITS, PROMPT, OUTPUT, *penalties), params))
    scores = np.array([LOGITS], dtype=np.float32)
    counts = TokenCounts(params, np.array(PROMPT), len(LOGITS))
    counts.add(OUTPUT)
    counts.apply(scores, np.zeros(0, dtype=np.int32), np.ones((1, 1), dtype=bool))
    filter_logits(scores, params)
    drawn = np.bincount((scores + noise).argmax(axis=1), minlength=len(LOGITS))
    expected = exact * len(noise)
    possible = exact > 0
    assert drawn[~possible].sum() == 0
    statistic = ((drawn - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < CHI_SQUARED[np.count_nonzero(possible) - 1]


def test_the_sampler_draws_these_tokens(noise: np.ndarray) -> None:
    """Row i of a chain is the token at position i: the noise that the test above adds itself."""
    params = SamplingParams(temperature=1.0, seed=3)
    sampler = Sampler(params, np.array([0]), len(LOGITS))
    rows = 500
    logits = np.tile(np.array(LOGITS, dtype=np.float32), (rows, 1))
    found = sampler.choose(logits, np.zeros(rows - 1, dtype=np.int32), np.tri(rows, dtype=bool), np.arange(rows))
    start = 3 * POSITIONS + 1
    assert found.tolist() == (logits[:1] + noise[start : start + rows]).argmax(axis=1).tolist()
