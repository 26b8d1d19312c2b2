"""N-gram lookup (prompt lookup): find the last tokens earlier in the history and propose what followed them."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import NamedTuple

import numpy as np

from trtspec.draft.merge import union
from trtspec.draft.tree import EMPTY, NGRAM, DraftTree
from trtspec.sequence import Sequence

LONGEST_MATCH = 32
"""Tokens up to which the length of a match is told."""


class Match(NamedTuple):
    """An earlier place of the history's last tokens."""

    continuation: np.ndarray
    """The tokens behind it, integer `[1..num_tokens]`, a view of the history."""
    length: int
    """Tokens in front of the continuation that equal the history's last ones, counted up to LONGEST_MATCH whatever
    ngram_max is: the longer, the likelier is the continuation accepted."""


def find_match(
    history: np.ndarray, *, ngram_min: int, ngram_max: int, num_tokens: int, occurrence: str = "earliest"
) -> Match | None:
    """The longest earlier match of the history's last tokens.

    The longest n in [ngram_min, ngram_max] for which the last n tokens also end earlier in the history wins. Of its
    matches, `earliest` takes the first (vLLM's rule); `latest` takes the last one that num_tokens tokens follow, or
    the first where none does (the very last one would starve on a constant run). A match may overlap the last tokens;
    the continuation is cut at the end of the history.

    Args:
        history: committed tokens, integer `[length]`.
        num_tokens: tokens to propose at most.
    """
    text = _Text(history.tobytes(), history.itemsize)
    found = _longest(text, ngram_min, ngram_max, num_tokens, occurrence)
    return None if found is None else _match(history, text, found.end, num_tokens)


def find_branches(
    history: np.ndarray,
    *,
    ngram_min: int,
    ngram_max: int,
    num_tokens: int,
    occurrence: str = "earliest",
    count: int,
) -> list[Match]:
    """At most `count` matches whose continuations begin with different tokens, the one of `find_match` first.

    Those behind it are the next best: of its n in the order of the occurrence rule (`latest`: those that num_tokens
    tokens follow from the last to the first, then the others from the first to the last), then of each shorter n.
    At most 4 * count + 16 searches are made for them, so where many matches go on alike some branches may be missing.

    Args:
        history: committed tokens, integer `[length]`.
        num_tokens: tokens of a continuation at most.
    """
    text = _Text(history.tobytes(), history.itemsize)
    best = _longest(text, ngram_min, ngram_max, num_tokens, occurrence)
    if best is None or count < 1:
        return []
    ends = {int(history[best.end]): best.end}
    if count > 1:
        shorter = range(best.n, ngram_min - 1, -1)
        searches = (end for n in shorter for end in _ends(text, n, num_tokens, occurrence))
        for end in islice(searches, 4 * count + 16):
            if end >= 0:
                ends.setdefault(int(history[end]), end)
            if len(ends) == count:
                break
    return [_match(history, text, end, num_tokens) for end in ends.values()]


def extend(
    history: np.ndarray,
    path: np.ndarray,
    *,
    ngram_min: int,
    ngram_max: int,
    num_tokens: int,
    occurrence: str = "earliest",
) -> Match | None:
    """`find_match` as if a drafted path had been committed: what may follow the path's last token.

    Args:
        history: committed tokens, integer `[length]`.
        path: tokens behind them, integer `[depth]`.
        num_tokens: tokens to propose at most.
    """
    data = b"".join((history.data, path.astype(history.dtype, copy=False).data))
    text = _Text(data, history.itemsize)
    found = _longest(text, ngram_min, ngram_max, num_tokens, occurrence)
    return None if found is None else _match(np.frombuffer(data, history.dtype), text, found.end, num_tokens)


