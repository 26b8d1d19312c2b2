"""A draft head with exact arithmetic: what it proposes is a function of the rows that a row sees in the KV cache.

A wrong mask, position, token, hidden state, cache row or slot changes what a row sees, hence the drafts. Equal
log-probabilities are common, so that ties matter.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from trtspec.config import Limits, SpeculationConfig
from trtspec.draft.tree import EAGLE, DraftTree
from trtspec.engine.base import Buckets, CacheView
from trtspec.engine.draft_head import DraftHeadRunner, HeadOutput, Noise, RowNoise
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.target import Rows
from trtspec.tensors import past_name

KEY, VALUE = past_name(0, "key"), past_name(0, "value")
Guess = Callable[[Seq[int]], int]
Noises = Callable[[int], RowNoise | None]
"""The noise behind the nodes of each level; the root's is 0."""


class Elsewhere(torch.Tensor):
    """A tensor that says it isn't on the host: what is done on a GPU is done with it."""

    is_cpu = False  # type: ignore[assignment]


class HeadRow(NamedTuple):
    """What one row leaves in the head's KV cache."""

    position: int
    token: int
    hidden: int


def _checksum(*numbers: int) -> int:
    """24 bits, which every float type in use here holds."""
    return zlib.crc32(np.asarray(numbers, dtype=np.int64).tobytes()) & 0xFFFFFF


class ToyConfig(NamedTuple):
    """The fields of a DraftHeadConfig that drafting reads."""

    max_position_embeddings: int
    draft_vocab_size: int


class ToyHead(DraftHeadRunner):
    """Its draft vocabulary is every token of the target's, or every second one, from the highest down.

    A hidden state is one number: the checksum of all rows that a row sees. With `fuses`, as EAGLE-3, the target's
    features enter through a function of their own.
    """

    def __init__(
        self,
        vocab: int,
        *,
        salt: int = 0,
        fuses: bool = False,
        stride: int = 2,
        max_positions: int = 10_000,
        guess: Guess | None = None,
        buckets: Buckets | None = None,
        elsewhere: bool = False,
    ) -> None:
        """`guess` names the token that the head finds most likely behind some tokens, if its vocabulary has it."""
        self.ids = np.arange(vocab - 1, -1, -stride, dtype=np.int32)
        self.config = ToyConfig(max_positions, len(self.ids))  # type: ignore[assignment]
        self.buckets = buckets or Buckets()
        self.engine_seconds = 0.0
        self.salt, self.fuses, self.guess, self.elsewhere = salt, fuses, guess, elsewhere
        self.passes: list[tuple[int, int]] = []
        """Batch and width of each pass."""
        self.seconds_per_pass = 0.0
        """What each is said to take."""
        self._seen: dict[int, tuple[int, ...]] = {}
        self._lent: dict[str, torch.Tensor] = {}

    def first_hidden(self, features: torch.Tensor) -> torch.Tensor:
        assert features.is_contiguous()
        if not self.fuses:
            return features
        return self._lend("fused", torch.tensor([[self.fused(int(row[0]))] for row in features], dtype=torch.float64))

    def fused(self, feature: int) -> int:
        """What a row with a feature of the target's takes."""
        return _checksum(feature, 77) if self.fuses else feature

    def forward(self, rows: Rows, hidden: torch.Tensor, cache: CacheView) -> HeadOutput:
        batch, width = rows.tokens.shape
        assert cache.key[1] == batch == len(rows.cache_length) == len(hidden)
        assert rows.mask.shape[:3] == (batch, 1, width)
        assert hidden.shape == (batch, width, 1)
        assert hidden.is_contiguous()
        assert hidden.is_cpu != self.elsewhere
        self.passes.append((batch, width))
        self.engine_seconds += self.seconds_per_pass
        for name in ("feedback", "logit_hidden"):
            assert name not in self._lent or self._lent[name].data_ptr() != hidden.data_ptr()
        checksums = []
        for b in range(batch):
            self._write(rows, hidden, b, cache)
            stored = head_rows(cache, b, rows.mask.shape[3])
            checksums.append([self._run_row(rows.mask[b, 0, w], stored) for w in range(width)])
        found = torch.tensor(checksums, dtype=torch.float64)[..., None]
        return HeadOutput(self._lend("feedback", found), self._lend("logit_hidden", found + 1))

    def best_tokens(self, hidden_rows: torch.Tensor, noise: Noise = ()) -> np.ndarray:
        return self.top_tokens(hidden_rows, 1, noise)[0][:, 0]

    def top_tokens(self, hidden_rows: torch.Tensor, count: int, noise: Noise = ()) -> tuple[np.ndarray, np.ndarray]:
        assert hidden_rows.is_contiguous()
        noise = noise or [None] * len(hidden_rows)
        ranked = [
            self.ranking(int(row[0]) - 1, own)[:count] for row, own in zip(hidden_rows.tolist(), noise, strict=True)
        ]
        tokens = np.array([[token for token, _ in row] for row in ranked])
        return tokens, np.array([[score for _, score in row] for row in ranked], dtype=np.float32)

    def close(self) -> None:
        pass

    def output(self, seen: Seq[HeadRow]) -> int:
        """The feedback of a row that sees these rows, itself the last."""
        checksum = _checksum(self.salt, *(number for row in seen for number in row))
        self._seen[checksum] = tuple(row.token for row in seen)
        return checksum

    def ranking(self, checksum: int, noise: RowNoise | None = None) -> list[tuple[int, float]]:
        """All tokens and their log-probabilities behind a row, best first, the lower row of the LM head on ties.

        With noise they are rounded to fractions that sums in float32 keep exact.
        """
        guessed, least = (self.guess(self._seen[checksum]), 1) if self.guess else (-1, 0)
        scores = [
            0.0 if token == guessed else -0.5 * (least + _checksum(checksum, token) % 3) for token in self.ids.tolist()
        ]
        if noise is not None:
            perturbed = (
                score / noise.temperature + noise.values[own] for score, own in zip(scores, self.ids, strict=True)
            )
            rounded = [round(64 * float(score)) / 64 for score in perturbed]
            scores = [score - max(rounded) for score in rounded]
        order = sorted(range(len(scores)), key=lambda row: (-scores[row], row))
        return [(int(self.ids[row]), scores[row]) for row in order]

    def _write(self, rows: Rows, hidden: torch.Tensor, b: int, cache: CacheView) -> None:
        start, width = int(rows.cache_length[b]), rows.tokens.shape[1]
        content = torch.stack([rows.tokens[b].double() + 1, rows.positions[b].double(), hidden[b, :, 0].double()], 1)
        for name in (KEY, VALUE):
            assert start + width <= cache.tensors[name].shape[2], "beyond the cache"
            cache.tensors[name][b, 0, start : start + width] = content

    def _run_row(self, mask: torch.Tensor, stored: list[HeadRow]) -> int:
        visible = np.flatnonzero(mask.numpy())
        assert len(visible), "a row that sees nothing is NaN"
        return self.output(sorted((stored[row] for row in visible), key=lambda row: row.position))

    def _lend(self, name: str, result: torch.Tensor) -> torch.Tensor:
        """As an engine does, give out a result that the next run overwrites."""
        if name in self._lent:
            self._lent[name].fill_(-1)
        self._lent[name] = result.as_subclass(Elsewhere) if self.elsewhere else result
        return self._lent[name]


