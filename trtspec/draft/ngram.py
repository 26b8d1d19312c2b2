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
    length = len(history)
    if num_tokens < 1 or length <= ngram_min:
        return history[:0]
    ends = np.flatnonzero(history[:-1] == history[-1])
    longest = ends[:0]
    for n in range(1, min(ngram_max, length - 1) + 1):
        if n > 1:
            ends = ends[ends >= n - 1]
            ends = ends[history[ends - (n - 1)] == history[length - n]]
        if not ends.size:
            break
        if n >= ngram_min:
            longest = ends
    if not longest.size:
        return history[:0]
    end = longest[0]
    if occurrence == "latest":
        full = longest[longest < length - num_tokens]
        end = full[-1] if full.size else longest[0]
    return history[end + 1 : end + 1 + num_tokens]


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
