"""The operations of `trtspec.plugins.definition` in plain torch, for CPU and CUDA tensors.

Nothing loops over the batch or the history, and on a GPU nothing makes the host wait.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from trtspec.plugins import checks
from trtspec.plugins.definition import EAGLE, LONGEST_MATCH, NGRAM, Acceptance, MergedDraft, NgramDraft

_Outputs = TypeVar("_Outputs", NgramDraft, MergedDraft, Acceptance)


def ngram_draft(
    history: torch.Tensor,
    lengths: torch.Tensor,
    *,
    ngram_min: int,
    ngram_max: int,
    num_tokens: int,
    branches: int = 1,
    latest: int = 0,
    out: NgramDraft | None = None,
) -> NgramDraft:
    """What followed each history's last tokens earlier.

    Args:
        history: int32 `[B, L]`.
        lengths: int32 `[B]`, 0..L.
        out: tensors to write to, which are returned then.

    Raises:
        TypeError, ValueError: see `trtspec.plugins.checks`.
    """
    checks.check_ngram_attributes(ngram_min, ngram_max, num_tokens, branches, latest)
    checks.check_ngram_draft(history, lengths)
    batch, columns = history.shape
    if out is not None:
        checks.check_ngram_out(out, history, batch, branches, num_tokens)
    ends = lengths.clamp(0, columns).long()[:, None]
    last = history.gather(1, (ends - 1 - torch.arange(LONGEST_MATCH, device=history.device)).clamp(min=0))
    ranks = _ranks(history, last, ends, ngram_min, ngram_max, num_tokens, latest)
    places, found = _best_places(history, ranks, branches)

    counts = torch.where(found, (ends - places).clamp(max=num_tokens), 0)
    offsets = torch.arange(num_tokens, device=history.device)
    at = (places[:, :, None] + offsets).clamp(max=columns - 1).flatten(1)
    tokens = history.gather(1, at).view(batch, branches, num_tokens)
    tokens = torch.where(offsets < counts[:, :, None], tokens, 0)
    matched = torch.where(found, _match_lengths(history, last, places), 0)
    return _given(NgramDraft(tokens, counts.int(), matched.int()), out)


def _ranks(
    history: torch.Tensor,
    last: torch.Tensor,
    ends: torch.Tensor,
    ngram_min: int,
    ngram_max: int,
    num_tokens: int,
    latest: int,
) -> torch.Tensor:
    """int32 `[B, L]`: the greater, the better a place is; 0 where it doesn't count, and else distinct.

    A rank is class * 2L + order + 1, where order is L + e for places taken from the highest on, and L - 1 - e for the
    others.

    Args:
        last: `[B, 32]`, the history's last tokens from the end on.
        ends: `[B, 1]`, its length.
    """
    columns = history.shape[1]
    places = torch.arange(columns, device=history.device, dtype=torch.int32)
    matches = places < ends
    classes = torch.zeros_like(matches, dtype=torch.uint8)
    for i in range(min(ngram_max, LONGEST_MATCH)):
        # A place has as many tokens in front of it as its number says.
        matches[:, i : i + 1] = False
        matches[:, i + 1 :] &= history[:, : max(columns - 1 - i, 0)] == last[:, i : i + 1]
        classes += matches
    order = columns - 1 - places
    if latest:
        order = torch.where(places + num_tokens <= ends, columns + places, order)
    ranks = classes.int().mul_(2 * columns).add_(order + 1)
    return ranks.masked_fill_(classes < ngram_min, 0)


def _best_places(history: torch.Tensor, ranks: torch.Tensor, branches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Place of each branch, int64 `[B, R]`, and whether there is one, bool `[B, R]`. Changes the ranks."""
    columns = history.shape[1]
    best = torch.empty((len(history), branches), dtype=torch.int64, device=history.device)
    for branch in range(branches):
        best[:, branch] = ranks.amax(1)
        place = _place(best[:, branch : branch + 1], columns)
        if branch + 1 < branches:
            ranks.masked_fill_(history == history.gather(1, place), 0)
    return _place(best, columns), best > 0


def _place(ranks: torch.Tensor, columns: int) -> torch.Tensor:
    order = (ranks - 1) % (2 * columns)
    return torch.where(order >= columns, order - columns, columns - 1 - order)


