"""What the device operations mean. The reference, the kernels and the graph operators all follow this text.

All tensors are int32 and contiguous except the cache. B is the batch, L the columns of the history, R the branches,
K the tokens of a branch, M the nodes of the EAGLE tree, N the nodes of the draft. Rows number the inputs of a
verification: row 0 is the root (the last committed token) and node i of a tree is row i + 1. A parent's row is never
greater than the index of its child, so a parent precedes its children.

ngram_draft: what followed the history's last tokens earlier
    history [B, L], lengths [B] -> tokens [B, R, K], counts [B, R], match_lengths [B, R]

    Per sequence, h is history[:length]; what stands behind it is never looked at. A place e, 1 <= e < length, matches
    to the length n(e): the largest n <= 32 (LONGEST_MATCH) with n <= e for which the n tokens in front of e equal the
    last n tokens of h. They may overlap them. Places with n(e) < ngram_min don't count. A place with the greater
    min(n(e), ngram_max) is better. Among equals the `earliest` rule prefers the lowest e. The `latest` rule (latest =
    1) prefers places that K tokens follow (e + K <= length), from the highest e to the lowest, and only then the
    others, from the lowest to the highest: the very last ones would have hardly a continuation in a repetition.
    Branch 0 is the best place; each further branch is the best place whose first token h[e] no earlier branch begins
    with. A branch's tokens are h[e : min(e + K, length)], its count says how many they are (at least one; 0 where
    there is no such branch), its match length is n(e). Tokens behind the count and the match length of no branch are 0.

merge_drafts: the branches and the EAGLE tree as one tree
    ngram_tokens [B, R, K], ngram_counts [B, R], eagle_tokens [B, M], eagle_parents [B, M], eagle_counts [B], room [B]
    -> tokens, parents, depths, sources [B, N], counts [B]

    A trie starts with its root. Every branch is a path from the root, inserted token by token, branch 0 first. Then
    EAGLE's nodes are inserted in their order, each below what became of its parent. Inserting finds the child of that
    parent with that token, or appends it. A node's sources are the flags of all that inserted it: 1 (NGRAM), 2
    (EAGLE). Then at most min(room, N) nodes stay: the shallowest, and of equally deep ones those appended first. They
    keep the order in which they were appended, so a first branch that fits is a chain at the start. depths counts from
    1, for the root's children. All outputs are 0 behind the count.

accept: the path that the target takes itself
    tokens [B, N], parents [B, N], counts [B], target_tokens [B, N + 1]
    -> rows [B, N], num_accepted [B], next_token [B], num_matches [B]

    target_tokens[row] is the target's token behind a row. From the root on, go to the first child that carries the
    target's token of the row you stand on, as long as there is one. rows are the rows walked through, without the
    root, 0 behind num_accepted; next_token is the target's token behind the last row. num_matches counts the nodes
    that carry the target's token behind their own parent, whether the walk reaches them or not.

kv_commit: the cache keeps the accepted path
    cache [planes, slots, heads, rows, head_dim] of any dtype, changed in place; starts [B], rows [B, N],
    num_accepted [B]

    Sequence b lives in slot b and its root in cache row starts[b]. In all planes and heads, cache row starts[b] +
    rows[b, i] moves to row starts[b] + 1 + i for each i < num_accepted[b]. Accepted rows increase, so moving them in
    ascending order overwrites nothing that is still to be moved.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LONGEST_MATCH = 32
"""Tokens up to which the length of a match is told."""
NGRAM, EAGLE = 1, 2
"""Flags of `MergedDraft.sources`."""
MAX_COLUMNS = (2**31 - 1) // (2 * (LONGEST_MATCH + 1)) - 1
"""Longest history: the rank of a place has to fit into 32 bits."""


class NgramDraft(NamedTuple):
    """Continuations of each sequence, best first."""

    tokens: torch.Tensor
    """int32 `[B, R, K]`, 0 behind the count."""
    counts: torch.Tensor
    """int32 `[B, R]`: 0 where there is no such branch."""
    match_lengths: torch.Tensor
    """int32 `[B, R]`: tokens in front of the continuation that equal the history's last ones."""


class MergedDraft(NamedTuple):
    """One draft tree for each sequence, 0 behind the count."""

    tokens: torch.Tensor
    """int32 `[B, N]`"""
    parents: torch.Tensor
    """int32 `[B, N]`: rows, 0 is the root."""
    depths: torch.Tensor
    """int32 `[B, N]`: 1 for a child of the root."""
    sources: torch.Tensor
    """int32 `[B, N]`: NGRAM, EAGLE or both."""
    counts: torch.Tensor
    """int32 `[B]`"""


class Acceptance(NamedTuple):
    """What each sequence's verification yields."""

    rows: torch.Tensor
    """int32 `[B, N]`: accepted rows from the root downwards, 0 behind the number accepted."""
    num_accepted: torch.Tensor
    """int32 `[B]`"""
    next_token: torch.Tensor
    """int32 `[B]`: the target's token behind the last accepted row."""
    num_matches: torch.Tensor
    """int32 `[B]`: nodes with the target's token behind their parent."""
