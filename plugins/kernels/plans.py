"""What a kernel is specialised to: its constants and its number of warps, for each operation and its sizes."""

from __future__ import annotations

from typing import NamedTuple

from trtspec.plugins.definition import LONGEST_MATCH

TILE = 2048
"""Tokens of the history that a turn of ngram_draft looks at."""
COMPARISONS = 32
"""Of two items, that a thread of merge_drafts makes in a turn: many more don't fit into its registers."""
OPTIONS = {"enable_fp_fusion": True}
"""Of the compiler. Nothing here has fractions, but triton 3.9 warns where this isn't said."""


class Plan(NamedTuple):
    """How to compile and launch a kernel."""

    constants: dict[str, int]
    """Compile-time parameters by name."""
    num_warps: int
    """A program has 32 times as many threads."""


def ngram_draft_plan(*, ngram_min: int, ngram_max: int, num_tokens: int, branches: int, latest: int) -> Plan:
    """Grid: `[B]`."""
    constants = {
        "NGRAM_MIN": ngram_min,
        "NGRAM_MAX": min(ngram_max, LONGEST_MATCH),
        "NUM_TOKENS": num_tokens,
        "BRANCHES": branches,
        "LATEST": int(latest),
        "LONGEST": LONGEST_MATCH,
        "TILE": TILE,
        "BRANCH_BLOCK": _power_of_two(branches),
        "TOKEN_BLOCK": _power_of_two(num_tokens),
    }
    return Plan(constants, num_warps=min(max(TILE // 256, 1), 16))


def merge_drafts_plan(*, branches: int, num_tokens: int, nodes: int, size: int) -> Plan:
    """Grid: `[B]`."""
    items = _power_of_two(1 + branches * num_tokens + nodes)
    num_warps = min(max(items // 32, 1), 16)
    constants = {
        "BRANCHES": branches,
        "NUM_TOKENS": num_tokens,
        "NODES": nodes,
        "SIZE": size,
        "ITEMS": items,
        "SIZE_BLOCK": _power_of_two(size),
        "ROUNDS": (max(num_tokens, nodes) - 1).bit_length(),
        "CHUNK": max(min(items, COMPARISONS * 32 * num_warps // items), 1),
    }
    return Plan(constants, num_warps)


def accept_plan(*, nodes: int) -> Plan:
    """Grid: `[B]`."""
    return Plan({"NODES": nodes, "NODE_BLOCK": _power_of_two(nodes)}, num_warps=1)


def kv_commit_plan(*, nodes: int, head_dim: int) -> Plan:
    """Grid: `[planes * heads, B]`."""
    return Plan({"NODES": nodes, "HEAD_BLOCK": _power_of_two(head_dim)}, num_warps=1)


def _power_of_two(size: int) -> int:
    """The least power of two that is at least `size`: blocks of a kernel have no other sizes."""
    return 1 << (size - 1).bit_length()
