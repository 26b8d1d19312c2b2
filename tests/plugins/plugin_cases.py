"""Random arguments of the operations: hypothesis draws the sizes, a seeded generator the contents."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

PALETTES = ([0, 1, 2, 3], [1, 2], [7], [-(2**31), 2**31 - 1, -1, 0], list(range(40)))
BATCHES = st.sampled_from([1, 1, 1, 2, 5])


class NgramCase(NamedTuple):
    history: torch.Tensor
    lengths: torch.Tensor
    attributes: dict[str, int]

    def histories(self) -> list[list[int]]:
        """Committed tokens of each sequence."""
        return [row[:length] for row, length in zip(self.history.tolist(), self.lengths.tolist(), strict=True)]


class MergeCase(NamedTuple):
    ngram_tokens: torch.Tensor
    ngram_counts: torch.Tensor
    eagle_tokens: torch.Tensor
    eagle_parents: torch.Tensor
    eagle_counts: torch.Tensor
    room: torch.Tensor
    size: int

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(self)[:-1]


class AcceptCase(NamedTuple):
    tokens: torch.Tensor
    parents: torch.Tensor
    counts: torch.Tensor
    target_tokens: torch.Tensor


class CommitCase(NamedTuple):
    cache: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    num_accepted: torch.Tensor


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def ngram_cases(draw: st.DrawFn, longest: int = 90, max_branches: int = 3) -> NgramCase:
    """Repeated motifs with slips, so that matches of all lengths and ties occur; what lies behind looks alike."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    palette = np.array(draw(st.sampled_from(PALETTES)))
    batch, columns = draw(BATCHES), draw(st.integers(1, longest))
    slips = draw(st.sampled_from([0.0, 0.03, 0.2, 1.0]))
    rows = []
    for _ in range(batch):
        motif = generator.choice(palette, size=generator.integers(1, 24))
        tokens = np.resize(motif, columns)
        rows.append(np.where(generator.random(columns) < slips, generator.choice(palette, size=columns), tokens))
    kinds = st.sampled_from([0, min(1, columns), columns, None, None])
    lengths = [int(generator.integers(columns + 1)) if kind is None else kind for kind in (draw(kinds),) * batch]
    if batch > 1:
        lengths[-1] = int(generator.integers(columns + 1))
    ngram_min = draw(st.integers(1, 4))
    attributes = {
        "ngram_min": ngram_min,
        "ngram_max": draw(st.sampled_from([ngram_min, ngram_min + 1, ngram_min + 3, 31, 32, 40])),
        "num_tokens": draw(st.integers(1, 12)),
        "branches": draw(st.integers(1, max_branches)),
        "latest": draw(st.integers(0, 1)),
    }
    return NgramCase(int32(np.stack(rows).tolist()), int32(lengths), attributes)


@st.composite
def merge_cases(draw: st.DrawFn, max_branches: int = 3, max_tokens: int = 12, distinct: bool = False) -> MergeCase:
    """Few tokens, so that prefixes are shared; `distinct`: no two children of a node of EAGLE's carry the same."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    palette = np.array(draw(st.sampled_from(PALETTES)))
    batch, branches = draw(BATCHES), draw(st.integers(1, max_branches))
    num_tokens, nodes = draw(st.integers(1, max_tokens)), draw(st.integers(0, 16))
    size = draw(st.integers(1, branches * num_tokens + nodes + 2))
    ngram_tokens = generator.choice(palette, size=(batch, branches, num_tokens))
    if draw(st.booleans()):
        ngram_tokens[:, :, : num_tokens // 2] = ngram_tokens[:, :1, : num_tokens // 2]
    ngram_counts = generator.integers(0, num_tokens + 1, size=(batch, branches))
    ngram_counts *= generator.integers(0, 4, size=(batch, 1)) > 0
    chain = draw(st.booleans())
    trees = [_tree(generator, palette, nodes, chain, distinct) for _ in range(batch)]
    eagle_counts = [min(int(generator.choice([0, nodes, generator.integers(nodes + 1)])), n) for _, _, n in trees]
    room = generator.integers(0, size + 3, size=batch)
    return MergeCase(
        int32(ngram_tokens.tolist()),
        int32(ngram_counts.tolist()),
        int32([tokens for tokens, _, _ in trees]).view(batch, nodes),
        int32([parents for _, parents, _ in trees]).view(batch, nodes),
        int32(eagle_counts),
        int32(room.tolist()),
        size,
    )


def _tree(
    generator: np.random.Generator, palette: np.ndarray, nodes: int, chain: bool, distinct: bool
) -> tuple[list[int], list[int], int]:
    """Tokens, parents and the most nodes that may count; garbage behind them."""
    edges: list[tuple[int, int]] = []
    for _ in range(nodes):
        parent = len(edges) if chain else int(generator.integers(len(edges) + 1))
        edge = parent, int(generator.choice(palette))
        if not distinct or edge not in edges:
            edges.append(edge)
    count = len(edges)
    edges += [(-9, 1)] * (nodes - count)
    return [token for _, token in edges], [parent for parent, _ in edges], count


@st.composite
def accept_cases(draw: st.DrawFn, distinct: bool = False) -> AcceptCase:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    palette = np.array(draw(st.sampled_from(PALETTES)))
    batch, nodes = draw(BATCHES), draw(st.integers(1, 14))
    chain = draw(st.booleans())
    trees = [_tree(generator, palette, nodes, chain, distinct) for _ in range(batch)]
    counts = [min(int(generator.choice([0, nodes, generator.integers(nodes + 1)])), n) for _, _, n in trees]
    target = generator.choice(palette, size=(batch, nodes + 1))
    if draw(st.booleans()):
        # A target that agrees with the tree's first child of each row: long walks.
        for sequence, (tokens, parents, _) in enumerate(trees):
            for token, parent in reversed(list(zip(tokens, parents, strict=True))):
                if parent >= 0:
                    target[sequence, parent] = token
    tokens, parents = ([tree[i] for tree in trees] for i in (0, 1))
    return AcceptCase(int32(tokens), int32(parents), int32(counts), int32(target.tolist()))


@st.composite
def commit_cases(draw: st.DrawFn) -> CommitCase:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, nodes = draw(BATCHES), draw(st.integers(1, 10))
    slots, cache_rows = batch + draw(st.integers(0, 2)), nodes + 1 + draw(st.integers(0, 9))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.uint8]))
    shape = 2 * draw(st.integers(1, 2)), slots, draw(st.integers(1, 3)), cache_rows, draw(st.integers(1, 6))
    cache = torch.from_numpy(generator.integers(0, 250, size=shape)).to(dtype)
    starts = generator.integers(0, cache_rows - nodes, size=batch)
    num_accepted = generator.integers(0, nodes + 1, size=batch)
    rows = np.zeros((batch, nodes), dtype=np.int64)
    for sequence, count in enumerate(num_accepted):
        rows[sequence, :count] = 1 + np.sort(generator.choice(nodes, size=count, replace=False))
    return CommitCase(cache, int32(starts.tolist()), int32(rows.tolist()), int32(num_accepted.tolist()))
