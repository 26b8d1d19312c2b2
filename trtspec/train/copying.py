"""Attention heads for copying: more of them in a trained draft head, taught to find where the text has been before.

Answers that quote their prompt go on as the prompt did behind the same token. A draft head's row m holds the target's
state behind token m and the embedding of token m + 1; so the row to look at from row i, whose next token is i + 1, is
one where token m equals token i + 1: token m + 1 is then the draft. Gradients of the training loss find this
slowly, so the new heads' queries and keys start from the correlations of rows with tokens, are then trained for nothing
else, and their values and outputs start as the next token's embedding.
"""

from __future__ import annotations

import dataclasses
import logging
import random

import torch

from trtspec.train.head import EagleHead, KeysValues, rotary_tables, rotated
from trtspec.train.store import Example, TrainingData

logger = logging.getLogger(__name__)

LESSON_STEPS = 600
LESSON_STRENGTH = 0.05
"""Of the embeddings that the new heads find, at first; training turns it up."""

_LONGEST = 1024
_VALUE_ROWS = 20_000
_REST, _SHARPNESS = 0.3, 0.04


def with_copying(head: EagleHead, groups: int, data: TrainingData, embedding: torch.Tensor, seed: int) -> EagleHead:
    """A head with `groups` more KV heads that have been taught to copy from the data's sequences."""
    wider = widened(head, groups).to(embedding.device)
    torch.manual_seed(seed)
    losses = CopyLesson(wider, embedding, groups, seed).teach(data, LESSON_STEPS, LESSON_STRENGTH)
    logger.info("copying: loss %.2f at first, %.2f at last", *(sum(part) / len(part) for part in _ends(losses)))
    return wider


