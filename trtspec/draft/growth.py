"""EAGLE-2's dynamic draft tree: which candidates a level is grown from, and which become the tree."""

from __future__ import annotations

import numpy as np

from trtspec.draft.tree import EAGLE, DraftTree


class TreeGrowth:
    """The candidates of one sequence's tree. All ties go to the candidate that came first.

    A candidate's score is the log-probability of its path. Each level proposes `top_k` tokens behind each of the
    `top_k` candidates of the last level that scored best: the beam.
    """

    def __init__(self, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """Start with the tokens proposed behind the root and their log-probabilities, `[top_k]`."""
        self.top_k = len(tokens)
        self.tokens = tokens
        """The beam's tokens, `[top_k]`."""
        self.parents = np.zeros(self.top_k, dtype=np.int64)
        """Each beam node's parent: its place in the beam before, `[top_k]`."""
        self._beam = np.arange(1, self.top_k + 1)
        self._beam_scores = log_probs
        # Of all candidates so far, level by level; number 0 is the root.
        self._tokens = [tokens]
        self._scores = [log_probs]
        self._parents = [self.parents]
        self._count = 1 + self.top_k

    def extend(self, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """Add what was proposed behind each beam node, `[top_k, top_k]`, and choose the next beam."""
        scores = (self._beam_scores[:, None] + log_probs).ravel()
        flat = tokens.ravel()
        best = _best(scores, self.top_k)
        self._tokens.append(flat)
        self._scores.append(scores)
        self._parents.append(self._beam.repeat(self.top_k))
        self.tokens, self._beam_scores, self._beam = flat[best], scores[best], best + self._count
        self.parents = best // self.top_k
        self._count += len(flat)

    def tree(self, size: int) -> DraftTree:
        """The tree of the `size` best candidates.

        No child scores better than its parent or comes before it, so the parents of the best are among them.
        """
        scores = np.concatenate(self._scores)
        chosen = np.sort(_best(scores, size))
        rows = np.concatenate(([0], chosen + 1))
        parents = np.searchsorted(rows, np.concatenate(self._parents)[chosen])
        tokens = np.concatenate(self._tokens)[chosen]
        return DraftTree(
            tokens.astype(np.int32),
            parents.astype(np.int32),
            np.full(len(chosen), EAGLE, dtype=np.int8),
            scores[chosen].astype(np.float32, copy=False),
        )


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` highest scores, best first."""
    return np.argsort(-scores, kind="stable")[:count]
