"""Acceptance: the longest path of the draft tree that the target would have taken itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trtspec.draft.tree import DraftTree


@dataclass(frozen=True)
class Acceptance:
    """What a verification yields for one sequence."""

    rows: list[int]
    """Accepted rows below the root, from the root downwards."""
    tokens: list[int]
    """Their tokens, then the bonus token: one more than rows."""

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted."""
        return len(self.rows)


def accept(tree: DraftTree, target_tokens: np.ndarray) -> Acceptance:
    """Walk from the root to the child that carries the target's token, as long as there is one.

    Args:
        target_tokens: the target's token after each row, integer `[width]`.
    """
    row, rows, tokens = 0, [], []
    # Rows are in topological order, so one pass meets each row's children after the row itself.
    for child, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True), start=1):
        if parent == row and token == target_tokens[row]:
            row = child
            rows.append(child)
            tokens.append(token)
    return Acceptance(rows, [*tokens, int(target_tokens[row])])


def count_matches(tree: DraftTree, target_tokens: np.ndarray) -> int:
    """Draft tokens equal to the target's token after their own parent path, behind a rejection too."""
    return int((tree.tokens == target_tokens[tree.parents]).sum())
