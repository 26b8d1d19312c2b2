"""Draft trees put together and cut: unions, grafts and sub-trees, all of them pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np

from trtspec.draft.tree import DraftTree


def union(first: DraftTree, second: DraftTree, size: int) -> DraftTree:
    """One tree with the paths of both.

    A node that both have is one node of both drafters, in first's place; its score is second's where second has one.
    Second's other nodes stand behind first's, in second's order, so a chain stays in one piece as `first`.

    Args:
        size: draft tokens at most. The shallowest are kept; of equally deep ones first's, then those of lower rows.
    """
    if not second.size:
        return _shallowest(first, size)
    if not first.size:
        return _shallowest(second, size)
    trie, rows = _Trie(first), [0]
    trie.scored |= second.scores is not None
    nodes = zip(second.parents.tolist(), second.tokens.tolist(), second.sources.tolist(), _scores(second), strict=True)
    for parent, token, source, score in nodes:
        row = trie.child(rows[parent], token)
        rows.append(trie.share(row, source, score) if row else trie.add(rows[parent], token, source, score))
    return _shallowest(trie.tree(), size)


def graft(tree: DraftTree, row: int, tokens: np.ndarray, source: int, size: int) -> DraftTree:
    """The tree with a chain below one of its rows; children that carry the chain's tokens already are shared.

    Args:
        row: 0 is the root.
        tokens: integer `[length]`.
        source: flag of the chain's drafter, which gives no scores.
        size: draft tokens at most: the chain is cut where the tree is full, the tree never.
    """
    trie = _Trie(tree)
    for token in tokens.tolist():
        child = trie.child(row, token)
        if child:
            row = trie.share(child, source, math.nan)
        elif len(trie.tokens) < size:
            row = trie.add(row, token, source, math.nan)
        else:
            break
    return trie.tree()


def keep(tree: DraftTree, rows: Seq[int]) -> DraftTree:
    """The sub-tree of some nodes, in their order.

    Args:
        rows: rows of the nodes, increasing; the root, which is row 0, always stays and isn't among them.

    Raises:
        ValueError: rows don't increase, or lie outside the tree, or a node's parent isn't kept.
    """
    if [*rows] != sorted({*rows}) or (rows and not 1 <= rows[0] <= rows[-1] <= tree.size):
        raise ValueError(f"rows to keep must increase and lie in 1..{tree.size}: {[*rows]}")
    nodes = np.array(rows, dtype=np.int64) - 1
    places = {row: place for place, row in enumerate((0, *rows))}
    try:
        parents = [places[parent] for parent in tree.parents[nodes].tolist()]
    except KeyError as error:
        raise ValueError(f"row {error} is not kept, but a child of it") from None
    scores = None if tree.scores is None else tree.scores[nodes]
    return DraftTree(tree.tokens[nodes], np.array(parents, dtype=np.int32), tree.sources[nodes], scores)


class _Trie:
    """A tree that grows."""

    def __init__(self, tree: DraftTree) -> None:
        self.tokens: list[int] = tree.tokens.tolist()
        self.scored = tree.scores is not None
        self._parents: list[int] = tree.parents.tolist()
        self._sources: list[int] = tree.sources.tolist()
        self._scores = _scores(tree)
        edges = zip(self._parents, self.tokens, strict=True)
        self._rows = {edge: row for row, edge in enumerate(edges, start=1)}

    def child(self, parent: int, token: int) -> int:
        """The row of a row's child that carries a token; 0 where there is none."""
        return self._rows.get((parent, token), 0)

    def share(self, row: int, source: int, score: float) -> int:
        """Put a node down to one more drafter; returns the node's row."""
        self._sources[row - 1] |= source
        if not math.isnan(score):
            self._scores[row - 1] = score
        return row

    def add(self, parent: int, token: int, source: int, score: float) -> int:
        """Append a node; returns its row."""
        self.tokens.append(token)
        self._parents.append(parent)
        self._sources.append(source)
        self._scores.append(score)
        row = self._rows[parent, token] = len(self.tokens)
        return row

    def tree(self) -> DraftTree:
        return DraftTree(
            np.array(self.tokens, dtype=np.int32),
            np.array(self._parents, dtype=np.int32),
            np.array(self._sources, dtype=np.int8),
            np.array(self._scores, dtype=np.float32) if self.scored else None,
        )


def _shallowest(tree: DraftTree, size: int) -> DraftTree:
    """The tree without its deepest nodes, and of equally deep ones without those of higher rows."""
    if tree.size <= size:
        return tree
    rows = sorted(range(1, tree.width), key=tree.depths.tolist().__getitem__)
    return keep(tree, sorted(rows[:size]))


def _scores(tree: DraftTree) -> list[float]:
    scores: list[float] = [math.nan] * tree.size if tree.scores is None else tree.scores.tolist()
    return scores
