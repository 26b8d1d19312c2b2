"""Kernel of ngram_draft: one program for each sequence, which reads its history once, tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ngram_draft_kernel(
    history_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    columns: tl.tensor,
    tokens_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    match_lengths_ptr: tl.tensor,
    NGRAM_MIN: tl.constexpr,
    NGRAM_MAX: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    BRANCHES: tl.constexpr,
    LATEST: tl.constexpr,
    LONGEST: tl.constexpr,
    TILE: tl.constexpr,
    BRANCH_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
) -> None:
    """Grid [B]. NGRAM_MAX is at most LONGEST, the blocks are the next powers of two of BRANCHES and NUM_TOKENS.

    A place's rank is class * 2L + order + 1, as in the reference. Two vectors of BRANCH_BLOCK lanes hold the best rank
    of each of the best first tokens so far, in any order.
    """
    sequence = tl.program_id(0).to(tl.int64)
    history = history_ptr + sequence * columns
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + sequence), 0), columns)
    lanes = tl.arange(0, BRANCH_BLOCK)
    best = tl.zeros([BRANCH_BLOCK], tl.int32)
    firsts = tl.zeros([BRANCH_BLOCK], tl.int32)
    for start in range(1, length, TILE):
        places = start + tl.arange(0, TILE)
        ranks, tokens = _rank_tile(history, length, columns, places, NGRAM_MIN, NGRAM_MAX, NUM_TOKENS, LATEST)
        rank = tl.max(ranks)
        worst = tl.min(tl.where(lanes < BRANCHES, best, 2147483647))
        # Ranks are distinct, so each turn takes one place; no later one of this tile can be better.
        while rank > worst:
            first = tl.sum(tl.where(ranks == rank, tokens, 0))
            known = (best > 0) & (firsts == first)
            is_known = tl.max(known.to(tl.int32)) > 0
            lane = tl.min(tl.where((best == worst) & (lanes < BRANCHES), lanes, BRANCH_BLOCK))
            here = tl.where(is_known, known.to(tl.int32), (lanes == lane).to(tl.int32)) > 0
            best = tl.where(here, tl.maximum(best, rank), best)
            firsts = tl.where(here, first, firsts)
            ranks = tl.where(tokens == first, 0, ranks)
            rank = tl.max(ranks)
            worst = tl.min(tl.where(lanes < BRANCHES, best, 2147483647))
    for branch in range(BRANCHES):
        rank = tl.max(best)
        best = tl.where(best == rank, 0, best)
        _write_branch(
            history,
            length,
            columns,
            rank,
            sequence * BRANCHES + branch,
            tokens_ptr,
            counts_ptr,
            match_lengths_ptr,
            NUM_TOKENS,
            LONGEST,
            TOKEN_BLOCK,
        )


@triton.jit
def _rank_tile(
    history: tl.tensor,
    length: tl.tensor,
    columns: tl.tensor,
    places: tl.tensor,
    NGRAM_MIN: tl.constexpr,
    NGRAM_MAX: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    LATEST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rank (0 where it doesn't count) and first token of each place."""
    inside = places < length
    tokens = tl.load(history + places, mask=inside, other=0)
    alive = inside
    classes = tl.zeros_like(places)
    for i in range(NGRAM_MAX):
        before = places - 1 - i
        last = tl.load(history + tl.maximum(length - 1 - i, 0))
        token = tl.load(history + before, mask=alive & (before >= 0), other=0)
        alive = alive & (before >= 0) & (token == last)
        classes += alive.to(tl.int32)
    order = columns - 1 - places
    if LATEST:
        order = tl.where(places + NUM_TOKENS <= length, columns + places, order)
    return tl.where(classes >= NGRAM_MIN, classes * (2 * columns) + order + 1, 0), tokens


@triton.jit
def _write_branch(
    history: tl.tensor,
    length: tl.tensor,
    columns: tl.tensor,
    rank: tl.tensor,
    row: tl.tensor,
    tokens_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    match_lengths_ptr: tl.tensor,
    NUM_TOKENS: tl.constexpr,
    LONGEST: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
) -> None:
    """Outputs of one branch; without a match the rank is 0 and all are 0."""
    order = (rank - 1) % (2 * columns)
    place = tl.where(order >= columns, order - columns, columns - 1 - order)
    place = tl.where(rank > 0, place, length)
    count = tl.minimum(length - place, NUM_TOKENS)
    offsets = tl.arange(0, TOKEN_BLOCK)
    tokens = tl.load(history + place + offsets, mask=offsets < count, other=0)
    tl.store(tokens_ptr + row * NUM_TOKENS + offsets, tokens, mask=offsets < NUM_TOKENS)
    tl.store(counts_ptr + row, count)
    back = tl.arange(0, LONGEST)
    inside = back < place
    before = tl.load(history + place - 1 - back, mask=inside, other=0)
    last = tl.load(history + length - 1 - back, mask=inside, other=0)
    matched = tl.min(tl.where(inside & (before == last), LONGEST, back))
    tl.store(match_lengths_ptr + row, tl.where(rank > 0, matched, 0))
