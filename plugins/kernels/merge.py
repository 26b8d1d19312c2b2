"""Kernel of merge_drafts: one program for each sequence, in which an item is what is inserted and item 0 the root."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_drafts_kernel(
    ngram_tokens_ptr: tl.tensor,
    ngram_counts_ptr: tl.tensor,
    eagle_tokens_ptr: tl.tensor,
    eagle_parents_ptr: tl.tensor,
    eagle_counts_ptr: tl.tensor,
    room_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    parents_ptr: tl.tensor,
    depths_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    BRANCHES: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    NODES: tl.constexpr,
    SIZE: tl.constexpr,
    ITEMS: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Grid [B]. ITEMS is the next power of two of 1 + R * K + M, ROUNDS the logarithm of the greatest depth.

    As in the reference, an item's name tells the last 2^r tokens of its path after round r: it is the first item for
    which these are the same.
    """
    sequence = tl.program_id(0).to(tl.int64)
    items = tl.arange(0, ITEMS)
    tokens, parents, flags = _load_items(
        ngram_tokens_ptr,
        ngram_counts_ptr,
        eagle_tokens_ptr,
        eagle_parents_ptr,
        eagle_counts_ptr,
        sequence,
        items,
        BRANCHES,
        NUM_TOKENS,
        NODES,
    )
    valid = flags > 0
    names = _first_same(tokens, valid, items, ITEMS, CHUNK)
    depths = valid.to(tl.int32)
    ancestors = parents
    for _ in range(ROUNDS):
        names = _first_same(names * ITEMS + tl.gather(names, ancestors, 0), valid, items, ITEMS, CHUNK)
        depths += tl.gather(depths, ancestors, 0)
        ancestors = tl.gather(ancestors, ancestors, 0)

    appended = valid & (names == items)
    cost = tl.where(appended, depths * ITEMS + items, ITEMS * ITEMS)
    sources, better = _compare(names, flags, cost, items, CHUNK, ITEMS)
    room = tl.minimum(tl.load(room_ptr + sequence), SIZE)
    kept = appended & (better < room)
    rows = tl.cumsum(kept.to(tl.int32), 0)
    parent_rows = tl.gather(tl.gather(rows, names, 0), parents, 0)

    at = sequence * SIZE + rows - 1
    tl.store(tokens_ptr + at, tokens, mask=kept)
    tl.store(parents_ptr + at, parent_rows, mask=kept)
    tl.store(depths_ptr + at, depths, mask=kept)
    tl.store(sources_ptr + at, sources, mask=kept)
    count = tl.sum(kept.to(tl.int32))
    tl.store(counts_ptr + sequence, count)
    columns = tl.arange(0, SIZE_BLOCK)
    behind = (columns >= count) & (columns < SIZE)
    zeros, at = tl.zeros_like(columns), sequence * SIZE + columns
    tl.store(tokens_ptr + at, zeros, mask=behind)
    tl.store(parents_ptr + at, zeros, mask=behind)
    tl.store(depths_ptr + at, zeros, mask=behind)
    tl.store(sources_ptr + at, zeros, mask=behind)


@triton.jit
def _load_items(
    ngram_tokens_ptr: tl.tensor,
    ngram_counts_ptr: tl.tensor,
    eagle_tokens_ptr: tl.tensor,
    eagle_parents_ptr: tl.tensor,
    eagle_counts_ptr: tl.tensor,
    sequence: tl.tensor,
    items: tl.tensor,
    BRANCHES: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    NODES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each item's token, the item of its parent, and the flag of its drafter; all 0 where it isn't valid."""
    NUM_NGRAM: tl.constexpr = BRANCHES * NUM_TOKENS
    place = items - 1
    in_ngram = (place >= 0) & (place < NUM_NGRAM)
    node = place - NUM_NGRAM
    in_eagle = (node >= 0) & (node < NODES)
    branch_counts = tl.load(ngram_counts_ptr + sequence * BRANCHES + place // NUM_TOKENS, mask=in_ngram, other=0)
    from_ngram = in_ngram & (place % NUM_TOKENS < branch_counts)
    from_eagle = in_eagle & (node < tl.load(eagle_counts_ptr + sequence))
    ngram_tokens = tl.load(ngram_tokens_ptr + sequence * NUM_NGRAM + place, mask=from_ngram, other=0)
    eagle_tokens = tl.load(eagle_tokens_ptr + sequence * NODES + node, mask=from_eagle, other=0)
    tokens = tl.where(from_ngram, ngram_tokens, eagle_tokens)
    eagle_parents = tl.load(eagle_parents_ptr + sequence * NODES + node, mask=from_eagle, other=0)
    eagle_parents = tl.minimum(tl.maximum(eagle_parents, 0), tl.maximum(node, 0))
    parents = tl.where(from_eagle & (eagle_parents > 0), eagle_parents + NUM_NGRAM, 0)
    parents = tl.where(from_ngram & (place % NUM_TOKENS > 0), place, parents)
    return tokens, parents, from_ngram.to(tl.int32) + 2 * from_eagle.to(tl.int32)


@triton.jit
def _compare(
    names: tl.tensor, flags: tl.tensor, cost: tl.tensor, items: tl.tensor, CHUNK: tl.constexpr, ITEMS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The flags of all items with each item as their name, and how many items cost less than each."""
    sources = tl.zeros_like(items)
    better = tl.zeros_like(items)
    for start in range(0, ITEMS, CHUNK):
        others = start + tl.arange(0, CHUNK)
        same = tl.gather(names, others, 0)[None, :] == items[:, None]
        other_flags = tl.where(same, tl.gather(flags, others, 0)[None, :], 0)
        sources |= tl.max(other_flags & 1, 1) + tl.max(other_flags & 2, 1)
        better += tl.sum((tl.gather(cost, others, 0)[None, :] < cost[:, None]).to(tl.int32), 1)
    return sources, better


@triton.jit
def _first_same(
    values: tl.tensor, valid: tl.tensor, items: tl.tensor, ITEMS: tl.constexpr, CHUNK: tl.constexpr
) -> tl.tensor:
    """The first valid item with each item's value. Invalid ones and the root have none: each is its own first item.

    Compares with CHUNK items at a time, which bounds the registers.
    """
    first = tl.full([ITEMS], ITEMS, tl.int32)
    for start in range(0, ITEMS, CHUNK):
        others = start + tl.arange(0, CHUNK)
        same = tl.gather(values, others, 0)[None, :] == values[:, None]
        same = same & (tl.gather(valid.to(tl.int32), others, 0)[None, :] > 0)
        first = tl.minimum(first, tl.min(tl.where(same, others[None, :], ITEMS), 1))
    return tl.where(valid, first, items)
