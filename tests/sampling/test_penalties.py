"""Penalties against the oracle, to the bit, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Case, cases
from hypothesis import given, settings
from oracle import penalised

from trtspec.config import SamplingParams
from trtspec.sampling.penalties import TokenCounts

NOTHING = (np.zeros(0, dtype=np.int32), np.ones((1, 1), dtype=bool))


def counts_of(case: Case, output: list[int]) -> TokenCounts:
    counts = TokenCounts(case.params, np.array(case.prompt, dtype=np.int32), case.logits.shape[1])
    counts.add(output)
    return counts


@settings(max_examples=400, deadline=None)
@given(cases())
def test_apply(case: Case) -> None:
    """float32 to the bit: the rows of a tree, and each row decoded by itself."""
    together = case.logits.copy()
    counts_of(case, case.output).apply(together, case.draft_tokens, case.mask)
    params = case.params
    for row in range(case.rows):
        output = case.output + case.path(row)
        right = penalised(
            case.logits[row].tolist(),
            case.prompt,
            output,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        assert together[row].tolist() == right
        alone = case.logits[row : row + 1].copy()
        counts_of(case, output).apply(alone, *NOTHING)
        assert alone.tobytes() == together[row].tobytes()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_rows_may_be_a_part_of_the_tree(case: Case) -> None:
    whole, last = case.logits.copy(), case.logits[-1:].copy()
    counts = counts_of(case, case.output)
    counts.apply(whole, case.draft_tokens, case.mask)
    counts.apply(last, case.draft_tokens, case.mask[-1:])
    assert last.tobytes() == whole[-1].tobytes()


@pytest.mark.parametrize(
    ("options", "right"),
    [
        # Prompt: 0 and 1; output: 1, 2, 2; logits: 4, 4, -4, 4.
        ({"repetition_penalty": 2.0}, [2, 2, -8, 4]),
        ({"presence_penalty": 0.5}, [4, 3.5, -4.5, 4]),
        ({"frequency_penalty": 0.5}, [4, 3.5, -5, 4]),
        ({"frequency_penalty": -1.0, "presence_penalty": 2.0}, [4, 3, -4, 4]),
        ({"repetition_penalty": 2.0, "frequency_penalty": 1.0}, [2, 1, -10, 4]),
    ],
)
def test_definitions(options: dict[str, float], right: list[float]) -> None:
    counts = TokenCounts(SamplingParams(**options), np.array([0, 1, 1]), 4)  # type: ignore[arg-type]
    counts.add([1, 2])
    counts.add([2])
    logits = np.array([[4, 4, -4, 4]], dtype=np.float32)
    counts.apply(logits, *NOTHING)
    assert logits.tolist() == [right]


def test_forbidden_tokens_stay_forbidden() -> None:
    params = SamplingParams(repetition_penalty=0.5, presence_penalty=-2, frequency_penalty=-2)
    counts = TokenCounts(params, np.array([0]), 3)
    counts.add([0, 1])
    logits = np.full((1, 3), -np.inf, dtype=np.float32)
    counts.apply(logits, *NOTHING)
    assert (logits == -np.inf).all()
