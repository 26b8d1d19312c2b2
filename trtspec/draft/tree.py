"""Draft trees: the tokens proposed for one sequence, and the masks that let one pass verify them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

NGRAM, EAGLE = 1, 2
SOURCES: dict[str, int] = {"ngram": NGRAM, "eagle": EAGLE}
"""Drafters by name, as bit flags: several may propose the same token in the same place."""


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
    sources: np.ndarray
    """int8 `[size]`: the flags of the drafters that proposed each token."""
    scores: np.ndarray | None = None
    """float32 `[size]`: log-probability of the path to each token by its drafter's estimate, NaN where that drafter has
    none; None where no drafter has."""

    @classmethod
    def chain(cls, tokens: np.ndarray, source: int, scores: np.ndarray | None = None) -> DraftTree:
        """One path: every token's parent is the row before it."""
        size = len(tokens)
        tree = cls(tokens.astype(np.int32, copy=False), _counting(size), _repeated(source, size), scores)
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
        depths = [0]
        for parent in self.parents.tolist():
            depths.append(depths[parent] + 1)
        return np.array(depths, dtype=np.int32)

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
        # Bytes of 0 and 1 cost a few times less than an array's rows one by one.
        rows = [b"\1" + bytes(self.size)]
        for row, parent in enumerate(self.parents.tolist(), start=1):
            rows.append(rows[parent][:row] + b"\1" + bytes(self.size - row))
        return np.frombuffer(b"".join(rows), dtype=bool).reshape(self.width, self.width)


EMPTY = DraftTree(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int8))


def check_tree(tree: DraftTree) -> None:
    """Raise ValueError where a tree breaks the rules of `DraftTree`."""
    arrays = {"tokens": tree.tokens, "parents": tree.parents, "sources": tree.sources}
    if tree.scores is not None:
        arrays["scores"] = tree.scores
    if len({len(array) for array in arrays.values()}) > 1:
        raise ValueError(", ".join(f"{len(array)} {name}" for name, array in arrays.items()))
    if (tree.parents < 0).any() or (tree.parents > np.arange(tree.size)).any():
        raise ValueError(f"a parent lies behind its child: {tree.parents.tolist()}")
    if (tree.sources < 1).any() or (tree.sources > sum(SOURCES.values())).any():
        raise ValueError(f"sources that are no drafters' flags: {tree.sources.tolist()}")
    edges = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    if len(set(edges)) != len(edges):
        raise ValueError("two children of one row carry the same token")


@lru_cache(maxsize=256)
def _counting(size: int) -> np.ndarray:
    counting = np.arange(size, dtype=np.int32)
    counting.setflags(write=False)
    return counting


@lru_cache(maxsize=256)
def _repeated(source: int, size: int) -> np.ndarray:
    sources = np.full(size, source, dtype=np.int8)
    sources.setflags(write=False)
    return sources


def _ranges(stop: int) -> np.ndarray:
    """0..stop-1: slicing one array that grows by doubling costs a step less than counting anew."""
    return _counting(1 << (stop - 1).bit_length())[:stop]


@lru_cache(maxsize=256)
def _lower_triangle(width: int) -> np.ndarray:
    triangle = np.tri(width, dtype=bool)
    triangle.setflags(write=False)
    return triangle
