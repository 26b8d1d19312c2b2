"""N-gram lookup (prompt lookup): find the last tokens earlier in the history and propose what followed them."""

from __future__ import annotations

import numpy as np

from trtspec.draft.tree import EMPTY, NGRAM, DraftTree
from trtspec.sequence import Sequence


def lookup(
    history: np.ndarray, *, ngram_min: int, ngram_max: int, num_tokens: int, occurrence: str = "earliest"
) -> np.ndarray:
    """The continuation of the longest earlier match of the history's last tokens.

    The longest n in [ngram_min, ngram_max] for which the last n tokens also end earlier in the history wins. Of its
    matches, `earliest` takes the first (vLLM's rule); `latest` takes the last one that num_tokens tokens follow, or
    the first where none does (the very last one would starve on a constant run). A match may overlap the last tokens;
    the continuation is cut at the end of the history.

    Args:
        history: committed tokens, integer `[length]`.
        num_tokens: tokens to propose at most.

    Returns:
        Integer `[0..num_tokens]`, a view of the history; empty without a match.
    """
    length, size = len(history), history.itemsize
    longest = min(ngram_max, length - 1)
    if num_tokens < 1 or longest < ngram_min:
        return history[:0]
    data = history.tobytes()
    end = (length - 1) * size
    at = first = _find(data, data[(length - ngram_min) * size :], 0, end, size)
    if first < 0:
        return history[:0]
    n = ngram_min
    for longer in range(longest, ngram_min, -1):
        # Where a longer match ends, a shorter one ends too: none begins before this.
        start = max(first - (longer - ngram_min) * size, 0)
        found = _find(data, data[(length - longer) * size :], start, end, size)
        if found >= 0:
            n, at = longer, found
            break
    if occurrence == "latest":
        full = max(length - num_tokens, 0) * size
        at = max(at, _find_last(data, data[(length - n) * size :], at, full, size))
    continuation = at // size + n
    return history[continuation : continuation + num_tokens]


def _find(data: bytes, pattern: bytes, start: int, end: int, size: int) -> int:
    """Offset of the first occurrence within data[start:end] that begins at a token, or -1.

    Bytes are searched because a step finds the caches cold: one call that scans costs less there than several small
    array operations.
    """
    at = data.find(pattern, start, end)
    while at >= 0 and at % size:
        at = data.find(pattern, at + 1, end)
    return at


def _find_last(data: bytes, pattern: bytes, start: int, end: int, size: int) -> int:
    """Offset of the last occurrence within data[start:end] that begins at a token, or -1."""
    at = data.rfind(pattern, start, end)
    while at >= 0 and at % size:
        at = data.rfind(pattern, start, at + len(pattern) - 1)
    return at


class NgramDrafter:
    """Proposes a chain by `lookup` on prompt and output. It keeps no state: a slot's next user starts clean."""

    name = NGRAM

    def draft(self, sequence: Sequence, room: int) -> DraftTree:
        """A chain of at most `room` tokens for one sequence, or the empty tree."""
        options = sequence.speculation
        tokens = lookup(
            sequence.history,
            ngram_min=options.ngram_min,
            ngram_max=options.ngram_max,
            num_tokens=min(options.ngram_tokens, room),
            occurrence=options.ngram_occurrence,
        )
        return DraftTree.chain(tokens, NGRAM) if len(tokens) else EMPTY
