"""The body of trtspec::merge_drafts in standard operations.

All candidates, root first, then the branches' tokens, then EAGLE's nodes, are compared with all others: two are one
node where their paths are equal. Paths are compared by doubling: the first 2, 4, 8 ... tokens upwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtspec.graph.function import FunctionBody
from trtspec.plugins.definition import EAGLE, NGRAM

MERGE_DRAFTS = "merge_drafts"


@dataclass(frozen=True)
class Merge:
    """The sizes of one merge."""

    branches: int
    num_tokens: int
    eagle_nodes: int
    size: int

    @property
    def attributes(self) -> dict[str, int]:
        """The node's."""
        return {"size": self.size}

    @property
    def num_ngram(self) -> int:
        """Candidates from the n-gram branches."""
        return self.branches * self.num_tokens

    @property
    def width(self) -> int:
        """Candidates, with the root."""
        return 1 + self.num_ngram + self.eagle_nodes

    @property
    def doublings(self) -> int:
        """After so many, a comparison takes in the longest path."""
        return (max(self.num_tokens, self.eagle_nodes) - 1).bit_length()


@dataclass(frozen=True)
class _Candidates:
    """Root and drafted tokens, all `[batch, width]`."""

    tokens: ir.Value
    parents: ir.Value
    """Places of the parents among the candidates; the root is its own."""
    valid: ir.Value
    """bool; the root is."""


def merge_function(merge: Merge) -> ir.Function:
    """ngram_tokens int32 `[batch, branches, num_tokens]`, ngram_counts int32 `[batch, branches]`, eagle_tokens and
    eagle_parents int32 `[batch, eagle_nodes]`, eagle_counts and room int32 `[batch]` in, the tree out.

    Outputs: tokens, parents, depths and sources int32 `[batch, size]`, counts int32 `[batch]`.
    """
    names = ("ngram_tokens", "ngram_counts", "eagle_tokens", "eagle_parents", "eagle_counts", "room")
    body = FunctionBody(MERGE_DRAFTS, names)
    op = body.op
    candidates = _candidates(body, merge)
    equal, depths = _compare(body, merge, candidates)
    order = body.counting(merge.width)
    firsts = op("Where", equal, body.counting(merge.width, (1, 1, -1)), body.int32(merge.width))
    # [batch, width]: the first candidate with the same path, whose row all of them get.
    first = op("ReduceMin", firsts, body.axes(2), keepdims=0)
    new = op("And", op("Equal", first, order), op("Greater", order, body.int32(0)))
    kept = _shallowest(body, merge, new, depths)
    # [batch, width]: the root's is 0.
    rows = op("CumSum", op("Cast", kept, to=ir.DataType.INT32), body.constant(np.array(1, np.int64)))
    outputs = {
        "tokens": candidates.tokens,
        "parents": _take(body, rows, _take(body, first, candidates.parents)),
        "depths": depths,
        "sources": _sources(body, merge, equal),
    }
    places = _places(body, merge, kept, rows)
    taken = [(name, _take(body, value, places)) for name, value in outputs.items()]
    counts = op("ReduceMax", rows, body.axes(1), keepdims=0)
    return body.function(merge.attributes, [*taken, ("counts", counts)])


def _candidates(body: FunctionBody, merge: Merge) -> _Candidates:
    op = body.op
    ngram_tokens, ngram_counts, eagle_tokens, eagle_parents, eagle_counts, room = body.inputs
    # [batch, 1] of zeros, for the root and to give constants the batch.
    zero = op("Mul", body.unsqueeze(room, 1), body.int32(0))
    tokens = op("Concat", zero, op("Reshape", ngram_tokens, body.axes(0, -1)), eagle_tokens, axis=1)
    # A branch is a chain: each token's parent stands before it, the first one's is the root.
    chain = np.arange(merge.num_ngram).reshape(merge.branches, merge.num_tokens)
    chain[:, 0] = 0
    fixed = body.constant(np.concatenate(([0], chain.reshape(-1))).astype(np.int32)[None])
    # EAGLE's row 1 is the candidate behind the last of the branches.
    under_root = op("Equal", eagle_parents, body.int32(0))
    shifted = op("Where", under_root, body.int32(0), op("Add", eagle_parents, body.int32(merge.num_ngram)))
    parents = op("Concat", op("Add", zero, fixed), shifted, axis=1)
    ahead = body.counting(merge.num_tokens, (1, 1, -1))
    in_branch = op("Less", ahead, body.unsqueeze(ngram_counts, 2))
    nodes = body.counting(merge.eagle_nodes)
    in_tree = op("Less", nodes, body.unsqueeze(eagle_counts, 1))
    root = op("Equal", zero, body.int32(0))
    valid = op("Concat", root, op("Reshape", in_branch, body.axes(0, -1)), in_tree, axis=1)
    # What lies behind a count is undefined and must not lead outside.
    return _Candidates(tokens, op("Where", valid, parents, body.int32(0)), valid)


