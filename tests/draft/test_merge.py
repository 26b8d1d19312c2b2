"""Unions, grafts and sub-trees against brute force over lists of paths."""

from __future__ import annotations

import random

import numpy as np
import pytest
from draft.trees import BOTH, Path, path_to, token_path, token_paths, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.decode.accept import accept
from trtspec.draft.merge import graft, keep, union
from trtspec.draft.tree import EAGLE, EMPTY, NGRAM, DraftTree, check_tree

TOKENS = (-(2**31), 0, 7, 2**31 - 1)
ROOM = 40

nodes = trees(TOKENS, max_size=16)
chains = st.builds(
    lambda tokens, source: DraftTree.chain(np.array(tokens, dtype=np.int32), source),
    st.lists(st.sampled_from(TOKENS[:2]), max_size=8),
    st.sampled_from([NGRAM, EAGLE]),
)
either = st.one_of(nodes, chains)


class Paths(dict[Path, tuple[int, float]]):
    """A tree's paths, in the order of its rows, with flags and score of their last nodes."""

    @classmethod
    def of(cls, tree: DraftTree) -> Paths:
        scores = np.full(tree.size, np.nan) if tree.scores is None else tree.scores
        values = zip(tree.sources.tolist(), scores.tolist(), strict=True)
        return cls(zip(token_paths(tree), values, strict=True))

    def put(self, path: Path, flags: int, score: float) -> None:
        own_flags, own_score = self.get(path, (0, np.nan))
        self[path] = own_flags | flags, own_score if np.isnan(score) else score

    def shallowest(self, size: int) -> Paths:
        kept = sorted(self, key=len)[:size]
        return Paths((path, value) for path, value in self.items() if path in kept)


def check(found: DraftTree, expected: Paths, *, scored: bool) -> None:
    check_tree(found)
    for array, dtype in ((found.tokens, np.int32), (found.parents, np.int32), (found.sources, np.int8)):
        assert array.dtype == dtype
    assert token_paths(found) == list(expected)
    assert found.sources.tolist() == [flags for flags, _ in expected.values()]
    if found.size:
        assert (found.scores is not None) == scored
    if found.scores is not None:
        assert found.scores.dtype == np.float32
        np.testing.assert_array_equal(found.scores, [score for _, score in expected.values()])


def contents(tree: DraftTree) -> list[bytes]:
    arrays = (tree.tokens, tree.parents, tree.sources, tree.scores)
    return [array.tobytes() for array in arrays if array is not None]


@settings(max_examples=300, deadline=None)
@given(either, either, st.integers(0, ROOM))
def test_union_has_the_paths_of_both(first: DraftTree, second: DraftTree, size: int) -> None:
    before = contents(first), contents(second)
    expected = Paths.of(first)
    for path, value in Paths.of(second).items():
        expected.put(path, *value)
    scored = any(tree.size and tree.scores is not None for tree in (first, second))
    check(union(first, second, size), expected.shallowest(size), scored=scored)
    assert before == (contents(first), contents(second))


@settings(max_examples=200, deadline=None)
@given(either, either)
def test_union_is_the_same_set_the_other_way_round(first: DraftTree, second: DraftTree) -> None:
    one, other = (Paths.of(union(*pair, ROOM)) for pair in ((first, second), (second, first)))
    assert {path: flags for path, (flags, _) in one.items()} == {path: flags for path, (flags, _) in other.items()}


@settings(max_examples=200, deadline=None)
@given(either, either, st.integers(0, 10**6))
def test_union_accepts_what_the_better_one_does(first: DraftTree, second: DraftTree, seed: int) -> None:
    def accepted(tree: DraftTree) -> list[int]:
        paths = [token_path(tree, row) for row in range(tree.width)]
        return accept(tree, [random.Random(f"{seed} {path}").choice(TOKENS[:3]) for path in paths]).tokens

    assert accepted(union(first, second, ROOM)) == max(accepted(first), accepted(second), key=len)


