"""The body of trtspec::ngram_draft in standard operations.

Each place of the history gets one number that orders the places, and a branch is the place with the highest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtspec.graph.function import FunctionBody
from trtspec.plugins.definition import LONGEST_MATCH

NGRAM_DRAFT = "ngram_draft"


@dataclass(frozen=True)
class NgramLookup:
    """The sizes and attributes of one lookup."""

    max_len: int
    ngram_min: int
    ngram_max: int
    num_tokens: int
    branches: int
    latest: bool

    @property
    def attributes(self) -> dict[str, int]:
        """The node's."""
        return {
            "ngram_min": self.ngram_min,
            "ngram_max": self.ngram_max,
            "num_tokens": self.num_tokens,
            "branches": self.branches,
            "latest": int(self.latest),
        }


def ngram_function(lookup: NgramLookup) -> ir.Function:
    """history int32 `[batch, max_len]` and lengths int32 `[batch]` in, the matches out.

    Outputs: tokens int32 `[batch, branches, num_tokens]`, counts int32 `[batch, branches]` and match_lengths int32
    `[batch, branches]`.
    """
    body = FunctionBody(NGRAM_DRAFT, ("history", "lengths"))
    op = body.op
    history, lengths = body.inputs
    length = body.unsqueeze(lengths, 1)
    back = body.counting(LONGEST_MATCH)
    # [batch, 32]: the history's last tokens from the last one backwards; garbage beyond its start, which no place sees.
    at_end = op("Max", op("Sub", op("Sub", length, body.int32(1)), back), body.int32(0))
    final = op("GatherElements", history, at_end, axis=1)
    # Both [batch, branches].
    best, found = _best_places(body, lookup, history, _places(body, lookup, history, length, final))
    ahead = body.counting(lookup.num_tokens, (1, 1, -1))
    counts = op("Where", found, op("Min", op("Sub", length, best), body.int32(lookup.num_tokens)), body.int32(0))
    start = body.unsqueeze(best, 2)
    drafted = op("Less", ahead, body.unsqueeze(counts, 2))
    tokens = op("Where", drafted, _tokens_at(body, lookup, history, op("Add", start, ahead)), body.int32(0))
    back = body.unsqueeze(back, 0)
    equal = op(
        "Equal",
        _tokens_at(body, lookup, history, op("Sub", op("Sub", start, body.int32(1)), back)),
        body.unsqueeze(final, 1),
    )
    # The first token that differs, or lies before the history's start, ends the match.
    equal = op("And", equal, op("Less", back, start))
    stops = op("Where", equal, body.int32(LONGEST_MATCH), back)
    match_lengths = op("Where", found, op("ReduceMin", stops, body.axes(2), keepdims=0), body.int32(0))
    outputs = [("tokens", tokens), ("counts", counts), ("match_lengths", match_lengths)]
    return body.function(lookup.attributes, outputs)


def _places(body: FunctionBody, lookup: NgramLookup, history: ir.Value, length: ir.Value, final: ir.Value) -> ir.Value:
    """The order of the places: int32 `[batch, max_len]`, distinct and above 0 where a place counts, else 0."""
    op = body.op
    longest = min(lookup.ngram_max, LONGEST_MATCH)
    place = np.arange(lookup.max_len, dtype=np.int32)[None]
    # Place e compares the tokens e-1, e-2 ...: column e of this, shifted.
    padded = op("Pad", history, body.axes(longest, 0), body.int32(0), body.axes(1))
    # A place before ngram_min has too few tokens in front of it.
    usable = body.constant(np.where(place >= lookup.ngram_min, place, np.iinfo(np.int32).max))
    run = op("Less", usable, length)
    extra: ir.Value | None = None
    for back in range(longest):
        start = longest - 1 - back
        token = op("Slice", padded, body.axes(start), body.axes(start + lookup.max_len), body.axes(1))
        last = op("Slice", final, body.axes(back), body.axes(back + 1), body.axes(1))
        run = op("And", run, op("Equal", token, last))
        if back + 1 == lookup.ngram_min:
            counting = run
        elif back + 1 > lookup.ngram_min:
            one = op("Cast", run, to=ir.DataType.INT32)
            extra = one if extra is None else op("Add", extra, one)
    order = _order(body, lookup, length)
    if extra is not None:
        # Padding may have been taken for tokens: a match is no longer than what lies in front of its place.
        extra = op("Min", extra, body.constant(np.maximum(place - lookup.ngram_min, 0)))
        order = op("Add", order, op("Mul", extra, body.int32(_orders(lookup))))
    return op("Where", counting, order, body.int32(0))


def _orders(lookup: NgramLookup) -> int:
    """All orders within one length of match are below this."""
    return 2 * lookup.max_len + 1


def _order(body: FunctionBody, lookup: NgramLookup, length: ir.Value) -> ir.Value:
    """The order among equally long matches, int32 `[1 or batch, max_len]`, from 1 up.

    An early place e has max_len - e. By the latest rule, places with a full continuation have max_len + 1 + e.
    """
    place = np.arange(lookup.max_len, dtype=np.int32)[None]
    early = body.constant(lookup.max_len - place)
    if not lookup.latest:
        return early
    # [1, max_len] + num_tokens <= [batch, 1]
    full = body.op("LessOrEqual", body.constant(place + lookup.num_tokens), length)
    return body.op("Where", full, body.constant(lookup.max_len + 1 + place), early)


def _best_places(
    body: FunctionBody, lookup: NgramLookup, history: ir.Value, places: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The branches' places, int32 `[batch, branches]`, and whether there is such a branch, bool of that shape."""
    op = body.op
    orders: list[ir.Value] = []
    for branch in range(lookup.branches):
        if branch:
            place = op("Min", _place_of(body, lookup, orders[-1]), body.int32(lookup.max_len - 1))
            token = op("GatherElements", history, place, axis=1)
            places = op("Where", op("Equal", history, token), body.int32(0), places)
        orders.append(op("ReduceMax", places, body.axes(1), keepdims=1))
    best = orders[0] if len(orders) == 1 else op("Concat", *orders, axis=1)
    return _place_of(body, lookup, best), op("Greater", best, body.int32(0))


def _place_of(body: FunctionBody, lookup: NgramLookup, best: ir.Value) -> ir.Value:
    """The place with this order; one past the last for 0."""
    op = body.op
    order = op("Mod", best, body.int32(_orders(lookup)))
    place = op("Sub", body.int32(lookup.max_len), order)
    if not lookup.latest:
        return place
    late = op("Sub", order, body.int32(lookup.max_len + 1))
    return op("Where", op("Less", late, body.int32(0)), place, late)


def _tokens_at(body: FunctionBody, lookup: NgramLookup, history: ir.Value, places: ir.Value) -> ir.Value:
    """The history's tokens at places, both `[batch, branches, count]`; places outside it are moved inside."""
    op = body.op
    inside = op("Min", op("Max", places, body.int32(0)), body.int32(lookup.max_len - 1))
    flat = op("Reshape", inside, body.axes(0, -1))
    return op("Reshape", op("GatherElements", history, flat, axis=1), op("Shape", places))