def _compare(body: FunctionBody, merge: Merge, candidates: _Candidates) -> tuple[ir.Value, ir.Value]:
    """Which candidates' paths are equal, bool `[batch, width, width]`, and their depths, int32 `[batch, width]`."""
    op = body.op
    is_root = np.arange(merge.width)[None] == 0
    equal = op("Equal", body.unsqueeze(candidates.tokens, 2), body.unsqueeze(candidates.tokens, 1))
    # The root equals itself only, whatever token stands for it; so paths of different lengths differ.
    allowed = op("And", equal, body.constant(is_root == is_root.T))
    both = op("And", body.unsqueeze(candidates.valid, 2), body.unsqueeze(candidates.valid, 1))
    equal = op("And", allowed, both)
    # A constant would lack the batch, which the first gather needs.
    depths = op("Sub", op("Cast", candidates.valid, to=ir.DataType.INT32), body.constant(is_root.astype(np.int32)))
    up = candidates.parents
    for _ in range(merge.doublings):
        # A pair of paths is equal if their lower halves are, and their upper ones.
        pairs = op("Add", body.unsqueeze(op("Mul", up, body.int32(merge.width)), 2), body.unsqueeze(up, 1))
        flat = op("Reshape", equal, body.axes(0, -1))
        above = op("GatherElements", flat, op("Reshape", pairs, body.axes(0, -1)), axis=1)
        equal = op("And", equal, op("Reshape", above, body.axes(0, merge.width, merge.width)))
        depths = op("Add", depths, _take(body, depths, up))
        up = _take(body, up, up)
    return equal, depths


def _sources(body: FunctionBody, merge: Merge, equal: ir.Value) -> ir.Value:
    """The flags of all candidates with each one's path, int32 `[batch, width]`; the root has none."""
    flags = []
    for flag, start, count in ((NGRAM, 1, merge.num_ngram), (EAGLE, 1 + merge.num_ngram, merge.eagle_nodes)):
        own = np.zeros((1, 1, merge.width), np.int32)
        own[..., start : start + count] = flag
        proposed = body.op("Where", equal, body.constant(own), body.int32(0))
        flags.append(body.op("ReduceMax", proposed, body.axes(2), keepdims=0))
    return body.op("Add", *flags)


def _shallowest(body: FunctionBody, merge: Merge, new: ir.Value, depths: ir.Value) -> ir.Value:
    """The nodes that there is room for, bool `[batch, width]`."""
    op = body.op
    order = body.counting(merge.width)
    ranks = op("Add", op("Mul", depths, body.int32(merge.width)), order)
    before = op("Less", body.unsqueeze(ranks, 1), body.unsqueeze(ranks, 2))
    rivals = op("Cast", op("And", before, body.unsqueeze(new, 1)), to=ir.DataType.INT32)
    num_before = op("ReduceSum", rivals, body.axes(2), keepdims=0)
    room = body.unsqueeze(op("Min", body.inputs[-1], body.int32(merge.size)), 1)
    return op("And", new, op("Less", num_before, room))


def _places(body: FunctionBody, merge: Merge, kept: ir.Value, rows: ir.Value) -> ir.Value:
    """The candidate in each row of the tree, int32 `[batch, size]`; the root behind the last."""
    op = body.op
    wanted = body.constant(np.arange(1, merge.size + 1, dtype=np.int32)[None, :, None])
    # [batch, size, width]
    holds = op("And", op("Equal", body.unsqueeze(rows, 1), wanted), body.unsqueeze(kept, 1))
    candidates = op("Where", holds, body.counting(merge.width, (1, 1, -1)), body.int32(0))
    return op("ReduceMax", candidates, body.axes(2), keepdims=0)


def _take(body: FunctionBody, values: ir.Value, places: ir.Value) -> ir.Value:
    """values `[batch, width]` at places `[batch, count]`."""
    return body.op("GatherElements", values, places, axis=1)
