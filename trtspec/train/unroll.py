"""The head unrolled over several draft steps from every position of a batch: what training and evaluation share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trtspec.train.head import EagleHead, KeysValues, causal_mask, rotary_tables
from trtspec.train.store import Batch


@dataclass(frozen=True)
class Step:
    """Draft step `number` (1 = first) of the anchors whose answer goes on that far.

    Anchor i has read tokens 0..i+1; at step s the head proposes token i+s+1, which the target chose from hidden i+s.
    """

    number: int
    output: torch.Tensor
    """The head's estimates `[rows, hidden]`."""
    truth: torch.Tensor
    """The target's hidden states that they estimate, `[rows, hidden]`."""
    anchors: torch.Tensor
    """int64 `[rows]`: which anchor, in the flattened `[batch, length]`."""


def unroll(
    head: EagleHead, embedding: torch.Tensor, batch: Batch, steps: int, features: torch.Tensor
) -> Iterator[Step]:
    """Run the head `steps` times from every anchor, on its own outputs from the second step on.

    This is drafting as it happens: the keys and values of true hidden states up to the anchor, then the head's own
    (HASS's harmonised training, EAGLE-3's training-time test).

    Args:
        embedding: the target's table `[vocab, hidden]`.
        features: what the first step reads, `[batch, length, hidden]`: the batch's hidden states, or those with noise.
    """
    size, length = batch.tokens.shape
    cos, sin = (table.to(batch.tokens.device) for table in rotary_tables(head.sizes, length + steps))
    mask = causal_mask(length, batch.tokens.device)
    truth = batch.hidden.to(features.dtype)
    hidden, earlier = features, list[KeysValues]()
    for number in range(1, steps + 1):
        rotary = (cos[number - 1 : number - 1 + length], sin[number - 1 : number - 1 + length])
        embeds = embedding[_shifted(batch.tokens, number)].to(features.dtype)
        hidden, keys_values = head(embeds, hidden, rotary, earlier, mask)
        earlier.append(keys_values)
        wanted = torch.zeros(size, length, dtype=torch.bool, device=batch.tokens.device)
        wanted[:, : length - number] = batch.answer[:, number:]
        anchors = wanted.flatten().nonzero().squeeze(1)
        flat = truth.flatten(0, 1)
        yield Step(number, hidden.flatten(0, 1)[anchors], flat[anchors + number], anchors)


def _shifted(tokens: torch.Tensor, by: int) -> torch.Tensor:
    """Token i + by at place i; the places behind the end, which nothing reads, repeat token 0."""
    return torch.nn.functional.pad(tokens[:, by:], (0, min(by, tokens.shape[1])))