class _Text:
    """Tokens as bytes.

    A step finds the caches cold: one call that scans bytes costs less there than several small array operations.
    """

    def __init__(self, data: bytes, size: int) -> None:
        """`size` is a token's, in bytes."""
        self.length = len(data) // size
        self._data = data
        self._size = size

    def first(self, n: int, start: int, stop: int) -> int:
        """Where the last n tokens first stand within tokens start..stop-1, or -1."""
        data, size, end = self._data, self._size, stop * self._size
        pattern = data[(self.length - n) * size :]
        at = data.find(pattern, start * size, end)
        while at >= 0 and at % size:
            at = data.find(pattern, at + 1, end)
        # -1 stays -1.
        return at // size

    def last(self, n: int, start: int, stop: int) -> int:
        """Where the last n tokens last stand within tokens start..stop-1, or -1."""
        data, size, begin = self._data, self._size, start * self._size
        pattern = data[(self.length - n) * size :]
        at = data.rfind(pattern, begin, stop * size)
        while at >= 0 and at % size:
            at = data.rfind(pattern, begin, at + len(pattern) - 1)
        return at // size

    def match_length(self, end: int) -> int:
        """How many tokens in front of `end` equal the last ones of the text, at most LONGEST_MATCH."""
        size, most = self._size, min(end, LONGEST_MATCH)
        before = self._data[(end - most) * size : end * size]
        final = self._data[(self.length - most) * size :]
        # As little-endian numbers, the last token that differs holds their highest differing bit.
        differing = int.from_bytes(before, "little") ^ int.from_bytes(final, "little")
        return most - -(-differing.bit_length() // (8 * size))


class _Found(NamedTuple):
    n: int
    end: int
    """The token behind the match."""


def _longest(text: _Text, ngram_min: int, ngram_max: int, num_tokens: int, occurrence: str) -> _Found | None:
    """The match of `find_match`."""
    n, stop = ngram_min, text.length - 1
    longest = min(ngram_max, stop)
    if num_tokens < 1 or longest < ngram_min:
        return None
    at = first = text.first(n, 0, stop)
    if first < 0:
        return None
    for longer in range(longest, ngram_min, -1):
        # Where a longer match ends, a shorter one ends too: none begins before this.
        found = text.first(longer, max(first - (longer - ngram_min), 0), stop)
        if found >= 0:
            n, at = longer, found
            break
    if occurrence == "latest":
        at = max(at, text.last(n, at, max(text.length - num_tokens, 0)))
    return _Found(n, at + n)


def _ends(text: _Text, n: int, num_tokens: int, occurrence: str) -> Iterator[int]:
    """The tokens behind each match of n tokens, best first: one for each search, -1 if it found none."""
    start = at = 0
    if occurrence == "latest":
        stop = max(text.length - num_tokens, 0)
        start = max(stop - n + 1, 0)
        while at >= 0:
            at = text.last(n, 0, stop)
            yield at + n if at >= 0 else -1
            stop = at + n - 1
        at = 0
    while at >= 0:
        at = text.first(n, start, text.length - 1)
        yield at + n if at >= 0 else -1
        start = at + 1


def _match(tokens: np.ndarray, text: _Text, end: int, num_tokens: int) -> Match:
    return Match(tokens[end : end + num_tokens], text.match_length(end))


def tree_of(matches: Seq[Match], size: int) -> DraftTree:
    """The matches' continuations as a tree of at most `size` tokens, the first one's in its first rows."""
    tree = EMPTY
    for match in matches:
        tree = union(tree, DraftTree.chain(match.continuation, NGRAM), size)
    return tree


class LookupAsk(NamedTuple):
    """What one sequence of a batch asks of a lookup."""

    sequence: Sequence
    num_tokens: int
    """Tokens of a continuation at most; 0: nothing is looked up."""
    merged: bool = False
    """Whether a MergeAsk follows in the same step, and nobody needs the matches before."""


class MergeAsk(NamedTuple):
    """A sequence whose lookup is to be verified together with the head's draft."""

    slot: int
    """Its place in the batch."""
    sequence: Sequence
    num_tokens: int
    """As in its LookupAsk."""
    matches: list[Match]
    """What the lookup answered to that."""
    head_tree: DraftTree
    """What the head proposed; perhaps empty."""
    room: int
    """Draft tokens at most."""


class NgramDrafter:
    """Looks up on the host. It keeps no state: a slot's next user starts clean."""

    def lookups(self, asks: Seq[LookupAsk]) -> list[list[Match]]:
        """The matches of each sequence of a batch, best first."""
        return [self.matches(ask.sequence, ask.num_tokens) if ask.num_tokens else [] for ask in asks]

    def merges(self, asks: Seq[MergeAsk]) -> list[DraftTree]:
        """Both drafts of each sequence as one tree."""
        return [union(tree_of(ask.matches, ask.room), ask.head_tree, ask.room) for ask in asks]

    def matches(self, sequence: Sequence, num_tokens: int) -> list[Match]:
        """One sequence's matches by its options, but continued by at most `num_tokens`."""
        options = sequence.speculation
        return find_branches(
            sequence.history,
            ngram_min=options.ngram_min,
            ngram_max=options.ngram_max,
            num_tokens=num_tokens,
            occurrence=options.ngram_occurrence,
            count=options.ngram_branches,
        )

    def close(self) -> None:
        """Nothing is held."""