def _match_lengths(history: torch.Tensor, last: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """n(e) of some places, int64 `[B, R]`."""
    before = places[:, :, None] - 1 - torch.arange(last.shape[1], device=last.device)
    tokens = history.gather(1, before.clamp(min=0).flatten(1)).view_as(before)
    return ((tokens == last[:, None]) & (before >= 0)).cumprod(2).sum(2)


def merge_drafts(
    ngram_tokens: torch.Tensor,
    ngram_counts: torch.Tensor,
    eagle_tokens: torch.Tensor,
    eagle_parents: torch.Tensor,
    eagle_counts: torch.Tensor,
    room: torch.Tensor,
    *,
    size: int,
    out: MergedDraft | None = None,
) -> MergedDraft:
    """The branches of a lookup and an EAGLE tree as one tree for each sequence.

    Args:
        ngram_tokens: int32 `[B, R, K]`.
        ngram_counts: int32 `[B, R]`, 0..K.
        eagle_tokens: int32 `[B, M]`; M may be 0.
        eagle_parents: int32 `[B, M]`, rows.
        eagle_counts: int32 `[B]`, 0..M.
        room: int32 `[B]`: nodes at most.
        size: nodes at most, and columns of the outputs.
        out: tensors to write to, which are returned then.

    Raises:
        TypeError, ValueError: see `trtspec.plugins.checks`.
    """
    checks.check_size(size)
    checks.check_merge_drafts(ngram_tokens, ngram_counts, eagle_tokens, eagle_parents, eagle_counts, room)
    batch, branches, num_tokens = ngram_tokens.shape
    if out is not None:
        checks.check_merge_out(out, ngram_tokens, batch, size)
    # Items are all that is inserted, in its order; item 0 is the root.
    num_ngram = branches * num_tokens
    tokens = torch.cat((ngram_tokens.new_zeros(batch, 1), ngram_tokens.flatten(1), eagle_tokens), 1)
    valid = _valid_items(ngram_counts, num_tokens, eagle_counts, eagle_tokens.shape[1])
    parents = _item_parents(branches, num_tokens, eagle_parents)
    parents.masked_fill_(~valid, 0)
    same, depths = _same_paths(tokens, valid, parents, max(num_tokens, eagle_tokens.shape[1]))

    first = _first(same)
    items = torch.arange(tokens.shape[1], device=tokens.device)
    appended = valid & (first == items)
    appended[:, 0] = False
    from_ngram = same[:, :, 1 : 1 + num_ngram].any(2)
    from_eagle = same[:, :, 1 + num_ngram :].any(2)
    sources = from_ngram * NGRAM + from_eagle * EAGLE

    # The root's rank, 0, never competes: depths begin with 1.
    cost = torch.where(appended, depths * len(items) + items, len(items) ** 2)
    kept = appended & ((cost[:, None] < cost[:, :, None]).sum(2) < room.clamp(0, size)[:, None])
    rows = kept.cumsum(1)
    parent_rows = rows.gather(1, first).gather(1, parents)
    # Nodes go to their rows; all that isn't kept goes to row 0, which is dropped.
    target = torch.where(kept, rows, 0)
    columns = torch.stack((tokens, parent_rows, depths, sources), 1).int()
    rooms = columns.new_zeros(batch, 4, max(size, len(items)) + 1)
    placed = rooms.scatter_(2, target[:, None].expand_as(columns), columns)[:, :, 1 : 1 + size]
    result = MergedDraft._make((*(column.contiguous() for column in placed.unbind(1)), kept.sum(1).int()))
    return _given(result, out)


def _valid_items(ngram_counts: torch.Tensor, num_tokens: int, eagle_counts: torch.Tensor, nodes: int) -> torch.Tensor:
    """bool `[B, 1 + R * K + M]`: the items within the counts, and the root."""
    device = ngram_counts.device
    ngram = torch.arange(num_tokens, device=device) < ngram_counts[:, :, None]
    eagle = torch.arange(nodes, device=device) < eagle_counts[:, None]
    root = torch.ones_like(ngram[:, 0, :1])
    return torch.cat((root, ngram.flatten(1), eagle), 1)


def _item_parents(branches: int, num_tokens: int, eagle_parents: torch.Tensor) -> torch.Tensor:
    """int64 `[B, 1 + R * K + M]`: the item of each item's parent; the root is its own."""
    batch, nodes = eagle_parents.shape
    num_ngram = branches * num_tokens
    before = torch.arange(-1, num_ngram + nodes, device=eagle_parents.device)
    parents = torch.where(before % num_tokens == 0, 0, before).repeat(batch, 1)
    parents[:, 1 + num_ngram :] = torch.where(eagle_parents > 0, eagle_parents + num_ngram, 0)
    # The root's is -1 until here. On a GPU nobody has looked at EAGLE's, and a parent has to come first.
    return parents.minimum(before).clamp_(min=0)


def _same_paths(
    tokens: torch.Tensor, valid: torch.Tensor, parents: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which items have the same tokens on the path from the root, bool `[B, T, T]`, and their depths, int64 `[B, T]`.

    After round r an item's name tells the last 2^r tokens of its path: the name of its last 2^(r-1) ones and the name
    of those in front of them make the next. Invalid items and the root have names of their own.
    """
    num_items = tokens.shape[1]
    items = torch.arange(num_items, device=tokens.device)
    names = torch.where(valid, tokens, items + 2**32)
    names[:, 0] = 2**33
    depths = (valid & (items > 0)).long()
    same = names[:, :, None] == names[:, None]
    reach = 1
    while reach < depth:
        first = _first(same)
        names = first * num_items + first.gather(1, parents)
        same = names[:, :, None] == names[:, None]
        depths = depths + depths.gather(1, parents)
        parents = parents.gather(1, parents)
        reach *= 2
    return same, depths


def _first(same: torch.Tensor) -> torch.Tensor:
    """The first item that is the same as each one, int64 `[B, T]`."""
    return same.view(torch.uint8).argmax(2)


def accept(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    counts: torch.Tensor,
    target_tokens: torch.Tensor,
    *,
    out: Acceptance | None = None,
) -> Acceptance:
    """The longest path of each draft tree that the target would have taken itself.

    Args:
        tokens: int32 `[B, N]`.
        parents: int32 `[B, N]`, rows.
        counts: int32 `[B]`, 0..N.
        target_tokens: int32 `[B, N + 1]`, the target's token behind each row.
        out: tensors to write to, which are returned then.

    Raises:
        TypeError, ValueError: see `trtspec.plugins.checks`.
    """
    checks.check_accept(tokens, parents, counts, target_tokens)
    batch, nodes = tokens.shape
    if out is not None:
        checks.check_accept_out(out, tokens, batch, nodes)
    index = torch.arange(nodes, device=tokens.device)
    chosen = target_tokens.gather(1, parents.long().clamp(0, nodes))
    matches = (tokens == chosen) & (index < counts[:, None])
    # A match's parent row; of no other row, so that only the walk's row has to be compared below.
    below = torch.where(matches, parents, -1)

    row = torch.zeros_like(counts)
    walked = torch.zeros_like(tokens)
    # Parents stand in front of their children, so one pass meets each row's children after the row itself.
    for node in range(nodes):
        row = torch.where(below[:, node] == row, node + 1, row)
        walked[:, node] = row
    taken = walked == index + 1
    num_accepted = taken.sum(1)
    target = torch.where(taken, taken.cumsum(1), 0)
    rows = torch.zeros_like(target_tokens).scatter_(1, target, walked)[:, 1:].contiguous()
    next_token = target_tokens.gather(1, row.long()[:, None])[:, 0]
    return _given(Acceptance(rows, num_accepted.int(), next_token, matches.sum(1).int()), out)


def kv_commit(cache: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """Move the accepted rows of each sequence behind its root, in place.

    Args:
        cache: `[planes, slots, heads, rows, head_dim]`.
        starts: int32 `[B]`, cache row of each root.
        rows: int32 `[B, N]` of `accept`.
        num_accepted: int32 `[B]`, 0..N.

    Raises:
        TypeError, ValueError: see `trtspec.plugins.checks`.
    """
    checks.check_kv_commit(cache, starts, rows, num_accepted)
    batch, nodes = rows.shape
    index = torch.arange(nodes, device=rows.device)
    accepted = index < num_accepted[:, None]
    roots = starts.long()[:, None]
    # What isn't accepted moves the root's row to where it is.
    sources = roots + torch.where(accepted, rows, 0)
    targets = roots + torch.where(accepted, index + 1, 0)
    slots = torch.arange(batch, device=rows.device)[:, None]
    cache[:, slots, :, targets] = cache[:, slots, :, sources]


def _given(result: _Outputs, out: _Outputs | None) -> _Outputs:
    if out is None:
        return result
    for source, target in zip(result, out, strict=True):
        target.copy_(source)
    return out