def _ends(losses: list[float]) -> tuple[list[float], list[float]]:
    size = max(1, len(losses) // 10)
    return losses[:size], losses[-size:]


def widened(head: EagleHead, groups: int) -> EagleHead:
    """A head that computes the same with `groups` more KV heads and their query heads, which add nothing yet."""
    sizes = head.sizes
    per_group = sizes.num_heads // sizes.num_kv_heads
    wider = EagleHead(
        dataclasses.replace(
            sizes, num_heads=sizes.num_heads + groups * per_group, num_kv_heads=sizes.num_kv_heads + groups
        )
    )
    state = wider.state_dict()
    for name, value in head.state_dict().items():
        if name.endswith("o_proj.weight"):
            state[name].zero_()[:, : value.shape[1]] = value
        else:
            state[name][: len(value)] = value
    wider.load_state_dict(state)
    return wider


def blended(start: EagleHead, trained: EagleHead, share: float) -> EagleHead:
    """Weights `share` of the way from the head that training started from: keeps more of what that one could do.

    Attention heads that were added since are as trained, and add `share` of what they would.
    """
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    for name, before in start.state_dict().items():
        if name.endswith("o_proj.weight"):
            after = state[name][:, : before.shape[1]]
            state[name][:, before.shape[1] :] *= share
        else:
            after = state[name][: len(before)]
        after.copy_(torch.lerp(before.to(after.device), after, share))
    head = EagleHead(trained.sizes).to(trained.fc.weight.device)
    head.load_state_dict(state)
    return head


class CopyLesson:
    """Teaches the last `groups` KV heads of a head, and their query heads, to copy."""

    def __init__(self, head: EagleHead, embedding: torch.Tensor, groups: int, seed: int) -> None:
        self.head, self.embedding, self.groups, self._seed = head, embedding, groups, seed
        sizes = head.sizes
        self.per_group = sizes.num_heads // sizes.num_kv_heads
        weights = [head.get_parameter(f"layers.0.self_attn.{kind}_proj.weight") for kind in "qkvo"]
        own = groups * sizes.head_dim
        # Views of the new heads' parts, which are written to.
        self._queries, self._keys = weights[0][-own * self.per_group :], weights[1][-own:]
        self._values, self._outputs = weights[2][-own:], weights[3][:, -own * self.per_group :]

    def teach(self, data: TrainingData, steps: int, strength: float, rate: float = 2e-3) -> list[float]:
        """Train queries and keys on `steps` sequences, then set values and outputs; returns each step's loss.

        Args:
            strength: how much of the embedding that is found enters the output, relative to a hidden state's size.
        """
        with torch.no_grad():
            self._set_queries_and_keys(data)
        queries, keys = (part.detach().clone().requires_grad_() for part in (self._queries, self._keys))
        optimizer = torch.optim.AdamW([queries, keys], lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        lengths, losses = [len(example.tokens) for example in data.examples], []
        for example in random.Random(self._seed).choices(data.examples, lengths, k=steps):
            loss = self._loss(example, queries, keys)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            self._queries.copy_(queries)
            self._keys.copy_(keys)
            self._set_values(data, strength)
        return losses

    def rows(self, example: Example) -> torch.Tensor:
        """What the attention reads: fc's output `[n - 1, hidden]`."""
        tokens, hidden = example.tokens[:_LONGEST].long(), example.hidden[:_LONGEST].float()
        device = self.embedding.device
        with torch.no_grad():
            inputs = torch.cat([self.embedding[tokens[1:].to(device)], hidden[:-1].to(device)], dim=-1)
            rows: torch.Tensor = self.head.fc(inputs)
        return rows

    def _loss(self, example: Example, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        rows, tokens = self.rows(example), example.tokens[:_LONGEST].long().to(self.embedding.device)
        count = len(rows) - 1  # the last row's next token but one is unknown
        cos, sin = (table.to(rows.device) for table in rotary_tables(self.head.sizes, count))
        ours = self._heads(rows[:count] @ queries.T, (cos, sin)).unflatten(0, (self.groups, self.per_group))
        found = self._heads(rows[:count] @ keys.T, (cos, sin))[:, None]
        scores = ours @ found.transpose(-1, -2) * self.head.sizes.head_dim**-0.5
        later = torch.ones(count, count, dtype=torch.bool, device=rows.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).log_softmax(-1)
        wanted = source_rows(tokens)
        # Where there is nothing to copy, the first row is where attention can rest.
        copied = wanted.any(-1)
        wanted[:, 0] |= ~copied
        lost = -weights.masked_fill(~wanted, -torch.inf).logsumexp(-1)
        parts = [lost[..., rows].sum() / lost[..., rows].numel() for rows in (copied, ~copied) if rows.any()]
        total: torch.Tensor = parts[0] + _REST * sum(parts[1:])
        return total

    def _heads(self, rows: torch.Tensor, rotary: KeysValues) -> torch.Tensor:
        return rotated(rows.unflatten(-1, (-1, self.head.sizes.head_dim)).transpose(0, 1), rotary)

    def _set_queries_and_keys(self, data: TrainingData) -> None:
        """Canonical correlations of rows with the token before theirs, in the dimensions that positions turn least."""
        rows, before, after = [], [], []
        for example in self._sample(data):
            embeds = self.embedding[example.tokens[:_LONGEST].long().to(self.embedding.device)]
            rows.append(self.rows(example))
            before.append(embeds[:-1])
            after.append(embeds[1:])
        inputs, own, following = torch.cat(rows), torch.cat(before), torch.cat(after)
        # Projections have no bias; where the rows predict a constant, it takes the means away.
        constant = torch.linalg.solve(_gram(inputs), inputs.mean(0))
        mean, average = inputs.mean(0), own.mean(0)
        gram = _gram(inputs - mean)
        of_inputs, of_own = torch.linalg.cholesky(gram), torch.linalg.cholesky(_gram(own - average))
        cross = (inputs - mean).T @ (own - average) / len(inputs)
        cross = torch.linalg.solve_triangular(of_inputs, cross, upper=False)
        cross = torch.linalg.solve_triangular(of_own, cross.T, upper=False).T
        left, correlations, right = torch.linalg.svd(cross)
        half = self.head.sizes.head_dim // 2
        count = half // 2 * 2
        correlations = correlations[:count].clamp(max=0.97)
        # Of two Gaussians with these correlations, the likelihood that they belong together; softened.
        weight = (_SHARPNESS * self.head.sizes.head_dim**0.5 * correlations / (1 - correlations**2)).sqrt()
        of_token = torch.linalg.solve_triangular(of_own.T, right.T[:, :count], upper=True)
        by_token = torch.linalg.solve(gram, (inputs - mean).T @ ((following - average) @ of_token) / len(inputs))
        by_state = torch.linalg.solve_triangular(of_inputs.T, left[:, :count], upper=True)
        by_token, by_state = ((part - torch.outer(constant, mean @ part)) * weight for part in (by_token, by_state))
        slow = [at for pair in range(half - 1, half - 1 - count // 2, -1) for at in (pair, pair + half)]
        for part, found in ((self._queries, by_token), (self._keys, by_state)):
            grouped = part.unflatten(0, (-1, self.head.sizes.head_dim))
            grouped.normal_(std=0.01)
            grouped[:, slow] += found.T

    def _sample(self, data: TrainingData) -> list[Example]:
        examples, found, rows = list(data.examples), [], 0
        random.Random(self._seed).shuffle(examples)
        while examples and rows < _VALUE_ROWS:
            found.append(examples.pop())
            rows += len(found[-1].tokens)
        return found

    def _set_values(self, data: TrainingData, strength: float) -> None:
        """Values hold principal components of the next token's embedding, each KV head others; outputs add it."""
        size = self.head.sizes.head_dim
        rows, wanted, norms = [], [], []
        for example in self._sample(data):
            rows.append(self.rows(example))
            wanted.append(self.embedding[example.tokens[1:_LONGEST].long().to(self.embedding.device)])
            norms.append(example.hidden.float().norm(dim=-1))
        inputs, embeds = torch.cat(rows), torch.cat(wanted)
        directions = torch.linalg.svd(embeds, full_matrices=False).Vh[: self.groups * size]
        moments = inputs.T @ (embeds @ directions.T) / len(inputs)
        self._values.copy_(torch.linalg.solve(_gram(inputs), moments).T)
        factor = strength * float(torch.cat(norms).mean() / embeds.norm(dim=-1).mean()) / self.per_group
        # Each KV head's query heads add the same.
        parts = directions.unflatten(0, (self.groups, 1, size)).expand(-1, self.per_group, -1, -1)
        self._outputs.copy_(factor * parts.flatten(0, 2).T)


def source_rows(tokens: torch.Tensor) -> torch.Tensor:
    """bool `[n - 2, n - 2]`: whether row m says what follows row i: tokens m, m + 1 are those at i + 1, i + 2."""
    first = tokens[None, :-2] == tokens[1:-1, None]
    second = tokens[None, 1:-1] == tokens[2:, None]
    return (first & second).tril()


def _gram(rows: torch.Tensor) -> torch.Tensor:
    """Second moments, a little regularised."""
    gram = rows.T @ rows / len(rows)
    return gram + 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