def head_rows(cache: CacheView, slot: int, count: int) -> list[HeadRow]:
    """The first rows of a slot."""
    content = cache.tensors[KEY][slot, 0, :count]
    assert torch.equal(content, cache.tensors[VALUE][slot, 0, :count])
    return [HeadRow(int(position), int(token) - 1, int(hidden)) for token, position, hidden in content.tolist()]


def committed_rows(head: ToyHead, tokens: Seq[int], features: Seq[int]) -> list[HeadRow]:
    """The rows of committed tokens whose last one is the root: token i + 1 with the feature of token i."""
    return [
        HeadRow(i, token, head.fused(feature))
        for i, (token, feature) in enumerate(zip(tokens[1:], features, strict=True))
    ]


def toy_head_cache(limits: Limits) -> KVCache:
    return KVCache(
        num_layers=1,
        slots=limits.max_batch_size,
        num_kv_heads=1,
        rows=limits.head_cache_rows,
        head_dim=3,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


def expected_draft(
    head: ToyHead, options: SpeculationConfig, rows: list[HeadRow], room: int, noises: Noises = lambda level: None
) -> DraftTree:
    """What official EAGLE code would propose behind committed rows, were its logits perturbed."""
    if options.eagle_topk == 1:
        return expected_chain(head, rows, min(options.eagle_tokens, room), noises)
    return expected_tree(head, rows, options, min(options.tree_nodes, room), noises)


def expected_chain(head: ToyHead, rows: list[HeadRow], size: int, noises: Noises = lambda level: None) -> DraftTree:
    """The chain behind committed rows, each token from all rows anew."""
    tokens: list[int] = []
    scores: list[float] = []
    rows = list(rows)
    for level in range(size):
        feedback = head.output(rows)
        token, score = head.ranking(feedback, noises(level))[0]
        tokens.append(token)
        scores.append(score + sum(scores[-1:]))
        rows.append(HeadRow(len(rows), token, feedback))
    return DraftTree.chain(np.array(tokens, dtype=np.int32), EAGLE, np.array(scores, dtype=np.float32))


class Candidate(NamedTuple):
    """One entry of EAGLE-2's pool."""

    score: float
    tokens: tuple[int, ...]
    """Its path from the root."""
    rows: tuple[HeadRow, ...]
    """All rows in front of its own: committed ones, and those of its ancestors."""
    feedback: int
    """Of the last of these."""


def expected_tree(
    head: ToyHead, rows: list[HeadRow], options: SpeculationConfig, size: int, noises: Noises = lambda level: None
) -> DraftTree:
    """EAGLE-2's tree behind committed rows (topK_genrate in SafeAILab/EAGLE), with a chain of its own for each path."""
    top_k = min(options.eagle_topk, len(head.ids))

    def children(score: float, path: tuple[int, ...], before: tuple[HeadRow, ...]) -> list[Candidate]:
        feedback = head.output(before)
        ranked = head.ranking(feedback, noises(len(path)))[:top_k]
        return [Candidate(score + more, (*path, token), before, feedback) for token, more in ranked]

    level = children(0.0, (), tuple(rows))
    pool = list(level)
    for _ in range(options.eagle_depth):
        beam = sorted(level, key=lambda one: -one.score)[:top_k]
        level = [
            child
            for one in beam
            for child in children(
                one.score, one.tokens, (*one.rows, HeadRow(len(one.rows), one.tokens[-1], one.feedback))
            )
        ]
        pool += level
    chosen = sorted(sorted(range(len(pool)), key=lambda i: -pool[i].score)[:size])
    places = {pool[i].tokens: row for row, i in enumerate(chosen, 1)}
    parents = [places[pool[i].tokens[:-1]] if len(pool[i].tokens) > 1 else 0 for i in chosen]
    tokens = [pool[i].tokens[-1] for i in chosen]
    scores = np.array([pool[i].score for i in chosen], dtype=np.float32)
    sources = np.full(len(chosen), EAGLE, dtype=np.int8)
    return DraftTree(np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32), sources, scores)
