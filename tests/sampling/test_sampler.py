"""The sampler against the oracle, and a tree's rows against decoding one token at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import Case, cases
from hypothesis import given, settings
from oracle import choices, gumbel

from trtspec.config import SamplingParams
from trtspec.errors import ConfigError
from trtspec.sampling import Sampler
from trtspec.sampling import sampler as module

ALONE = (np.zeros(0, dtype=np.int32), np.ones((1, 1), dtype=bool), np.zeros(1, dtype=np.int32))


def sampler_of(case: Case, output: list[int]) -> Sampler:
    sampler = Sampler(case.params, np.array(case.prompt, dtype=np.int32), case.logits.shape[1])
    sampler.commit(output)
    return sampler


def choose(case: Case) -> list[int]:
    chosen = sampler_of(case, case.output).choose(case.logits, case.draft_tokens, case.mask, case.depths)
    assert chosen.dtype == np.int64
    found: list[int] = chosen.tolist()
    return found


@settings(max_examples=600, deadline=None)
@given(cases())
def test_choose(case: Case) -> None:
    before = case.logits.copy()
    found = choose(case)
    assert np.array_equal(case.logits, before)
    for row, token in enumerate(found):
        output = case.output + case.path(row)
        position = len(case.prompt) + len(output)
        assert token in choices(case.logits[row].tolist(), case.prompt, output, case.params, position)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_rows_are_as_if_decoded_one_by_one(case: Case) -> None:
    alone = []
    for row in range(case.rows):
        sampler = sampler_of(case, case.output)
        for token in case.path(row):
            sampler.commit([token])
        alone += sampler.choose(case.logits[row : row + 1], *ALONE).tolist()
    assert choose(case) == alone


@settings(max_examples=100, deadline=None)
@given(cases())
def test_rows_are_taken_in_blocks(case: Case) -> None:
    expected = choose(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 2 * case.logits.shape[1])
        assert choose(case) == expected


@settings(max_examples=200, deadline=None)
@given(cases())
def test_top_k_1_is_greedy(case: Case) -> None:
    single = replace(case, params=replace(case.params, temperature=1.3, top_k=1))
    assert choose(single) == choose(replace(case, params=replace(case.params, temperature=0)))


def test_the_oracle_leaves_one_choice() -> None:
    """Or else agreement with it would say little."""
    random = np.random.default_rng(4)
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=5)
    logits = [random.standard_normal(30).astype(np.float32).tolist() for _ in range(200)]
    found = [choices(row, [1], [], params, position) for position, row in enumerate(logits)]
    assert sum(len(tokens) == 1 for tokens in found) >= 198
    assert len(set().union(*found)) > 15


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9}, {"top_k": 700}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}, {"temperature": 3}]
)
def test_rows_do_not_depend_on_one_another_in_a_large_vocabulary(options: dict[str, float]) -> None:
    random = np.random.default_rng(6)
    logits = (random.standard_normal((40, 20011)) * 3).astype(np.float32)
    params = SamplingParams(**{"temperature": 1.0, "seed": 2**64 - 1, **options})  # type: ignore[arg-type]
    sampler = Sampler(params, np.arange(5), 20011)
    together = sampler.choose(logits, np.zeros(39, np.int32), np.eye(40, dtype=bool), np.zeros(40, np.int32))
    assert together.tolist() == [int(sampler.choose(row[None], *ALONE)[0]) for row in logits]
    assert len(set(together.tolist())) > 5


def test_ties_go_to_the_lowest_id_without_noise() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    sampler = Sampler(params, np.array([0]), 4)
    assert sampler.choose(np.array([[4, 2, 2, 2]], dtype=np.float32), *ALONE).tolist() == [0]
    sampler.commit([1])
    assert sampler.choose(np.array([[3, 2, 2, 2]], dtype=np.float32), *ALONE).tolist() == [2]


def test_noise_is_that_of_the_position() -> None:
    sampler = Sampler(SamplingParams(temperature=1, seed=9), np.array([3, 4, 5]), 6)
    assert sampler.draft_noise(3).tolist() == pytest.approx([gumbel(9, 3, token) for token in range(6)], abs=1e-6)
    sampler.commit([1, 2])
    ids = np.array([4, 0])
    assert sampler.draft_noise(5, ids).tolist() == sampler.draft_noise(5)[ids].tolist()
    logits = np.zeros((1, 6), dtype=np.float32)
    assert sampler.choose(logits, *ALONE)[0] == sampler.draft_noise(5).argmax()


def test_the_distant_tail_is_never_chosen_by_mistake() -> None:
    """Logits that float32 exponentials cannot hold, and tokens that the target forbids."""
    logits = np.array([[1e4, -1e30, -np.inf, 1e4 - 1, -1e4]], dtype=np.float32)
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (4, 0.999999, 0.0), (5, 1 - 2**-53, 0.0), (0, 1.0, 1e-300)):
        params = SamplingParams(temperature=1e-6, top_k=top_k, top_p=top_p, min_p=min_p, seed=1)
        assert Sampler(params, np.array([1]), 5).choose(logits, *ALONE).tolist() == [0]


def test_temperature_needs_a_seed() -> None:
    with pytest.raises(ConfigError, match="seed is None"):
        Sampler(SamplingParams(temperature=0.5), np.array([1]), 4)


def test_greedy_decoding_has_no_noise() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=1, seed=1), np.array([1]), 4)
    with pytest.raises(ValueError, match="no noise"):
        sampler.draft_noise(1)
