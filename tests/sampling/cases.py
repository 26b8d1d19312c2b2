"""Random requests for the sampling tests: parameters, histories, draft trees and logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from oracle import ancestors

from trtspec.config import SamplingParams


@dataclass(frozen=True)
class Case:
    """A verification of one sequence."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    tokens: list[int]
    """Draft tokens."""
    parents: list[int]
    """Row of each draft token's parent."""
    logits: np.ndarray

    @property
    def rows(self) -> int:
        """The root and the draft tokens."""
        return len(self.tokens) + 1

    @property
    def draft_tokens(self) -> np.ndarray:
        """As the sampler takes them."""
        return np.array(self.tokens, dtype=np.int32)

    @property
    def mask(self) -> np.ndarray:
        """bool `[rows, rows]`"""
        mask = np.zeros((self.rows, self.rows), dtype=bool)
        for row in range(self.rows):
            mask[row, [0, *ancestors(self.parents, row)]] = True
        return mask

    @property
    def depths(self) -> np.ndarray:
        """int64 `[rows]`"""
        return np.array([len(ancestors(self.parents, row)) for row in range(self.rows)])

    def path(self, row: int) -> list[int]:
        """Draft tokens on the way to a row."""
        return [self.tokens[at - 1] for at in ancestors(self.parents, row)]


def either(usual: float, low: float, high: float) -> st.SearchStrategy[float]:
    """A parameter that is often off."""
    return st.one_of(st.just(usual), st.floats(low, high, allow_subnormal=False))


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0, 0.01, 0.5, 0.8, 1, 1.7, 30]),
    top_k=st.sampled_from([0, 0, 0, 1, 2, 3, 7, 100]),
    top_p=st.one_of(st.just(1), st.sampled_from([0.25, 0.5, 0.75]), st.floats(0.01, 1)),
    min_p=st.one_of(st.just(0), st.just(1), st.floats(0, 1, allow_subnormal=False)),
    repetition_penalty=either(1, 0.5, 2),
    presence_penalty=either(0, -2, 2),
    frequency_penalty=either(0, -2, 2),
    seed=st.integers(0, 2**64 - 1),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small vocabularies, so that tokens repeat; few distinct logits, so that they tie, or many."""
    vocab = draw(st.integers(2, 40))
    history = st.lists(st.integers(0, vocab - 1), max_size=12)
    size = draw(st.integers(0, 9))
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=size, max_size=size))
    parents = [draw(st.integers(0, row)) for row in range(size)]
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    if draw(st.booleans()):
        logits = random.integers(-3, 4, (size + 1, vocab)).astype(np.float32)
    else:
        logits = (random.standard_normal((size + 1, vocab)) * draw(st.sampled_from([1, 5]))).astype(np.float32)
    prompt = draw(st.integers(0, vocab - 1).flatmap(lambda first: history.map(lambda rest: [first, *rest])))
    return Case(draw(params), prompt, draw(history), tokens, parents, logits)
