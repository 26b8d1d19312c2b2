"""The decode step: the only place where drafting, verification, acceptance and commit meet."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch

from trtspec.decode.accept import accept
from trtspec.decode.choose import choose_tokens, note_logprobs
from trtspec.decode.generation import Generation
from trtspec.decode.rows import prefill_rows, select_rows, verification_rows
from trtspec.draft.proposer import Ask, Drafters, StepTimes
from trtspec.draft.tree import EMPTY
from trtspec.engine.base import CacheView
from trtspec.engine.kv_cache import KeptPath, KVCache
from trtspec.engine.target import Pass, Target
from trtspec.sequence import Sequence


class StageClock:
    """Splits a step's time into stages; what is not in a stage is `host`."""

    def __init__(self, target: Target, drafters: Drafters) -> None:
        self._target = target
        self._drafters = drafters
        self._engine_start = target.engine_seconds
        self._head_start = drafters.head_seconds
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}
        self._ends: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Put the time since the last lap down to a stage."""
        now = self._ends[stage] = time.perf_counter()
        self._laps[stage] = self._laps.get(stage, 0.0) + now - self._last
        self._last = now

    def skip(self) -> None:
        """Leave the time since the last lap to the engines and the host."""
        self._last = time.perf_counter()

    def times(self, width: int) -> StepTimes:
        """The seconds of a step so far that verified this many rows of each sequence.

        `verify` lasts from the draft to the choice of tokens: engines on a GPU return before they are through, and only
        the choice waits for them.
        """
        total, verify = time.perf_counter() - self._start, self._ends["accept"] - self._ends["merge"]
        eagle = self._laps.get("eagle", 0.0)
        return StepTimes(verify, eagle, total - verify - eagle, width)

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
    proposal = drafters.propose([_ask(generation, max_draft_tokens) for generation in batch], clock.lap)
    trees = proposal.trees
    rows = verification_rows(sequences, trees, target.buckets)
    verified = target.forward(rows, cache.view(0, len(batch)))
    logits = target.logits(select_rows(verified.hidden, trees))
    clock.skip()
    picks = choose_tokens(logits, batch, trees)
    acceptances = [accept(tree, pick) for tree, pick in zip(trees, picks, strict=True)]
    clock.lap("accept")
    committed, paths = [], []
    for slot, (generation, tree, acceptance) in enumerate(zip(batch, trees, acceptances, strict=True)):
        num_tokens, kept = generation.commit(tree, acceptance)
        committed.append(kept[:num_tokens])
        if not generation.finished:
            paths.append(KeptPath(slot, generation.sequence.cached - len(kept), kept))
        if generation.head is not None:
            generation.head.push(verified.features[slot], kept)
    cache.keep_paths(paths)
    note_logprobs(logits, batch, trees, committed)
    clock.lap("commit")
    drafters.learn(proposal, [acceptance.tokens for acceptance in acceptances], clock.times(rows.tokens.shape[1]))
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
        logits = target.logits(read.hidden[0, -1:])
        generation.extend(choose_tokens(logits, [generation], [EMPTY])[0])
        note_logprobs(logits, [generation], [EMPTY], [[0]])
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


def _ask(generation: Generation, max_draft_tokens: int) -> Ask:
    sequence = generation.sequence
    room = min(sequence.draft_room, max_draft_tokens)
    return Ask(sequence, generation.head, generation.auto, generation.sampler, room)
