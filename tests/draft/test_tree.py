"""Draft trees against brute force over parent links."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.draft.tree import EAGLE, EMPTY, NGRAM, DraftTree, check_tree


class GeneralTree(DraftTree):
    """A tree that never takes the fast path for chains."""

    @property
    def is_chain(self) -> bool:
        return False


def tree_of(tokens: list[int], parents: list[int], cls: type[DraftTree] = DraftTree) -> DraftTree:
    source = tuple((NGRAM, EAGLE)[i % 2] for i in range(len(tokens)))
    return cls(np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32), source)


@st.composite
def trees(draw: st.DrawFn, min_size: int = 0) -> DraftTree:
    parents = [draw(st.integers(0, row)) for row in range(draw(st.integers(min_size, 14)))]
    tokens: list[int] = []
    for i, parent in enumerate(parents):
        taken = {token for token, other in zip(tokens, parents[:i], strict=True) if other == parent}
        tokens.append(draw(st.sampled_from(sorted(set(range(16)) - taken))))
    return tree_of(tokens, parents)


def ancestors(tree: DraftTree, row: int) -> list[int]:
    """Rows from `row` up to the root."""
    return [row] if row == 0 else [row, *ancestors(tree, int(tree.parents[row - 1]))]


def check_against_brute_force(tree: DraftTree) -> None:
    mask, depths = tree.mask, tree.depths
    assert tree.width == tree.size + 1 == len(tree.tokens) + 1
    assert mask.shape == (tree.width, tree.width)
    assert mask.dtype == np.bool_
    assert depths.shape == (tree.width,)
    for row in range(tree.width):
        path = ancestors(tree, row)
        assert np.flatnonzero(mask[row]).tolist() == sorted(path)
        assert depths[row] == len(path) - 1
        assert tree.path_to(row) == path[::-1]


@settings(max_examples=200, deadline=None)
@given(trees())
def test_mask_depths_and_paths(tree: DraftTree) -> None:
    check_tree(tree)
    check_against_brute_force(tree)
    assert tree.is_chain == (tree.parents.tolist() == list(range(tree.size)))


@pytest.mark.parametrize("size", [0, 1, 2, 7, 40])
def test_chain_takes_the_fast_path_to_the_same_result(size: int) -> None:
    tokens = np.arange(100, 100 + size)
    chain = DraftTree.chain(tokens, EAGLE)
    general = GeneralTree(chain.tokens, chain.parents, chain.source)
    check_tree(chain)
    check_against_brute_force(chain)
    assert chain.is_chain
    assert chain.tokens.dtype == chain.parents.dtype == np.int32
    assert chain.tokens.tolist() == tokens.tolist()
    assert chain.source == (EAGLE,) * size
    assert (chain.mask == general.mask).all()
    assert (chain.depths == general.depths).all()


def test_two_chains_share_no_writable_state() -> None:
    for shared in (DraftTree.chain(np.arange(5), NGRAM).mask, DraftTree.chain(np.arange(5), NGRAM).parents):
        with pytest.raises(ValueError, match="read-only"):
            shared[0] = 0


def test_empty_tree() -> None:
    check_tree(EMPTY)
    assert (EMPTY.size, EMPTY.width, EMPTY.is_chain) == (0, 1, True)
    assert EMPTY.mask.tolist() == [[True]]
    assert EMPTY.depths.tolist() == [0]
    assert EMPTY.path_to(0) == [0]


def test_a_hand_made_tree() -> None:
    #  root -> 7 -> 8, root -> 9 -> 8 -> 7
    tree = tree_of([7, 9, 8, 8, 7], [0, 0, 1, 2, 4])
    check_tree(tree)
    assert not tree.is_chain
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 3]
    assert tree.path_to(5) == [0, 2, 4, 5]
    assert tree.mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1, 1],
    ]


@settings(max_examples=100, deadline=None)
@given(trees(min_size=1), st.data())
def test_check_tree_rejects_a_parent_behind_its_child(tree: DraftTree, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, tree.size - 1))
    parents = tree.parents.tolist()
    parents[node] = data.draw(st.one_of(st.integers(node + 1, tree.size + 2), st.integers(-3, -1)))
    with pytest.raises(ValueError, match="parent lies behind"):
        check_tree(tree_of(tree.tokens.tolist(), parents))


@settings(max_examples=100, deadline=None)
@given(trees(min_size=1), st.data())
def test_check_tree_rejects_equal_siblings(tree: DraftTree, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, tree.size - 1))
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    with pytest.raises(ValueError, match="same token"):
        check_tree(tree_of([*tokens, tokens[node]], [*parents, parents[node]]))


@pytest.mark.parametrize(
    "tree",
    [
        DraftTree(np.array([1, 2]), np.array([0]), (NGRAM, NGRAM)),
        DraftTree(np.array([1]), np.array([0, 1]), (NGRAM,)),
        DraftTree(np.array([1, 2]), np.array([0, 1]), (NGRAM,)),
    ],
)
def test_check_tree_rejects_unequal_lengths(tree: DraftTree) -> None:
    with pytest.raises(ValueError, match="tokens"):
        check_tree(tree)


def test_equal_tokens_below_different_parents_are_allowed() -> None:
    check_tree(tree_of([1, 2, 3, 3], [0, 0, 1, 2]))
