"""From logits to tokens: the most probable ones and their log-probabilities, the lowest id on ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec import sampling
from trtspec.sampling import choose


def by_sorting(logits: torch.Tensor, count: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda i: (-row[i], i))[:count] for row in logits.tolist()]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 30),
    st.sampled_from([2, 5, 1000]),
    st.sampled_from(["float32", "float16"]),
    st.sampled_from(["top_k", "_top_k_on_device"]),
    st.data(),
)
def test_top_k(rows: int, vocab: int, distinct: int, dtype: str, function: str, data: st.DataObject) -> None:
    """Many ties, none, and all: also across the last place."""
    count = data.draw(st.integers(1, vocab))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    logits = (torch.randint(0, distinct, (rows, vocab), generator=generator) / 4 - 1).to(getattr(torch, dtype))
    right = by_sorting(logits, count)
    log_probs = torch.log_softmax(logits.double(), dim=1).gather(1, torch.tensor(right))
    ids, found = getattr(choose, function)(logits.float() if function != "top_k" else logits, count)
    assert ids.tolist() == right
    assert found.dtype == np.float32
    assert found == pytest.approx(log_probs.numpy(), abs=2e-5)
    assert (found <= 0).all()


def test_top_k_of_large_logits() -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4, 1e4], [-1e30, -1e30, 0.0, -1e30]])
    ids, log_probs = sampling.top_k(logits, 2)
    assert ids.tolist() == [[0, 3], [2, 0]]
    total = np.log(2 + np.exp(-1))
    assert log_probs == pytest.approx(np.array([[-total, -total], [0, -1e30]]), rel=1e-5)


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    assert sampling.greedy(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 0.0]])).tolist() == [1, 0]
