"""Both drafters' tokens for one sequence as one tree, each with the chance that the target reaches it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trtspec.draft.merge import graft, keep, union
from trtspec.draft.ngram import extend
from trtspec.draft.policy import AutoPolicy, Member, conditional, conditional_rates
from trtspec.draft.tree import EAGLE, EMPTY, NGRAM, DraftTree
from trtspec.sequence import Sequence

LEAST_TAIL = 0.15
"""Chance of the head's whole path from which on a lookup behind it is tried."""
MOST_SURE = 0.995
"""Chance that no drafter is trusted beyond."""
UNLIMITED = 1 << 30


class Candidates(NamedTuple):
    """What may be verified for one sequence."""

    tree: DraftTree
    reached: np.ndarray
    """Chance that the target reaches each node, float64 `[size]`; no node's is above its parent's."""

    @property
    def order(self) -> np.ndarray:
        """Nodes from the likeliest on; parents stand before their children."""
        return np.argsort(-self.reached, kind="stable")

    def best(self, count: int) -> DraftTree:
        """The tree of the likeliest nodes."""
        if count >= self.tree.size:
            return self.tree
        return keep(self.tree, (1 + np.sort(self.order[:count])).tolist()) if count else EMPTY


def candidates(policy: AutoPolicy, member: Member, sequence: Sequence, head_tree: DraftTree) -> Candidates:
    """The lookup's continuation, the head's tree, and what a lookup finds behind the head's own path."""
    looked_up = EMPTY if member.match is None else DraftTree.chain(member.match.continuation[: member.room], NGRAM)
    if not head_tree.size:
        return Candidates(looked_up, member.ngram_paths)
    tree = union(looked_up, head_tree, UNLIMITED)
    head_rates = np.full(tree.size, np.nan)
    by_head = np.flatnonzero(tree.sources & EAGLE)
    head_rates[by_head] = policy.head_rates.rates(conditional(tree)[by_head], tree.depths[1:][by_head])
    ngram_rates = np.full(tree.size, np.nan)
    ngram_rates[: looked_up.size] = conditional_rates(member.ngram_paths)
    reached = _reached(tree, ngram_rates, head_rates)
    row = _row_of(tree, head_tree)
    start = float(reached[row - 1]) if row else 0.0
    tail = tail_of(sequence, head_tree, member.room) if start >= LEAST_TAIL else NO_TAIL
    if not len(tail.tokens):
        return Candidates(tree, reached)
    longer = graft(tree, row, tail.tokens, NGRAM, UNLIMITED)
    new = longer.size - tree.size
    chances = policy.ngram_rates.path_rates(tail.length, member.state.heat, len(tail.tokens), member.state.ngram_bias)
    # Its first tokens may be nodes of the lookup's continuation.
    ngram_rates = np.concatenate((ngram_rates, conditional_rates(chances)[len(chances) - new :]))
    head_rates = np.concatenate((head_rates, np.full(new, np.nan)))
    return Candidates(longer, _reached(longer, ngram_rates, head_rates))


class Tail(NamedTuple):
    """What a lookup finds behind a drafted path."""

    tokens: np.ndarray
    length: int
    """Of the match."""


NO_TAIL = Tail(np.zeros(0, dtype=np.int32), 0)


def tail_of(sequence: Sequence, head_tree: DraftTree, room: int) -> Tail:
    """A lookup behind the head's chain: the match must be one that a hybrid trusts, because its end is only drafted.

    A tree with branches has no path that a lookup should follow, so nothing is looked up behind it.
    """
    options = sequence.speculation
    if not head_tree.is_chain or head_tree.size >= room:
        return NO_TAIL
    match = extend(
        sequence.history,
        head_tree.tokens,
        ngram_min=options.hybrid_ngram_min,
        ngram_max=max(options.ngram_max, options.hybrid_ngram_min),
        num_tokens=min(options.ngram_tokens, room - head_tree.size),
        occurrence=options.ngram_occurrence,
    )
    return NO_TAIL if match is None else Tail(match.continuation, match.length)


def with_tail(tree: DraftTree, sequence: Sequence, head_tree: DraftTree, room: int) -> DraftTree:
    """The tree of the `union` merge with what a lookup finds behind the head's chain, as far as there is room."""
    tail = tail_of(sequence, head_tree, room)
    row = _row_of(tree, head_tree)
    return graft(tree, row, tail.tokens, NGRAM, room) if len(tail.tokens) and row else tree


def _row_of(tree: DraftTree, chain: DraftTree) -> int:
    """The row of a chain's last token in a tree; 0 where the tree doesn't hold the whole chain."""
    edges = {edge: row for row, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True), 1)}
    row = 0
    for token in chain.tokens.tolist():
        row = edges.get((row, token), 0)
        if not row:
            return 0
    return row


def _reached(tree: DraftTree, ngram: np.ndarray, head: np.ndarray) -> np.ndarray:
    """The chance that each node is reached, from each drafter's rates behind the parent (NaN: not proposed).

    The drafters are taken for independent witnesses: a token that both propose is wrong only where both are; where they
    propose different ones, at most one is right.
    """
    parents = tree.parents.tolist()
    looked_up, headed = (np.nan_to_num(rates).clip(0.0, MOST_SURE).tolist() for rates in (ngram, head))
    families: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        families.setdefault(parent, []).append(node)
    rates = [0.0] * tree.size
    for nodes in families.values():
        found = _shared([looked_up[node] for node in nodes], [headed[node] for node in nodes])
        for node, rate in zip(nodes, found, strict=True):
            rates[node] = rate
    reached = [1.0]
    for parent, rate in zip(parents, rates, strict=True):
        reached.append(reached[parent] * rate)
    return np.array(reached[1:])


def _shared(looked_up: list[float], headed: list[float]) -> list[float]:
    """The chances of siblings, of which at most one is right, by each drafter's own; 0: not proposed."""
    looked_up, headed = _at_most_one(looked_up), _at_most_one(headed)
    some_p, some_q = sum(looked_up), sum(headed)
    if not some_p or not some_q:
        return [p or q for p, q in zip(looked_up, headed, strict=True)]
    agree = any(p and q for p, q in zip(looked_up, headed, strict=True))
    # Where they differ, the case in which both are right is left out.
    scale = 1.0 if agree else 1.0 / (1.0 - some_p * some_q)
    rates = [
        1.0 - (1.0 - p) * (1.0 - q) if p and q else (p * (1.0 - some_q) + q * (1.0 - some_p)) * scale
        for p, q in zip(looked_up, headed, strict=True)
    ]
    return _at_most_one(rates)


def _at_most_one(rates: list[float]) -> list[float]:
    """Chances of siblings, scaled down where they make more than one."""
    total = sum(rates)
    return [rate * MOST_SURE / total for rate in rates] if total > MOST_SURE else rates
