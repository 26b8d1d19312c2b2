"""Kernels of accept and kv_commit: what follows a verification."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def accept_kernel(
    tokens_ptr: tl.tensor,
    parents_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    target_tokens_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_accepted_ptr: tl.tensor,
    next_token_ptr: tl.tensor,
    num_matches_ptr: tl.tensor,
    NODES: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
) -> None:
    """Grid [B]. NODE_BLOCK is the next power of two of N."""
    sequence = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, NODE_BLOCK)
    inside = (nodes < tl.load(counts_ptr + sequence)) & (nodes < NODES)
    tokens = tl.load(tokens_ptr + sequence * NODES + nodes, mask=inside, other=0)
    parents = tl.load(parents_ptr + sequence * NODES + nodes, mask=inside, other=0)
    targets = target_tokens_ptr + sequence * (NODES + 1)
    chosen = tl.load(targets + tl.minimum(tl.maximum(parents, 0), NODES), mask=inside, other=0)
    matches = inside & (tokens == chosen)
    tl.store(num_matches_ptr + sequence, tl.sum(matches.to(tl.int32)))

    row = tl.min(nodes)
    num_accepted = row
    child = tl.min(tl.where(matches & (parents == 0), nodes + 1, NODES + 1))
    while child <= NODES:
        tl.store(rows_ptr + sequence * NODES + num_accepted, child)
        num_accepted += 1
        row = child
        # Only rows behind this one: the walk ends whatever the parents are.
        below = matches & (parents == row) & (nodes >= row)
        child = tl.min(tl.where(below, nodes + 1, NODES + 1))
    behind = (nodes >= num_accepted) & (nodes < NODES)
    tl.store(rows_ptr + sequence * NODES + nodes, tl.zeros([NODE_BLOCK], tl.int32), mask=behind)
    tl.store(num_accepted_ptr + sequence, num_accepted)
    tl.store(next_token_ptr + sequence, tl.load(targets + row))


@triton.jit
def kv_commit_kernel(
    cache_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_accepted_ptr: tl.tensor,
    slots: tl.tensor,
    heads: tl.tensor,
    cache_rows: tl.tensor,
    head_dim: tl.tensor,
    NODES: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    """Grid [planes * heads, B]. HEAD_BLOCK is the next power of two of head_dim.

    A program moves the rows of one head one by one. A row that a later turn writes has been read by then, and every
    element is read and written by one thread.
    """
    plane = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    sequence = tl.program_id(1)
    start = tl.load(starts_ptr + sequence)
    count = tl.minimum(tl.load(num_accepted_ptr + sequence), NODES)
    block = (plane.to(tl.int64) * slots + sequence) * heads + head
    first_row = cache_ptr + block * cache_rows * head_dim
    lanes = tl.arange(0, HEAD_BLOCK)
    for i in range(0, count):
        row = tl.load(rows_ptr + sequence * NODES + i)
        source = start + row
        target = start + 1 + i
        # Mostly a row is where it belongs. On a GPU nobody has looked at the values.
        if (source > target) & (target > 0) & (source < cache_rows):
            values = tl.load(first_row + source.to(tl.int64) * head_dim + lanes, mask=lanes < head_dim)
            tl.store(first_row + target.to(tl.int64) * head_dim + lanes, values, mask=lanes < head_dim)
