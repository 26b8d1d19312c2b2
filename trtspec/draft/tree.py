"""Draft trees: the tokens proposed for one sequence, and the masks that let one pass verify them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

NGRAM, EAGLE = "ngram", "eagle"
SOURCES = (NGRAM, EAGLE)


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A proposal for one sequence. Row 0 of a verification is the root; draft token i is row i + 1.

    `parents[i]` is the row of token i's parent (0: the root) and never lies behind it, so rows are in topological
    order; the children of one row carry distinct tokens.
    """

    tokens: np.ndarray
    """int32 `[size]`, without the root."""
    parents: np.ndarray
    """int32 `[size]`"""
    source: tuple[str, ...]
    """Which drafter proposed each token, `[size]`."""

    @classmethod
    def chain(cls, tokens: np.ndarray, source: str) -> DraftTree:
        """One path: every token's parent is the row before it."""
        size = len(tokens)
        tree = cls(tokens.astype(np.int32, copy=False), _counting(size), (source,) * size)
        tree.__dict__["is_chain"] = True
        return tree

    @property
    def size(self) -> int:
        """Draft tokens, the root not counted."""
        return len(self.tokens)

    @property
    def width(self) -> int:
        """Rows of the verification: root and draft tokens."""
        return self.size + 1

    @cached_property
    def is_chain(self) -> bool:
        """Whether it is a single path."""
        return bool((self.parents == _counting(self.size)).all())

    @cached_property
    def depths(self) -> np.ndarray:
        """Distance of each row to the root, int32 `[width]`."""
        if self.is_chain:
            return _counting(self.width)
        depths = np.zeros(self.width, dtype=np.int32)
        for i, parent in enumerate(self.parents):
            depths[i + 1] = depths[parent] + 1
        return depths

    @property
    def depth(self) -> int:
        """Draft tokens on the longest path."""
        return self.size if self.is_chain else int(self.depths.max())

    def positions(self, root: int) -> np.ndarray:
        """Sequence position of each row where the root's is `root`, integer `[width]`."""
        return _ranges(root + self.width)[root:] if self.is_chain else self.depths + root

    @cached_property
    def mask(self) -> np.ndarray:
        """bool `[width, width]`: a row sees itself and its ancestors."""
        if self.is_chain:
            return _lower_triangle(self.width)
        mask = np.eye(self.width, dtype=bool)
        for i, parent in enumerate(self.parents):
            mask[i + 1] |= mask[parent]
        return mask

    def path_to(self, row: int) -> list[int]:
        """Rows from the root (0) to `row`, both included."""
        path = [row]
        while row:
            row = int(self.parents[row - 1])
            path.append(row)
        return path[::-1]


EMPTY = DraftTree(np.zeros(0, np.int32), np.zeros(0, np.int32), ())


def check_tree(tree: DraftTree) -> None:
    """Raise ValueError where a tree breaks the rules of `DraftTree`."""
    if not len(tree.tokens) == len(tree.parents) == len(tree.source):
        raise ValueError(f"{len(tree.tokens)} tokens, {len(tree.parents)} parents, {len(tree.source)} sources")
    if (tree.parents < 0).any() or (tree.parents > np.arange(tree.size)).any():
        raise ValueError(f"a parent lies behind its child: {tree.parents.tolist()}")
    edges: Seq[tuple[int, int]] = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    if len(set(edges)) != len(edges):
        raise ValueError("two children of one row carry the same token")


@lru_cache(maxsize=256)
def _counting(size: int) -> np.ndarray:
    counting = np.arange(size, dtype=np.int32)
    counting.setflags(write=False)
    return counting


def _ranges(stop: int) -> np.ndarray:
    """0..stop-1: slicing one array that grows by doubling costs a step less than counting anew."""
    return _counting(1 << (stop - 1).bit_length())[:stop]


@lru_cache(maxsize=256)
def _lower_triangle(width: int) -> np.ndarray:
    triangle = np.tri(width, dtype=bool)
    triangle.setflags(write=False)
    return triangle
