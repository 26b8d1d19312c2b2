"""Filters: exactly which tokens are left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import remaining

from trtspec.config import SamplingParams
from trtspec.sampling import filters as module
from trtspec.sampling.filters import filter_logits


def left(logits: np.ndarray, **options: float) -> list[list[int]]:
    """Ids that are left of each row."""
    params = SamplingParams(**{"temperature": 1.0, **options})  # type: ignore[arg-type]
    scores = logits.astype(np.float32)
    filter_logits(scores, params)
    return [np.flatnonzero(row > -np.inf).tolist() for row in scores]


def log(*probabilities: float) -> np.ndarray:
    return np.log(np.array([probabilities]))


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 2]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 0.89}, [0, 1, 2, 3]),
        ({"top_p": 0.91}, [0, 1, 2, 3, 4]),
        ({"top_k": 2, "top_p": 0.5}, [1]),
        ({"top_k": 2, "top_p": 0.58}, [1, 2]),
        ({"min_p": 0.5}, [1, 2]),
        ({"min_p": 0.2}, [0, 1, 2, 3, 4]),
        ({"min_p": 1}, [1]),
        ({"min_p": 0.5, "top_k": 1}, [1]),
        # Temperature first: at 0.5 probabilities are squared.
        ({"min_p": 0.5, "temperature": 0.5}, [1, 2]),
        ({"min_p": 0.6, "temperature": 0.5}, [1]),
        ({"top_p": 0.9, "temperature": 0.5}, [0, 1, 2]),
    ],
)
def test_what_is_left(options: dict[str, float], right: list[int]) -> None:
    assert left(log(0.1001, 0.4, 0.3, 0.1, 0.0999), **options) == [right]


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 4}, [0, 1, 3, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.2}, [1]),
        ({"top_p": 0.6}, [1, 3, 4]),
        ({"min_p": 1}, [1, 3, 4]),
    ],
)
def test_the_lower_of_equal_ids_stays(options: dict[str, float], right: list[int]) -> None:
    assert left(np.array([[1.0, 2, 1, 2, 2, 1]]), **options) == [right]


def test_top_p_that_is_reached_exactly() -> None:
    assert left(np.zeros((1, 4)), top_p=0.5) == [[0, 1]]
    assert left(np.zeros((1, 4)), top_p=0.75) == [[0, 1, 2]]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([1, 2, 7, 511, 512, 700, 1536, 2000]),
    st.integers(1, 5),
    st.sampled_from([3, 50, 10**6]),
    st.floats(0.3, 30),
    st.integers(0, 2100),
    st.one_of(st.just(1.0), st.floats(0.001, 1)),
    st.sampled_from([0, 0, 0.001, 1]),
    st.integers(0, 10**6),
)
def test_filters(
    vocab: int, rows: int, distinct: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Against the oracle, up to tokens at an edge that float64 cannot place, and each row as if alone."""
    random = np.random.default_rng(seed)
    logits = (random.integers(0, distinct, (rows, vocab)) / distinct * 20).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    together = logits.copy()
    filter_logits(together, params)
    for row, scores in zip(logits, together, strict=True):
        few, many = (remaining(row.tolist(), params, slack) for slack in (1e-6, -1e-6))
        if len(few) > len(many):
            few, many = many, few
        found = {int(token): float(scores[token]) for token in np.flatnonzero(scores > -np.inf)}
        assert few.items() <= found.items() <= many.items()
        assert found
        alone = row[None].copy()
        filter_logits(alone, params)
        assert alone.tobytes() == scores.tobytes()


def test_few_tokens_are_left_of_a_flat_distribution_of_many() -> None:
    logits = np.linspace(1, 0, 30000)[None] * 1e-3
    [kept] = left(logits, top_p=0.25)
    assert kept == list(range(len(kept)))
    assert len(kept) == pytest.approx(7500, rel=2e-3)


def test_groups_bound_the_kth_largest() -> None:
    random = np.random.default_rng(1)
    logits = random.integers(-1000, 1000, (3, 5 * module.GROUPS + 13)).astype(np.float32)
    logits[2] = 7
    for count in (1, 2, 50, module.GROUPS - 1, module.GROUPS, module.GROUPS + 1, logits.shape[1]):
        right = -np.sort(-logits, axis=1)[:, count - 1 : count]
        assert np.array_equal(module._kth_largest(logits, count), right)