@settings(max_examples=50, deadline=None)
@given(chains, either)
def test_the_first_chain_stays_in_one_piece(chain: DraftTree, tree: DraftTree) -> None:
    merged = union(chain, tree, ROOM)
    assert merged.parents[: chain.size].tolist() == list(range(chain.size))
    assert merged.tokens[: chain.size].tolist() == chain.tokens.tolist()


def test_union_with_nothing_is_the_tree_itself() -> None:
    chain = DraftTree.chain(np.array([1, 2, 3]), NGRAM)
    assert union(chain, EMPTY, 3) is union(EMPTY, chain, 3) is chain
    assert union(EMPTY, EMPTY, 3) is EMPTY


def test_a_hand_made_union() -> None:
    #  root -> 1 -> 2 -> 3, and root -> 1 -> (2 -> 9, 5), root -> 8
    chain = DraftTree.chain(np.array([1, 2, 3]), NGRAM)
    scores = np.array([-0.5, -1.0, -2.0, -2.5, -3.0], dtype=np.float32)
    arrays = np.array([1, 8, 2, 5, 9], np.int32), np.array([0, 0, 1, 1, 3], np.int32), np.full(5, EAGLE, np.int8)
    merged = union(chain, DraftTree(*arrays, scores), 6)
    assert merged.tokens.tolist() == [1, 2, 3, 8, 5, 9]
    assert merged.parents.tolist() == [0, 1, 2, 0, 1, 2]
    assert merged.sources.tolist() == [BOTH, BOTH, NGRAM, EAGLE, EAGLE, EAGLE]
    np.testing.assert_array_equal(merged.scores, [-0.5, -2.0, np.nan, -1.0, -2.5, -3.0])
    assert union(chain, DraftTree(*arrays), 5).tokens.tolist() == [1, 2, 3, 8, 5]
    assert union(chain, DraftTree(*arrays), 3).tokens.tolist() == [1, 2, 8]


@settings(max_examples=300, deadline=None)
@given(
    either,
    st.lists(st.sampled_from(TOKENS), max_size=5),
    st.sampled_from([NGRAM, EAGLE]),
    st.integers(0, ROOM),
    st.data(),
)
def test_graft_hangs_a_chain_below_a_row(
    tree: DraftTree, tokens: list[int], source: int, size: int, data: st.DataObject
) -> None:
    row, before = data.draw(st.integers(0, tree.size)), contents(tree)
    expected, path = Paths.of(tree), token_path(tree, row)
    for token in tokens:
        path = (*path, token)
        if path not in expected and len(expected) >= size:
            break
        expected.put(path, source, np.nan)
    found = graft(tree, row, np.array(tokens, dtype=np.int32), source, size)
    check(found, expected, scored=tree.scores is not None)
    assert before == contents(tree)


@settings(max_examples=200, deadline=None)
@given(either, st.data())
def test_keep_takes_the_paths_of_the_rows(tree: DraftTree, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, tree.size)))
    rows = sorted({node for row in chosen for node in path_to(tree, row)} - {0})
    paths = list(Paths.of(tree).items())
    expected = Paths(paths[row - 1] for row in rows)
    check(keep(tree, rows), expected, scored=tree.scores is not None)


@settings(max_examples=100, deadline=None)
@given(trees(TOKENS, min_size=2), st.data())
def test_keep_refuses_rows_without_their_parent(tree: DraftTree, data: st.DataObject) -> None:
    rows = data.draw(st.sets(st.integers(1, tree.size)))
    orphans = [row for row in rows if int(tree.parents[row - 1]) not in {0, *rows}]
    if orphans:
        with pytest.raises(ValueError, match="not kept, but a child"):
            keep(tree, sorted(rows))
    else:
        keep(tree, sorted(rows))


@pytest.mark.parametrize("rows", [[2, 1], [1, 1], [0, 1], [-1, 1], [3, 4], [4]])
def test_keep_refuses_rows_out_of_order_or_outside(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="must increase"):
        keep(DraftTree.chain(np.array([5, 6, 7]), NGRAM), rows)
