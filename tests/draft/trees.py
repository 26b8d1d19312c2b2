"""Random draft trees, and trees as lists of paths."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from hypothesis import strategies as st

from trtspec.draft.tree import EAGLE, NGRAM, DraftTree

BOTH = NGRAM | EAGLE
Path = tuple[int, ...]


@st.composite
def trees(
    draw: st.DrawFn, tokens: Seq[int] = range(16), min_size: int = 0, max_size: int = 14, scored: bool | None = None
) -> DraftTree:
    """Trees whose tokens, and so siblings, are among `tokens`; with scores as `scored` says, or as it falls."""
    edges: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(min_size, max_size))):
        edge = (draw(st.integers(0, len(edges))), draw(st.sampled_from(tokens)))
        if edge not in edges:
            edges.append(edge)
    size = len(edges)
    sources = draw(st.lists(st.sampled_from([NGRAM, EAGLE, BOTH]), min_size=size, max_size=size))
    scores = None
    if scored or (scored is None and draw(st.booleans())):
        values = st.sampled_from([-0.25, -1.5, -3.0, float("nan")])
        scores = np.array(draw(st.lists(values, min_size=size, max_size=size)), dtype=np.float32)
    return DraftTree(
        np.array([token for _, token in edges], dtype=np.int32),
        np.array([parent for parent, _ in edges], dtype=np.int32),
        np.array(sources, dtype=np.int8),
        scores,
    )


def path_to(tree: DraftTree, row: int) -> list[int]:
    """Rows from the root (0) to `row`, both included."""
    return [row] if row == 0 else [*path_to(tree, int(tree.parents[row - 1])), row]


def token_path(tree: DraftTree, row: int) -> Path:
    """The tokens from the root, whose own isn't among them, to `row`."""
    return tuple(int(tree.tokens[node - 1]) for node in path_to(tree, row)[1:])


def token_paths(tree: DraftTree) -> list[Path]:
    """Each node's path, in the order of rows; the root's is left out."""
    return [token_path(tree, row) for row in range(1, tree.width)]
