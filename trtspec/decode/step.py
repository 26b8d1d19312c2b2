"""The decode step: the only place where drafting, verification, acceptance and commit meet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from trtspec import sampling
from trtspec.decode.accept import accept
from trtspec.decode.generation import Generation
from trtspec.decode.rows import prefill_rows, select_rows, split_rows, verification_rows
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.tree import EMPTY, DraftTree
from trtspec.engine.base import CacheView
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.target import Target
from trtspec.sequence import Sequence


class StageClock:
    """Splits a step's time into stages; what is not in a stage is `host`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._engine_start = target.engine_seconds
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Put the time since the last lap down to a stage."""
        now = time.perf_counter()
        self._laps[stage] = self._laps.get(stage, 0.0) + now - self._last
        self._last = now

    def skip(self) -> None:
        """Leave the time since the last lap to the engines and the host."""
        self._last = time.perf_counter()

    def share(self, generations: Seq[Generation]) -> None:
        """Add the stages to the sequences' figures, each sequence an equal share; `verify` is time in engines."""
        total = time.perf_counter() - self._start
        stages = {**self._laps, "verify": self._target.engine_seconds - self._engine_start}
        stages["host"] = total - sum(stages.values())
        for generation in generations:
            for stage, seconds in stages.items():
                generation.stats.stage_seconds[stage] += seconds / len(generations)


def decode_step(
    batch: Seq[Generation],
    target: Target,
    cache: KVCache,
    drafters: Mapping[str, NgramDrafter],
    max_draft_tokens: int,
) -> None:
    """Draft, verify in one pass, accept and commit, for the sequences in slots 0..len(batch)-1.

    Plain decoding is this step with empty trees.
    """
    clock = StageClock(target)
    sequences = [generation.sequence for generation in batch]
    trees = [_draft(generation, drafters, max_draft_tokens) for generation in batch]
    clock.lap("ngram")
    hidden = target.forward(verification_rows(sequences, trees, target.buckets), cache.view(0, len(batch)))
    logits = target.logits(select_rows(hidden, trees))
    clock.skip()
    picks = split_rows(sampling.greedy(logits).tolist(), trees)
    acceptances = [accept(tree, pick) for tree, pick in zip(trees, picks, strict=True)]
    clock.lap("accept")
    for generation, tree, acceptance in zip(batch, trees, acceptances, strict=True):
        generation.commit(tree, acceptance, cache)
    clock.lap("commit")
    clock.share(batch)


def prefill_step(generation: Generation, target: Target, cache: KVCache, chunk: int) -> bool:
    """Run the next chunk of the prompt; true when the prompt is through and the first token is there."""
    start, sequence = time.perf_counter(), generation.sequence
    hidden = _prefill_chunk(sequence, target, cache.view(sequence.slot, 1), chunk)
    done = sequence.cached == sequence.prompt_length
    if done:
        generation.extend(sampling.greedy(target.logits(hidden[0, -1:])).tolist())
    generation.stats.stage_seconds["prefill"] += time.perf_counter() - start
    return done


def prompt_logits(sequence: Sequence, target: Target, cache: CacheView, chunk: int) -> torch.Tensor:
    """The logits behind a whole prompt, `[vocab]`."""
    while sequence.cached < sequence.prompt_length:
        hidden = _prefill_chunk(sequence, target, cache, chunk)
    return target.logits(hidden[0, -1:])[0]


def _prefill_chunk(sequence: Sequence, target: Target, cache: CacheView, chunk: int) -> torch.Tensor:
    rows = prefill_rows(sequence, chunk)
    hidden = target.forward(rows, cache)
    sequence.cached += rows.tokens.shape[1]
    return hidden


def _draft(generation: Generation, drafters: Mapping[str, NgramDrafter], max_draft_tokens: int) -> DraftTree:
    drafter = drafters.get(generation.sequence.speculation.method or "none")
    room = min(generation.sequence.draft_room, max_draft_tokens)
    return drafter.draft(generation.sequence, room) if drafter and room else EMPTY
