"""Acceptance: the longest path of the draft tree that the target would have taken itself."""

from __future__ import annotations

from typing import NamedTuple

from trtspec.draft.tree import DraftTree


class Acceptance(NamedTuple):
    """What a verification yields for one sequence."""

    rows: list[int]
    """Accepted rows below the root, from the root downwards."""
    tokens: list[int]
    """Their tokens, then the bonus token: one more than rows."""

    num_matches: int
    """Draft tokens that are the target's choice after their own parent path, behind a rejection too."""


def accept(tree: DraftTree, target_tokens: list[int]) -> Acceptance:
    """Walk from the root to the child that carries the target's token, as long as there is one.

    Args:
        target_tokens: the target's token after each row, `[width]`.
    """
    row, num_matches = 0, 0
    rows: list[int] = []
    # Rows are in topological order, so one pass meets each row's children after the row itself.
    for child, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True), start=1):
        if token == target_tokens[parent]:
            num_matches += 1
            if parent == row:
                row = child
                rows.append(child)
    return Acceptance(rows, [target_tokens[at] for at in (0, *rows)], num_matches)
