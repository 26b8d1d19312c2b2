"""N-gram lookup against a brute-force oracle, and known cases of vLLM's rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.draft.ngram import NgramDrafter, lookup
from trtspec.draft.tree import EMPTY, NGRAM
from trtspec.sequence import Sequence

LONGEST = 6


def matches_by_length(tokens: list[int]) -> dict[int, list[int]]:
    """For each n, where the last n tokens occur earlier with at least one token behind them."""
    size = len(tokens)
    return {
        n: [start for start in range(size - n) if tokens[start : start + n] == tokens[size - n :]]
        for n in range(1, min(LONGEST, size - 1) + 1)
    }


def oracle(
    tokens: list[int], matches: dict[int, list[int]], ngram_min: int, ngram_max: int, num_tokens: int, occurrence: str
) -> list[int]:
    if num_tokens <= 0:
        return []
    for n in range(min(ngram_max, len(tokens) - 1), ngram_min - 1, -1):
        if matches[n]:
            start = matches[n][0]
            if occurrence == "latest":
                full = [s for s in matches[n] if s + n + num_tokens <= len(tokens)]
                start = full[-1] if full else start
            return tokens[start + n : start + n + num_tokens]
    return []


def histories() -> st.SearchStrategy[list[int]]:
    def random_tokens(shape: tuple[int, int, int]) -> list[int]:
        seed, size, alphabet = shape
        return [int(token) for token in np.random.default_rng(seed).integers(alphabet, size=size)]

    short = st.integers(1, 5).flatmap(lambda alphabet: st.lists(st.integers(0, alphabet - 1), max_size=24))
    long = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 300), st.integers(1, 5)).map(random_tokens)
    return st.one_of(short, long)


@settings(max_examples=120, deadline=None)
@given(histories())
def test_lookup_equals_brute_force(tokens: list[int]) -> None:
    matches, history = matches_by_length(tokens), np.array(tokens, dtype=np.int32)
    for occurrence in ("earliest", "latest"):
        for ngram_min in range(1, 5):
            for ngram_max in range(ngram_min, LONGEST + 1):
                for num_tokens in (0, 1, 2, 3, 5, 9):
                    expected = oracle(tokens, matches, ngram_min, ngram_max, num_tokens, occurrence)
                    found = lookup(
                        history,
                        ngram_min=ngram_min,
                        ngram_max=ngram_max,
                        num_tokens=num_tokens,
                        occurrence=occurrence,
                    )
                    assert found.tolist() == expected, (occurrence, ngram_min, ngram_max, num_tokens)


def test_lookup_leaves_the_history_alone() -> None:
    history = np.array([1, 2, 1, 2, 1], dtype=np.int32)
    history.setflags(write=False)
    assert lookup(history, ngram_min=1, ngram_max=3, num_tokens=2).tolist() == [2, 1]


# name, history, ngram_min, ngram_max, num_tokens, earliest (vLLM's rule), latest
CASES = [
    ("docs example", [1, 2, 3, 4, 2, 3], 2, 3, 4, [4, 2, 3], [4, 2, 3]),
    ("two occurrences", [7, 8, 1, 9, 7, 8, 2, 9, 7, 8], 2, 2, 2, [1, 9], [2, 9]),
    ("constant run", [5, 5, 5, 5], 1, 2, 3, [5, 5], [5, 5]),
    ("constant run, full continuation", [5, 5, 5, 5, 5, 5], 1, 2, 3, [5, 5, 5], [5, 5, 5]),
    ("overlap with the whole prefix", [1, 2, 1, 2], 2, 3, 4, [1, 2], [1, 2]),
    ("shorter than ngram_min", [3], 2, 3, 4, [], []),
    ("exactly ngram_min tokens", [3, 4], 2, 3, 4, [], []),
    ("match only at 1, ngram_min 2", [9, 1, 2, 9], 2, 3, 4, [], []),
    ("match only at 1, ngram_min 1", [9, 1, 2, 9], 1, 3, 4, [1, 2, 9], [1, 2, 9]),
    ("match at position 0", [1, 2, 9, 1, 2], 2, 2, 2, [9, 1], [9, 1]),
    ("end of sequence in the continuation", [1, 2, 3, 0, 4, 1, 2], 2, 2, 4, [3, 0, 4, 1], [3, 0, 4, 1]),
    (
        "longest match beats a longer continuation",
        [8, 3, 1, 6, 5, 8, 3, 7, 2, 6, 5, 8, 3],
        2,
        4,
        3,
        [7, 2, 6],
        [7, 2, 6],
    ),
    ("latest needs a full continuation", [4, 1, 2, 3, 4, 5, 6, 7, 4, 9, 4], 1, 2, 3, [1, 2, 3], [5, 6, 7]),
]


@pytest.mark.parametrize("occurrence", ["earliest", "latest"])
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_known_cases(case: tuple[str, list[int], int, int, int, list[int], list[int]], occurrence: str) -> None:
    _, history, ngram_min, ngram_max, num_tokens, earliest, latest = case
    found = lookup(
        np.array(history, dtype=np.int32),
        ngram_min=ngram_min,
        ngram_max=ngram_max,
        num_tokens=num_tokens,
        occurrence=occurrence,
    )
    assert found.tolist() == (earliest if occurrence == "earliest" else latest)


def sequence_of(history: list[int], capacity: int = 64, max_new_tokens: int = 32, **options: int | str) -> Sequence:
    speculation = SpeculationConfig(method="ngram", **options)  # type: ignore[arg-type]
    return Sequence.start(0, history, capacity, SamplingParams(max_new_tokens=max_new_tokens), speculation)


@pytest.mark.parametrize(("room", "expected"), [(1, [4]), (2, [4, 2]), (9, [4, 2, 3])])
def test_drafter_keeps_to_the_room(room: int, expected: list[int]) -> None:
    tree = NgramDrafter().draft(sequence_of([1, 2, 3, 4, 2, 3]), room)
    assert tree.tokens.tolist() == expected
    assert tree.tokens.dtype == np.int32
    assert tree.parents.tolist() == list(range(len(expected)))
    assert tree.source == (NGRAM,) * len(expected)


def test_drafter_gives_the_empty_tree_without_room_or_match() -> None:
    assert NgramDrafter().draft(sequence_of([1, 2, 3, 4, 2, 3]), 0) is EMPTY
    assert NgramDrafter().draft(sequence_of([1, 2, 3, 4, 5]), 8) is EMPTY
    assert NgramDrafter().draft(sequence_of([1]), 8) is EMPTY


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(0, 8),
    st.sampled_from(["earliest", "latest"]),
)
def test_drafter_uses_the_options_of_the_sequence(
    history: list[int], ngram_min: int, more: int, ngram_tokens: int, room: int, occurrence: str
) -> None:
    sequence = sequence_of(
        history,
        ngram_min=ngram_min,
        ngram_max=ngram_min + more,
        ngram_tokens=ngram_tokens,
        ngram_occurrence=occurrence,
    )
    expected = oracle(
        history, matches_by_length(history), ngram_min, ngram_min + more, min(ngram_tokens, room), occurrence
    )
    assert NgramDrafter().draft(sequence, room).tokens.tolist() == expected


def test_drafter_reads_prompt_and_output_but_nothing_behind_them() -> None:
    sequence = sequence_of([1, 2, 3, 9])
    sequence.tokens[4:] = 2  # stale content behind the committed tokens
    drafter = NgramDrafter()
    assert drafter.draft(sequence, 8) is EMPTY
    sequence.append(1)
    sequence.append(2)
    assert drafter.draft(sequence, 8).tokens.tolist() == [3, 9, 1, 2]


@pytest.mark.parametrize(
    ("capacity", "max_new_tokens", "room"), [(64, 32, 31), (7, 32, 0), (8, 32, 1), (9, 32, 2), (64, 1, 0), (64, 3, 2)]
)
def test_draft_room_leaves_a_place_for_the_bonus_token(capacity: int, max_new_tokens: int, room: int) -> None:
    sequence = sequence_of([1, 2, 3, 4, 2, 3], capacity, max_new_tokens)
    assert sequence.draft_room == room
    tree = NgramDrafter().draft(sequence, sequence.draft_room)
    assert sequence.length + tree.size + 1 <= capacity
    assert tree.size == min(room, 3)
