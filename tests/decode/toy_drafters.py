"""Lookups for the toy target: random trees and matches, and what the target will choose."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import numpy as np
from toy import ToyTarget, chosen

from trtspec.draft.ngram import Match, NgramDrafter
from trtspec.draft.tree import EAGLE, EMPTY, NGRAM, DraftTree, check_tree
from trtspec.sequence import Sequence


class TreeDrafter(NgramDrafter):
    """Proposes random trees with siblings: `skill` of the branches go on as the target does, the others at random.

    For merges they are random matches of any length.
    """

    def __init__(self, target: ToyTarget, seed: int, skill: float = 0.7, favourites: Seq[int] = ()) -> None:
        """`favourites` are tokens that wrong guesses prefer."""
        self._target = target
        self._random = random.Random(seed)
        self._skill = skill
        self._favourites = list(favourites)
        self.trees: list[DraftTree] = []

    def draft(self, sequence: Sequence, room: int) -> DraftTree:
        paths: list[list[int]] = [sequence.history.tolist()]
        parents: list[int] = []
        tokens: list[int] = []
        for _ in range(self._random.randint(0, room)):
            # The newest row half of the time, so that trees grow deep as well as wide.
            parent = len(tokens) if self._random.random() < 0.5 else self._random.randint(0, len(tokens))
            token = self._guess(sequence, paths[parent])
            if (parent, token) not in zip(parents, tokens, strict=True):
                parents.append(parent)
                tokens.append(token)
                paths.append([*paths[parent], token])
        if not tokens:
            return EMPTY
        sources = [self._random.choice((NGRAM, EAGLE, NGRAM | EAGLE)) for _ in tokens]
        tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(sources, np.int8))
        check_tree(tree)
        self.trees.append(tree)
        return tree

    def matches(self, sequence: Sequence, num_tokens: int) -> list[Match]:
        found: dict[int, Match] = {}
        for _ in range(self._random.choice((0, 1, 1, 2)) if num_tokens else 0):
            path = sequence.history.tolist()
            for _ in range(self._random.randint(1, num_tokens)):
                path.append(self._guess(sequence, path))
            continuation = np.array(path[sequence.length :], dtype=np.int32)
            found.setdefault(int(continuation[0]), Match(continuation, self._random.randint(1, 9)))
        return list(found.values())

    def _guess(self, sequence: Sequence, path: list[int]) -> int:
        if self._random.random() < self._skill:
            return chosen(self._target, path, sequence.prompt_length, sequence.sampling)
        return self._random.choice(self._favourites or range(self._target.vocab))


class OracleDrafter(NgramDrafter):
    """Proposes a chain of what the target will choose, as long as there is room, whatever ends the sequence."""

    def __init__(self, target: ToyTarget, num_tokens: int) -> None:
        self._target = target
        self._num_tokens = num_tokens
        self.trees: list[DraftTree] = []

    def draft(self, sequence: Sequence, room: int) -> DraftTree:
        self.trees.append(DraftTree.chain(self._future(sequence, room), NGRAM))
        return self.trees[-1]

    def matches(self, sequence: Sequence, num_tokens: int) -> list[Match]:
        return [Match(self._future(sequence, num_tokens), 9)] if num_tokens else []

    def _future(self, sequence: Sequence, room: int) -> np.ndarray:
        path = sequence.history.tolist()
        for _ in range(min(room, self._num_tokens)):
            path.append(chosen(self._target, path, sequence.prompt_length, sequence.sampling))
        return np.array(path[sequence.length :], dtype=np.int32)
