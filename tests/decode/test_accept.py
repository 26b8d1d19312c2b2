"""Acceptance against brute force over all paths of random trees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from draft.trees import path_to, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.decode.accept import accept
from trtspec.draft.tree import EMPTY, NGRAM, DraftTree

VOCAB = 4


def is_targets_own(tree: DraftTree, path: list[int], target_tokens: list[int]) -> bool:
    return all(tree.tokens[row - 1] == target_tokens[parent] for parent, row in itertools.pairwise(path))


@settings(max_examples=400, deadline=None)
@given(trees(range(VOCAB), max_size=16), st.data())
def test_accept_takes_the_longest_path_that_the_target_agrees_with(tree: DraftTree, data: st.DataObject) -> None:
    target_tokens = data.draw(
        st.lists(st.integers(0, VOCAB - 1), min_size=tree.width, max_size=tree.width), label="target's tokens"
    )
    paths = [path_to(tree, row) for row in range(tree.width)]
    agreed = [path for path in paths if is_targets_own(tree, path, target_tokens)]
    longest = max(agreed, key=len)

    acceptance = accept(tree, target_tokens)
    assert acceptance.rows == longest[1:]
    assert acceptance.tokens == [*(int(tree.tokens[row - 1]) for row in longest[1:]), target_tokens[longest[-1]]]
    assert acceptance.tokens == [target_tokens[row] for row in longest]

    matches = [path for path in paths[1:] if tree.tokens[path[-1] - 1] == target_tokens[path[-2]]]
    assert acceptance.num_matches == len(matches)


def test_accepted_tokens_are_plain_integers() -> None:
    acceptance = accept(DraftTree.chain(np.array([3, 4]), NGRAM), [3, 4, 5])
    assert {type(token) for token in acceptance.tokens} == {int}
    assert {type(row) for row in acceptance.rows} == {int}


def test_matches_behind_a_rejection_count() -> None:
    # The target agrees with [1, 0, 1, 0]: yes, no, yes, no. One is accepted, two match.
    chain = DraftTree.chain(np.array([10, 11, 12, 13]), NGRAM)
    target_tokens = [10, 99, 12, 98, 97]
    acceptance = accept(chain, target_tokens)
    assert (acceptance.rows, acceptance.tokens) == ([1], [10, 99])
    assert acceptance.num_matches == 2


@pytest.mark.parametrize(("picked", "rows"), [(5, [1, 3]), (6, [2, 4]), (7, [])])
def test_siblings(picked: int, rows: list[int]) -> None:
    # root -> 5 -> 8 and root -> 6 -> 8
    tree = DraftTree(np.array([5, 6, 8, 8]), np.array([0, 0, 1, 2]), np.full(4, NGRAM, np.int8))
    acceptance = accept(tree, [picked, 8, 8, 20, 30])
    assert acceptance.rows == rows
    assert acceptance.tokens == [picked, *([8, 20 if picked == 5 else 30] if rows else [])]
    assert acceptance.num_matches == (3 if rows else 2)


def test_empty_tree_yields_the_bonus_token() -> None:
    acceptance = accept(EMPTY, [7])
    assert (acceptance.rows, acceptance.tokens, acceptance.num_matches) == ([], [7], 0)
