"""A target with exact arithmetic, whose next token is a function of the token path that its rows see in the KV cache.

A wrong mask, position, cache row or slot changes what a row sees, hence the tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import reject
from sampling.oracle import choices

from trtspec.config import Limits, SamplingParams, SpeculationConfig
from trtspec.engine.base import Buckets, CacheView
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.target import Pass, Rows, Target
from trtspec.sequence import CONTEXT, LENGTH, STOP
from trtspec.tensors import cache_names

PIECES = ("a", "b", "ab", ". ", "ba", "é", "aa", "c", "bb", "世", "d", "e")
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 2
TOKEN_ROWS, POSITION_ROWS, PATH_ROWS, PATH_COPY = (past for past, _ in cache_names(LAYERS))


def _checksum(numbers: Seq[int], salt: int) -> int:
    return zlib.crc32(np.asarray(numbers, dtype=np.int32).tobytes(), salt)


def _in_float32(checksum: int) -> int:
    return checksum & 0xFFFFFF


class ToyTarget(Target):
    """Mostly the last two tokens decide the next one, so text repeats; one time in `surprise` the whole path does.

    Its logits are 1 for that token and 0 for all others, or, with `levels`, integers of so many values, and that
    token's by `peak` above the largest of them: small integers are exact in float32, and often equal.

    It has two layers, like a transformer: the first writes each row's token and position to the cache; the second
    writes a fingerprint of the path that the row sees in the first. The output comes from what a row sees in both. A
    row whose visible positions are not 0..its own, once each, with its own token last and true fingerprints, gets a
    token made from all of that content.
    """

    def __init__(
        self,
        vocab: int = 11,
        salt: int = 0,
        surprise: int = 6,
        buckets: Buckets | None = None,
        levels: int = 0,
        peak: int = 0,
    ) -> None:
        self.vocab, self.salt, self.surprise, self.levels, self.peak = vocab, salt, surprise, levels, peak
        self.buckets = buckets or Buckets()
        self.engine_seconds = 0.0
        self.seconds_per_pass = 0.0
        """What each is said to take."""
        self.widths: list[int] = []
        """Rows per sequence of each pass."""
        self.last_position = -1
        """The furthest position that any row had."""
        self._lent: dict[str, torch.Tensor] = {}

    def next_token(self, path: Seq[int]) -> int:
        """The most probable token after a path."""
        logits = self.logits_behind(path)
        return logits.index(max(logits))

    def logits_behind(self, path: Seq[int]) -> list[float]:
        """The logits after a path, whole numbers."""
        return self._logits(_checksum(path, self.salt), _checksum(path[-2:], self.salt + 1))

    def forward(self, rows: Rows, cache: CacheView) -> Pass:
        batch, width = rows.tokens.shape
        assert cache.key[1] == batch == len(rows.cache_length)
        assert rows.mask.shape[:3] == (batch, 1, width)
        assert 0 <= int(rows.tokens.min()) <= int(rows.tokens.max()) < self.vocab, "no tokens of the vocabulary"
        self.widths.append(width)
        self.engine_seconds += self.seconds_per_pass
        self.last_position = max(self.last_position, int(rows.positions.max()))
        self._write(rows, cache.tensors[TOKEN_ROWS], rows.tokens + 1)
        self._write(rows, cache.tensors[POSITION_ROWS], rows.positions)
        paths = self._run_layer(rows, cache, 1)
        for name in (PATH_ROWS, PATH_COPY):
            self._write(rows, cache.tensors[name], torch.tensor(paths)[..., 0])
        hidden = torch.tensor(self._run_layer(rows, cache, 2), dtype=torch.float64)
        return Pass(self._lend("hidden", hidden), self._lend("features", hidden[..., :1].clone()))

    def feature(self, path: Seq[int]) -> int:
        """What a draft head gets for the last token of a path."""
        return _checksum(path, self.salt)

    def likely_token(self, path: Seq[int]) -> int:
        """The token after a path by its last two tokens alone: mostly the right one."""
        return _checksum(path[-2:], self.salt + 1) % self.vocab

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        logits = [self._logits(int(whole), int(tail)) for whole, tail in hidden_rows.tolist()]
        return self._lend("logits", torch.tensor(logits, dtype=torch.float32))

    def close(self) -> None:
        pass

    def _logits(self, whole: int, tail: int) -> list[float]:
        decisive = whole if whole % self.surprise == 0 else tail
        logits = [0.0] * self.vocab
        if self.levels:
            logits = [float((decisive * (2 * token + 3) >> 9) % self.levels) for token in range(self.vocab)]
        logits[decisive % self.vocab] = float(self.levels - 1 + self.peak) if self.levels else 1.0
        return [value - self.levels // 2 for value in logits]

    def fingerprints(self, path: Seq[int]) -> list[int]:
        """What the second layer writes for each token of a path."""
        checksum, prints = self.salt, []
        for token in path:
            checksum = _checksum([token], checksum)
            prints.append(_in_float32(checksum))
        return prints

    def _run_layer(self, rows: Rows, cache: CacheView, layer: int) -> list[list[tuple[int, int]]]:
        """What each row makes of the rows that it sees, `[batch, width]`."""
        results = []
        for b in range(len(rows.tokens)):
            stored = stored_rows(cache.tensors, b, rows.mask.shape[-1])
            results.append([self._row(rows, b, w, stored, layer) for w in range(rows.tokens.shape[1])])
        return results

    def _row(self, rows: Rows, b: int, w: int, stored: StoredRows, layer: int) -> tuple[int, int]:
        visible = np.flatnonzero(rows.mask[b, 0, w].numpy())
        order = visible[np.argsort(stored.positions[visible], kind="stable")]
        positions, tokens = stored.positions[order].tolist(), stored.tokens[order].tolist()
        position, token = int(rows.positions[b, w]), int(rows.tokens[b, w])
        sound = positions == list(range(position + 1)) and tokens[-1] == token
        prints = stored.fingerprints[order].tolist() if layer == 2 else []
        if not sound or (layer == 2 and prints != self.fingerprints(tokens)):
            broken = _in_float32(_checksum([position, token, *positions, *tokens, *prints], self.salt + 2))
            return broken, broken
        whole = _checksum(tokens, self.salt)
        return (_in_float32(whole), 0) if layer == 1 else (whole, _checksum(tokens[-2:], self.salt + 1))

    def _write(self, rows: Rows, tensor: torch.Tensor, content: torch.Tensor) -> None:
        """Put content `[batch, width]` behind what each slot holds, in every head and dimension."""
        for b, start in enumerate(rows.cache_length.tolist()):
            target = tensor[b, :, start : start + content.shape[1]]
            target.copy_(content[b][None, :, None].expand_as(target))

    def _lend(self, name: str, result: torch.Tensor) -> torch.Tensor:
        """As an engine does, give out a result that the next run overwrites."""
        if name in self._lent:
            self._lent[name].fill_(-1)
        self._lent[name] = result
        return result


@dataclass(frozen=True)
class StoredRows:
    """What the first rows of a slot hold."""

    tokens: np.ndarray
    positions: np.ndarray
    fingerprints: np.ndarray


def stored_rows(tensors: Mapping[str, torch.Tensor], slot: int, count: int) -> StoredRows:
    """The first rows of a slot; all heads and dimensions, and both tensors of the second layer, must agree."""
    contents: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        content = tensor[slot, :, :count].numpy()
        assert (content == content[:1, :, :1]).all(), "heads differ"
        contents[name] = content[0, :, 0].astype(np.int64)
    assert (contents[PATH_ROWS] == contents[PATH_COPY]).all(), "keys and values differ"
    return StoredRows(contents[TOKEN_ROWS] - 1, contents[POSITION_ROWS], contents[PATH_ROWS])


def toy_cache(limits: Limits) -> KVCache:
    return KVCache(
        num_layers=LAYERS,
        slots=limits.max_batch_size,
        num_kv_heads=KV_HEADS,
        rows=limits.cache_rows,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@dataclass(frozen=True)
class PieceDecoder:
    """Joins PIECES; `special` tokens have no text."""

    special: frozenset[int] = frozenset()

    def decode(self, ids: Seq[int], skip_special_tokens: bool = True) -> str:
        return "".join(PIECES[token] for token in ids if not (skip_special_tokens and token in self.special))


@dataclass(frozen=True)
class Request:
    """What a user asks for."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationConfig = field(default_factory=lambda: SpeculationConfig(method="none"))
    eos: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """What a user gets."""

    tokens: list[int]
    text: str
    reason: str | None


def chosen(target: ToyTarget, path: Seq[int], prompt_length: int, sampling: SamplingParams) -> int:
    """The token after a path by the sampling tests' oracle.

    An example in which float32 cannot tell which one is right says nothing and is dropped.
    """
    found = choices(target.logits_behind(path), path[:prompt_length], path[prompt_length:], sampling, len(path))
    return found.pop() if len(found) == 1 else reject()


def reference(target: ToyTarget, request: Request, capacity: int) -> Outcome:
    """Plain decoding one token at a time, with nothing of trtspec in it."""
    path, tokens, text, sampling = list(request.prompt), [], "", request.sampling
    while True:
        token = chosen(target, path, len(request.prompt), sampling)
        path.append(token)
        tokens.append(token)
        is_eos = token in request.eos
        if is_eos and not sampling.ignore_eos:
            return Outcome(tokens, text, STOP)
        text += "" if is_eos else PIECES[token]
        cuts = [text.index(stop) for stop in sampling.stop if stop in text]
        if cuts:
            return Outcome(tokens, text[: min(cuts)], STOP)
        if len(tokens) == sampling.max_new_tokens:
            return Outcome(tokens, text, LENGTH)
        if len(path) == capacity:
            return Outcome(tokens, text, CONTEXT)
