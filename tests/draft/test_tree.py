"""Draft trees against brute force over parent links."""

from __future__ import annotations

import numpy as np
import pytest
from draft.trees import BOTH, path_to, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.draft.tree import EAGLE, EMPTY, NGRAM, DraftTree, check_tree


class GeneralTree(DraftTree):
    """A tree that never takes the fast path for chains."""

    @property
    def is_chain(self) -> bool:
        return False


def tree_of(tokens: list[int], parents: list[int], cls: type[DraftTree] = DraftTree) -> DraftTree:
    sources = np.array([(NGRAM, EAGLE, BOTH)[i % 3] for i in range(len(tokens))], dtype=np.int8)
    return cls(np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32), sources)


def check_against_brute_force(tree: DraftTree) -> None:
    mask, depths = tree.mask, tree.depths
    assert tree.width == tree.size + 1 == len(tree.tokens) + 1
    assert mask.shape == (tree.width, tree.width)
    assert mask.dtype == np.bool_
    assert depths.dtype == np.int32
    assert tree.depth == depths.max()
    assert depths.shape == (tree.width,)
    for row in range(tree.width):
        path = path_to(tree, row)
        assert np.flatnonzero(mask[row]).tolist() == path
        assert depths[row] == len(path) - 1


@settings(max_examples=200, deadline=None)
@given(trees())
def test_mask_and_depths(tree: DraftTree) -> None:
    check_tree(tree)
    check_against_brute_force(tree)
    assert tree.is_chain == (tree.parents.tolist() == list(range(tree.size)))


@pytest.mark.parametrize("size", [0, 1, 2, 7, 40])
def test_chain_takes_the_fast_path_to_the_same_result(size: int) -> None:
    tokens = np.arange(100, 100 + size)
    chain = DraftTree.chain(tokens, EAGLE)
    general = GeneralTree(chain.tokens, chain.parents, chain.sources)
    check_tree(chain)
    check_against_brute_force(chain)
    assert chain.is_chain
    assert chain.tokens.dtype == chain.parents.dtype == np.int32
    assert chain.tokens.tolist() == tokens.tolist()
    assert chain.sources.dtype == np.int8
    assert chain.sources.tolist() == [EAGLE] * size
    assert chain.scores is None
    assert (chain.mask == general.mask).all()
    assert (chain.depths == general.depths).all()


def test_a_chain_takes_scores() -> None:
    scores = np.array([-0.5, -1.0], dtype=np.float32)
    chain = DraftTree.chain(np.array([7, 8]), EAGLE, scores)
    check_tree(chain)
    assert chain.scores is scores


def test_two_chains_share_no_writable_state() -> None:
    chain = DraftTree.chain(np.arange(5), NGRAM)
    for shared in (chain.mask, chain.parents, chain.sources):
        with pytest.raises(ValueError, match="read-only"):
            shared[0] = 0


def test_empty_tree() -> None:
    check_tree(EMPTY)
    assert (EMPTY.size, EMPTY.width, EMPTY.is_chain) == (0, 1, True)
    assert EMPTY.mask.tolist() == [[True]]
    assert EMPTY.depths.tolist() == [0]


def test_a_hand_made_tree() -> None:
    #  root -> 7 -> 8, root -> 9 -> 8 -> 7
    tree = tree_of([7, 9, 8, 8, 7], [0, 0, 1, 2, 4])
    check_tree(tree)
    assert not tree.is_chain
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 3]
    assert path_to(tree, 5) == [0, 2, 4, 5]
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


def sources(*flags: int) -> np.ndarray:
    return np.array(flags, dtype=np.int8)


@pytest.mark.parametrize(
    "tree",
    [
        DraftTree(np.array([1, 2]), np.array([0]), sources(NGRAM, NGRAM)),
        DraftTree(np.array([1]), np.array([0, 1]), sources(NGRAM)),
        DraftTree(np.array([1, 2]), np.array([0, 1]), sources(NGRAM)),
        DraftTree(np.array([1, 2]), np.array([0, 1]), sources(NGRAM, EAGLE), np.zeros(3, np.float32)),
    ],
)
def test_check_tree_rejects_unequal_lengths(tree: DraftTree) -> None:
    with pytest.raises(ValueError, match="tokens"):
        check_tree(tree)


@pytest.mark.parametrize("flags", [0, BOTH + 1, -1])
def test_check_tree_rejects_sources_that_do_not_exist(flags: int) -> None:
    with pytest.raises(ValueError, match="no drafters' flags"):
        check_tree(DraftTree(np.array([1, 2]), np.array([0, 1]), sources(BOTH, flags)))


def test_equal_tokens_below_different_parents_are_allowed() -> None:
    check_tree(tree_of([1, 2, 3, 3], [0, 0, 1, 2]))
