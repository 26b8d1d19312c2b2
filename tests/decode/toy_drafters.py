"""Drafters for the toy target: random trees, what the target will pick, and EAGLE under watch."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import numpy as np
from draft.toy_head import ToyHead, committed_rows, expected_draft
from toy import ToyTarget

from trtspec.draft.eagle import EagleDrafter
from trtspec.draft.head_state import HeadState
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.tree import EMPTY, NGRAM, SOURCES, DraftTree, check_tree
from trtspec.engine.kv_cache import KVCache
from trtspec.sequence import Sequence


class TreeDrafter(NgramDrafter):
    """Proposes random trees with siblings: `skill` of the branches go on as the target does, the others at random."""

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
            token = self._guess(paths[parent])
            if (parent, token) not in zip(parents, tokens, strict=True):
                parents.append(parent)
                tokens.append(token)
                paths.append([*paths[parent], token])
        if not tokens:
            return EMPTY
        source = tuple(self._random.choice(SOURCES) for _ in tokens)
        tree = DraftTree(np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32), source)
        check_tree(tree)
        self.trees.append(tree)
        return tree

    def _guess(self, path: list[int]) -> int:
        if self._random.random() < self._skill:
            return self._target.next_token(path)
        return self._random.choice(self._favourites or range(self._target.vocab))


class OracleDrafter(NgramDrafter):
    """Proposes a chain of what the target will pick, as long as there is room, whatever ends the sequence."""

    def __init__(self, target: ToyTarget, num_tokens: int) -> None:
        self._target = target
        self._num_tokens = num_tokens
        self.trees: list[DraftTree] = []

    def draft(self, sequence: Sequence, room: int) -> DraftTree:
        path = sequence.history.tolist()
        for _ in range(min(room, self._num_tokens)):
            path.append(self._target.next_token(path))
        self.trees.append(DraftTree.chain(np.array(path[sequence.length :]), NGRAM))
        return self.trees[-1]


class CheckedEagle(EagleDrafter):
    """Every draft must be the one that official EAGLE code would make of the committed tokens."""

    def __init__(self, target: ToyTarget, head: ToyHead, cache: KVCache) -> None:
        super().__init__(head, cache)
        self.target, self.toy = target, head
        self.trees: list[DraftTree] = []

    def draft(self, sequences: Seq[Sequence], states: Seq[HeadState | None], rooms: Seq[int]) -> list[DraftTree]:
        trees = super().draft(sequences, states, rooms)
        for sequence, state, room, tree in zip(sequences, states, rooms, trees, strict=True):
            check_tree(tree)
            if state is None or state.stopped:
                assert tree is EMPTY
            elif sequence.length + 8 < state.max_rows:
                path = sequence.history.tolist()
                features = [self.target.feature(path[: i + 1]) for i in range(len(path) - 1)]
                rows = committed_rows(self.toy, path, features)
                right = expected_draft(self.toy, sequence.speculation, rows, room) if room else EMPTY
                assert (tree.tokens.tolist(), tree.parents.tolist()) == (right.tokens.tolist(), right.parents.tolist())
            self.trees.append(tree)
        return trees
