"""The operations by brute force, on plain lists of one sequence; written from their definition, not from the code."""

from __future__ import annotations

LONGEST = 32
Branch = tuple[list[int], int]
"""Tokens of a continuation, and the match's length."""


def ngram_branches(
    history: list[int], *, ngram_min: int, ngram_max: int, num_tokens: int, branches: int, latest: int
) -> list[Branch]:
    """Continuations, best first."""
    length = len(history)
    lengths = {}
    for place in range(1, length):
        sizes = range(min(place, LONGEST) + 1)
        lengths[place] = max(n for n in sizes if history[place - n : place] == history[length - n :])

    def rank(place: int) -> tuple[int, ...]:
        classed = -min(lengths[place], ngram_max)
        if latest and place + num_tokens <= length:
            return classed, 0, -place
        return classed, 1, place

    chosen: dict[int, int] = {}
    for place in sorted((place for place in lengths if lengths[place] >= ngram_min), key=rank):
        chosen.setdefault(history[place], place)
    return [(history[place : place + num_tokens], lengths[place]) for place in chosen.values()][:branches]


def merged(
    branches: list[list[int]], eagle_tokens: list[int], eagle_parents: list[int], room: int
) -> list[tuple[int, int, int, int]]:
    """Token, parent's row, depth and sources of each node."""
    paths: dict[tuple[int, ...], int] = {}
    for branch in branches:
        for end in range(1, len(branch) + 1):
            path = tuple(branch[:end])
            paths[path] = paths.get(path, 0) | 1
    rows: list[tuple[int, ...]] = [()]
    for token, parent in zip(eagle_tokens, eagle_parents, strict=True):
        path = (*rows[parent], token)
        rows.append(path)
        paths[path] = paths.get(path, 0) | 2
    shallowest = sorted(paths, key=len)[:room]
    kept = [(), *(path for path in paths if path in shallowest)]
    return [(path[-1], kept.index(path[:-1]), len(path), paths[path]) for path in kept[1:]]


def accepted(tokens: list[int], parents: list[int], target_tokens: list[int]) -> tuple[list[int], int, int]:
    """Accepted rows, the next token, and how many nodes match."""
    rows: list[int] = []
    at: int | None = 0
    while at is not None:
        last = at
        children = (row for row, parent in enumerate(parents, 1) if parent == last)
        at = next((row for row in children if tokens[row - 1] == target_tokens[last]), None)
        rows += [] if at is None else [at]
    matches = sum(token == target_tokens[parent] for token, parent in zip(tokens, parents, strict=True))
    return rows, target_tokens[last], matches


def committed(rows_of_cache: list[int], start: int, rows: list[int]) -> list[int]:
    """What each cache row holds afterwards."""
    result = list(rows_of_cache)
    for i, row in enumerate(rows):
        result[start + 1 + i] = rows_of_cache[start + row]
    return result
