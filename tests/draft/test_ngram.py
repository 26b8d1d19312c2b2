"""N-gram lookup against a brute-force oracle, and known cases of vLLM's rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draft.trees import token_paths
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.draft.ngram import LONGEST_MATCH, LookupAsk, NgramDrafter, extend, find_branches, find_match, tree_of
from trtspec.draft.tree import EMPTY, NGRAM, DraftTree, check_tree
from trtspec.sequence import Sequence

LONGEST = 6
OCCURRENCES = ("earliest", "latest")


def matches_by_length(tokens: list[int]) -> dict[int, list[int]]:
    """For each n, where the last n tokens occur earlier with at least one token behind them."""
    size = len(tokens)
    return {
        n: [start for start in range(size - n) if tokens[start : start + n] == tokens[size - n :]]
        for n in range(1, min(LONGEST, size - 1) + 1)
    }


def ordered(tokens: list[int], starts: list[int], n: int, num_tokens: int, occurrence: str) -> list[int]:
    """Starts of matches of n tokens, best first."""
    full = [start for start in starts if start + n + num_tokens <= len(tokens)] if occurrence == "latest" else []
    return [*reversed(full), *(start for start in starts if start not in full)]


def ends_by_rank(
    tokens: list[int], matches: dict[int, list[int]], ngram_min: int, ngram_max: int, num_tokens: int, occurrence: str
) -> list[tuple[int, list[int]]]:
    """From the longest n that has matches down to ngram_min: n, and the places behind its matches, best first."""
    levels = [n for n in range(min(ngram_max, len(tokens) - 1), ngram_min - 1, -1) if matches[n]]
    if not levels or num_tokens < 1:
        return []
    return [
        (n, [start + n for start in ordered(tokens, matches[n], n, num_tokens, occurrence)])
        for n in range(levels[0], ngram_min - 1, -1)
    ]


def oracle(
    tokens: list[int], matches: dict[int, list[int]], ngram_min: int, ngram_max: int, num_tokens: int, occurrence: str
) -> list[int]:
    """The continuation of the best match."""
    levels = ends_by_rank(tokens, matches, ngram_min, ngram_max, num_tokens, occurrence)
    return tokens[levels[0][1][0] :][:num_tokens] if levels else []


def match_length(tokens: list[int], end: int) -> int:
    length = 0
    while length < min(end, LONGEST_MATCH) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


PALETTES = ([0, 1, 2, 3, 4], [1, 2], [0, 256, 65536, 1, 2**24], [-(2**31), 2**31 - 1, -1, 0])
"""Among them, tokens whose bytes look alike where a token ends and the next begins."""


def histories(longest: int = 300) -> st.SearchStrategy[list[int]]:
    def random_tokens(shape: tuple[int, int, list[int], int]) -> list[int]:
        seed, size, palette, copied = shape
        generator = np.random.default_rng(seed)
        tokens = [int(token) for token in generator.choice(palette, size=size)]
        start = int(generator.integers(size + 1))
        return [*tokens, *tokens[start : start + copied]]

    palettes = st.sampled_from(PALETTES).flatmap(lambda all_: st.integers(1, len(all_)).map(lambda n: all_[:n]))
    short = palettes.flatmap(lambda palette: st.lists(st.sampled_from(palette), max_size=24))
    copies = st.sampled_from([0, 0, 10, 60])
    long = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, longest), palettes, copies).map(random_tokens)
    return st.one_of(short, long)


@settings(max_examples=120, deadline=None)
@given(histories(), st.sampled_from([np.int32, np.int64]))
def test_find_match_equals_brute_force(tokens: list[int], dtype: type[np.signedinteger[Any]]) -> None:
    matches, history = matches_by_length(tokens), np.array(tokens, dtype=dtype)
    for occurrence in OCCURRENCES:
        for ngram_min in range(1, 5):
            for ngram_max in range(ngram_min, LONGEST + 1):
                for num_tokens in (0, 1, 2, 3, 5, 9):
                    found = find_match(
                        history,
                        ngram_min=ngram_min,
                        ngram_max=ngram_max,
                        num_tokens=num_tokens,
                        occurrence=occurrence,
                    )
                    levels = ends_by_rank(tokens, matches, ngram_min, ngram_max, num_tokens, occurrence)
                    if not levels:
                        assert found is None
                        continue
                    end = levels[0][1][0]
                    assert found is not None, (occurrence, ngram_min, ngram_max, num_tokens)
                    assert found.continuation.tolist() == tokens[end : end + num_tokens]
                    assert found.continuation.base is history
                    assert found.length == match_length(tokens, end)


def test_find_match_leaves_the_history_alone() -> None:
    history = np.array([1, 2, 1, 2, 1], dtype=np.int32)
    history.setflags(write=False)
    found = find_match(history, ngram_min=1, ngram_max=3, num_tokens=2)
    assert found is not None
    assert (found.continuation.tolist(), found.length) == ([2, 1], 3)


@pytest.mark.parametrize(("same", "told"), [(4, 4), (5, 5), (6, 6), (31, 31), (32, 32), (33, 32), (100, 32)])
def test_the_length_of_a_match_is_told_beyond_ngram_max(same: int, told: int) -> None:
    copied = list(range(100, 100 + same))
    history = np.array([1, *copied, 7, 8, 2, *copied], dtype=np.int32)
    found = find_match(history, ngram_min=2, ngram_max=5, num_tokens=2)
    assert found is not None
    assert (found.continuation.tolist(), found.length) == ([7, 8], told)


@settings(max_examples=200, deadline=None)
@given(histories(120), st.integers(1, 3), st.integers(0, 3), st.integers(0, 5), st.sampled_from(OCCURRENCES), st.data())
def test_branches_are_the_next_best_matches_that_begin_otherwise(
    tokens: list[int], ngram_min: int, more: int, num_tokens: int, occurrence: str, data: st.DataObject
) -> None:
    options = {"ngram_min": ngram_min, "ngram_max": ngram_min + more, "num_tokens": num_tokens}
    count = data.draw(st.integers(0, 6))
    history = np.array(tokens, dtype=np.int32)
    found = find_branches(history, **options, occurrence=occurrence, count=count)

    levels = ends_by_rank(tokens, matches_by_length(tokens), *options.values(), occurrence)
    first_ends: dict[int, int] = {}
    for _, ends in levels:
        for end in ends:
            first_ends.setdefault(tokens[end], end)
    expected = [(tokens[end : end + num_tokens], match_length(tokens, end)) for end in first_ends.values()][:count]
    got = [(match.continuation.tolist(), match.length) for match in found]
    searches = sum(len(ends) + (2 if occurrence == "latest" else 1) for _, ends in levels)
    if searches <= 4 * count + 16:
        assert got == expected
    assert got == expected[: len(got)]
    best = find_match(history, **options, occurrence=occurrence)
    assert got[:1] == ([(best.continuation.tolist(), best.length)] if best and count else [])


def test_few_branches_where_many_matches_go_on_alike() -> None:
    history = np.array([*[1, 2] * 200, 1, 3, 1], dtype=np.int32)

    def firsts(count: int) -> list[int]:
        found = find_branches(history, ngram_min=1, ngram_max=1, num_tokens=4, count=count)
        return [int(match.continuation[0]) for match in found]

    assert firsts(2) == [2]
    assert firsts(50) == [2, 3]


@settings(max_examples=300, deadline=None)
@given(histories(60), st.integers(1, 3), st.integers(0, 3), st.integers(0, 6), st.sampled_from(OCCURRENCES), st.data())
def test_extend_is_find_match_behind_the_path(
    tokens: list[int], ngram_min: int, more: int, num_tokens: int, occurrence: str, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, min(len(tokens), 8)))
    history, path = np.array(tokens[cut:], dtype=np.int32), np.array(tokens[:cut], dtype=np.int32)
    options = {"ngram_min": ngram_min, "ngram_max": ngram_min + more, "num_tokens": num_tokens}
    found = extend(history, path, **options, occurrence=occurrence)
    right = find_match(np.concatenate((history, path)), **options, occurrence=occurrence)
    if right is None:
        assert found is None
    else:
        assert found is not None
        assert found.continuation.dtype == history.dtype
        assert (found.continuation.tolist(), found.length) == (right.continuation.tolist(), right.length)


@pytest.mark.parametrize(
    ("path", "continuation"),
    [([3], [4, 5, 6, 9]), ([3, 4], [5, 6, 9, 3]), ([8, 2, 8], [2, 8]), ([8], None), ([], None)],
)
def test_extend_ends_in_the_last_token_of_the_path(path: list[int], continuation: list[int] | None) -> None:
    history = np.array([3, 4, 5, 6, 9], dtype=np.int32)
    found = extend(history, np.array(path, dtype=np.int64), ngram_min=1, ngram_max=3, num_tokens=4)
    assert (found.continuation.tolist() if found else None) == continuation


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
    found = find_match(
        np.array(history, dtype=np.int32),
        ngram_min=ngram_min,
        ngram_max=ngram_max,
        num_tokens=num_tokens,
        occurrence=occurrence,
    )
    assert (found.continuation.tolist() if found else []) == (earliest if occurrence == "earliest" else latest)


def sequence_of(history: list[int], capacity: int = 64, max_new_tokens: int = 32, **options: int | str) -> Sequence:
    speculation = SpeculationConfig(method="ngram", **options)  # type: ignore[arg-type]
    return Sequence.start(0, history, capacity, SamplingParams(max_new_tokens=max_new_tokens), speculation)


def draft(sequence: Sequence, room: int) -> DraftTree:
    """What the method `ngram` proposes."""
    asks = [LookupAsk(sequence, min(sequence.speculation.ngram_tokens, room))]
    return tree_of(NgramDrafter().lookups(asks)[0], room)


@pytest.mark.parametrize(("room", "expected"), [(1, [4]), (2, [4, 2]), (9, [4, 2, 3])])
def test_drafter_keeps_to_the_room(room: int, expected: list[int]) -> None:
    tree = draft(sequence_of([1, 2, 3, 4, 2, 3]), room)
    assert tree.tokens.tolist() == expected
    assert tree.tokens.dtype == np.int32
    assert tree.parents.tolist() == list(range(len(expected)))
    assert tree.sources.tolist() == [NGRAM] * len(expected)
    assert tree.scores is None


@pytest.mark.parametrize(
    ("branches", "room", "paths"),
    [
        (1, 9, [(1,), (1, 9)]),
        (2, 9, [(1,), (1, 9), (2,), (2, 9)]),
        (2, 3, [(1,), (1, 9), (2,)]),
        (2, 2, [(1,), (2,)]),
        (2, 1, [(1,)]),
        (5, 9, [(1,), (1, 9), (2,), (2, 9), (3,), (3, 8)]),
    ],
)
def test_drafter_gives_several_continuations_as_branches(branches: int, room: int, paths: list[tuple[int]]) -> None:
    history = [7, 8, 1, 9, 7, 8, 2, 9, 8, 3, 8, 1, 7, 8]
    options = {"ngram_min": 1, "ngram_tokens": 2, "ngram_branches": branches}
    tree = draft(sequence_of(history, **options), room)
    check_tree(tree)
    assert token_paths(tree) == paths
    assert tree.sources.tolist() == [NGRAM] * len(paths)


def test_matches_go_on_for_as_long_as_asked() -> None:
    sequence = sequence_of([4, 2, 3, 9, 8, 4, 2, 3], ngram_tokens=1)
    for num_tokens, continuation in ((1, [9]), (3, [9, 8, 4]), (9, [9, 8, 4, 2, 3])):
        [match] = NgramDrafter().matches(sequence, num_tokens)
        assert (match.continuation.tolist(), match.length) == (continuation, 3)
    assert NgramDrafter().matches(sequence, 0) == []


def test_drafter_gives_the_empty_tree_without_room_or_match() -> None:
    assert draft(sequence_of([1, 2, 3, 4, 2, 3]), 0) is EMPTY
    assert draft(sequence_of([1, 2, 3, 4, 5]), 8) is EMPTY
    assert draft(sequence_of([1]), 8) is EMPTY


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
    assert draft(sequence, room).tokens.tolist() == expected


def test_drafter_reads_prompt_and_output_but_nothing_behind_them() -> None:
    sequence = sequence_of([1, 2, 3, 9])
    sequence.tokens[4:] = 2  # stale content behind the committed tokens
    assert draft(sequence, 8) is EMPTY
    sequence.append(1)
    sequence.append(2)
    assert draft(sequence, 8).tokens.tolist() == [3, 9, 1, 2]


@pytest.mark.parametrize(
    ("capacity", "max_new_tokens", "room"), [(64, 32, 31), (7, 32, 0), (8, 32, 1), (9, 32, 2), (64, 1, 0), (64, 3, 2)]
)
def test_draft_room_leaves_a_place_for_the_bonus_token(capacity: int, max_new_tokens: int, room: int) -> None:
    sequence = sequence_of([1, 2, 3, 4, 2, 3], capacity, max_new_tokens)
    assert sequence.draft_room == room
    tree = draft(sequence, sequence.draft_room)
    assert sequence.length + tree.size + 1 <= capacity
    assert tree.size == min(room, 3)
