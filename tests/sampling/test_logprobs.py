"""Log-probabilities against float64 and against sorting."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.sampling import TokenLogprob, token_logprobs


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 30), st.sampled_from([2, 5, 1000]), st.integers(0, 20), st.integers(0, 10**6))
def test_token_logprobs(rows: int, vocab: int, distinct: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = (random.integers(0, distinct, (rows, vocab)) / 4 - 1).astype(np.float32)
    chosen = random.integers(0, vocab, rows)
    before = logits.copy()
    found = token_logprobs(logits, chosen, count)
    assert np.array_equal(logits, before)
    right = torch.log_softmax(torch.from_numpy(logits).double(), dim=1).tolist()
    for row, token, one in zip(right, chosen.tolist(), found, strict=True):
        assert one.token_id == token
        assert one.logprob == pytest.approx(row[token], abs=1e-12)
        best = sorted(range(vocab), key=lambda i: (-row[i], i))[:count]
        assert [i for i, _ in one.top] == best
        assert [logprob for _, logprob in one.top] == pytest.approx([row[i] for i in best], abs=1e-12)


def test_impossible_tokens_are_no_alternatives() -> None:
    logits = np.array([[-np.inf, 1e4, -np.inf, 1e4 - 2]], dtype=np.float32)
    [found] = token_logprobs(logits, np.array([3]), 4)
    assert [token for token, _ in found.top] == [1, 3]
    assert found.logprob == pytest.approx(-2 - np.log1p(np.exp(-2)))


def test_json() -> None:
    found = TokenLogprob(7, -0.5, ((7, -0.5), (3, -2.0))).to_json()
    assert json.loads(json.dumps(found)) == {"id": 7, "logprob": -0.5, "top": [[7, -0.5], [3, -2.0]]}
    [plain] = token_logprobs(np.zeros((1, 4), dtype=np.float32), np.array([2]), 0)
    assert json.loads(json.dumps(plain.to_json())) == {"id": 2, "logprob": pytest.approx(-np.log(4)), "top": []}
