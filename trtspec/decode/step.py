"""The decode step: the only place where drafting, verification, acceptance and commit meet."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from trtspec import sampling
from trtspec.decode.accept import accept
from trtspec.decode.generation import Generation
from trtspec.decode.rows import prefill_rows, select_rows, split_rows, verification_rows
from trtspec.draft.eagle import EagleDrafter
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.tree import EMPTY, NGRAM, DraftTree
from trtspec.engine.base import CacheView
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.target import Pass, Target
from trtspec.sequence import Sequence


@dataclass(frozen=True)
class Drafters:
    """Those that an engine directory supports."""

    ngram: NgramDrafter
    eagle: EagleDrafter | None = None

    @property
    def head_seconds(self) -> float:
        """Seconds spent inside the draft head's engines so far."""
        return self.eagle.head.engine_seconds if self.eagle else 0.0


class StageClock:
    """Splits a step's time into stages; what is not in a stage is `host`."""

    def __init__(self, target: Target, drafters: Drafters) -> None:
        self._target = target
        self._drafters = drafters
        self._engine_start = target.engine_seconds
        self._head_start = drafters.head_seconds
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
        head_seconds = self._drafters.head_seconds - self._head_start
        for generation in generations:
            generation.stats.head_seconds += head_seconds / len(generations)
            for stage, seconds in stages.items():
                generation.stats.stage_seconds[stage] += seconds / len(generations)


def decode_step(
    batch: Seq[Generation], target: Target, cache: KVCache, drafters: Drafters, max_draft_tokens: int
) -> None:
    """Draft, verify in one pass, accept and commit, for the sequences in slots 0..len(batch)-1.

    Plain decoding is this step with empty trees.
    """
    clock = StageClock(target, drafters)
    sequences = [generation.sequence for generation in batch]
    trees = _draft(batch, drafters, max_draft_tokens, clock)
    verified = target.forward(verification_rows(sequences, trees, target.buckets), cache.view(0, len(batch)))
    logits = target.logits(select_rows(verified.hidden, trees))
    clock.skip()
    picks = split_rows(sampling.greedy(logits).tolist(), trees)
    acceptances = [accept(tree, pick) for tree, pick in zip(trees, picks, strict=True)]
    clock.lap("accept")
    for slot, (generation, tree, acceptance) in enumerate(zip(batch, trees, acceptances, strict=True)):
        kept = generation.commit(tree, acceptance, cache)
        if generation.head is not None:
            generation.head.push(verified.features[slot], kept)
    clock.lap("commit")
    clock.share(batch)


def prefill_step(generation: Generation, target: Target, cache: KVCache, drafters: Drafters, chunk: int) -> bool:
    """Run the next chunk of the prompt; true when the prompt is through and the first token is there."""
    start, sequence = time.perf_counter(), generation.sequence
    read = _prefill_chunk(sequence, target, cache.view(sequence.slot, 1), chunk)
    if drafters.eagle is not None and generation.head is not None:
        generation.head.push(read.features[0])
        drafters.eagle.absorb(sequence.slot, sequence, generation.head)
    done = sequence.cached == sequence.prompt_length
    if done:
        generation.extend(sampling.greedy(target.logits(read.hidden[0, -1:])).tolist())
    generation.stats.stage_seconds["prefill"] += time.perf_counter() - start
    return done


def prompt_logits(sequence: Sequence, target: Target, cache: CacheView, chunk: int) -> torch.Tensor:
    """The logits behind a whole prompt, `[vocab]`."""
    while sequence.cached < sequence.prompt_length:
        read = _prefill_chunk(sequence, target, cache, chunk)
    return target.logits(read.hidden[0, -1:])[0]


def prompt_features(sequence: Sequence, target: Target, cache: CacheView, chunk: int) -> torch.Tensor:
    """What a draft head takes for each token of a whole prompt, `[prompt, features]`."""
    parts = []
    while sequence.cached < sequence.prompt_length:
        parts.append(_prefill_chunk(sequence, target, cache, chunk).features[0].clone())
    return torch.cat(parts)


def _prefill_chunk(sequence: Sequence, target: Target, cache: CacheView, chunk: int) -> Pass:
    rows = prefill_rows(sequence, chunk)
    read = target.forward(rows, cache)
    sequence.cached += rows.tokens.shape[1]
    return read


def _draft(batch: Seq[Generation], drafters: Drafters, max_draft_tokens: int, clock: StageClock) -> list[DraftTree]:
    """Each sequence's draft by its own method; those with a head draft together."""
    sequences = [generation.sequence for generation in batch]
    rooms = [min(sequence.draft_room, max_draft_tokens) for sequence in sequences]
    trees = [
        drafters.ngram.draft(sequence, room) if room and sequence.speculation.method == NGRAM else EMPTY
        for sequence, room in zip(sequences, rooms, strict=True)
    ]
    clock.lap("ngram")
    states = [generation.head for generation in batch]
    if drafters.eagle is not None and any(state is not None for state in states):
        found = drafters.eagle.draft(sequences, states, rooms)
        trees = [tree if state is None else own for tree, state, own in zip(trees, states, found, strict=True)]
        clock.lap("eagle")
    return trees
