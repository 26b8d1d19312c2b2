"""What a drafter of n-grams offers, wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from trtspec.draft.ngram import LookupAsk, Match, MergeAsk
from trtspec.draft.tree import DraftTree


class Lookup(Protocol):
    """Answers the sequences of a batch together.

    Where the same is asked, all give the same, but that one on the device may find branches beyond those at which the
    host's search ends, and that its merged trees have no scores.
    """

    def lookups(self, asks: Seq[LookupAsk]) -> list[list[Match]]:
        """The matches of each sequence by its options, best first.

        Args:
            asks: one for each of the slots 0, 1, ...

        Returns:
            For each, at most ngram_branches matches whose continuations begin with different tokens. Perhaps none
            where a MergeAsk follows.
        """
        ...

    def merges(self, asks: Seq[MergeAsk]) -> list[DraftTree]:
        """The matches' continuations and the head's draft of each sequence as one tree of at most `room` tokens."""
        ...

    def close(self) -> None:
        """Free what is held; nothing may be asked afterwards."""
        ...
