"""Sequences join and leave the batch between decode steps."""

from __future__ import annotations

from collections import deque

from trtspec.config import AUTO, HEAD_METHODS, Limits
from trtspec.decode.generation import Generation
from trtspec.decode.step import decode_step, prefill_step
from trtspec.draft.proposer import Drafters
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.target import Target
from trtspec.sequence import CANCELLED


class Scheduler:
    """Gives waiting sequences a slot, runs prompt chunks and decode steps.

    Decoding sequences hold slots 0..n-1 in the order of `active`, so a decode step always binds one contiguous block
    of the cache; when one leaves, the last moves into its slot. A prompt of several chunks is read in the last slot and
    moves to slot n when it is through. Prompts of a single chunk are read in slot n at once, so they need not wait for
    a long one: the two kinds take turns. Within each kind, first come, first served.
    """

    def __init__(self, target: Target, cache: KVCache, limits: Limits, drafters: Drafters) -> None:
        self._target = target
        self._cache = cache
        self._limits = limits
        self._drafters = drafters
        self._short: deque[Generation] = deque()
        self._long: deque[Generation] = deque()
        self._arrivals = 0
        self._prefilling: Generation | None = None
        self._short_turn = True
        self._active: list[Generation] = []

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.num_waiting or self._prefilling or self._active)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._short) + len(self._long)

    @property
    def running(self) -> list[Generation]:
        """Sequences with a slot."""
        return self._active + ([self._prefilling] if self._prefilling else [])

    @property
    def longest(self) -> int:
        """KV cache rows in use of any sequence, at most."""
        return max((generation.sequence.length for generation in self.running), default=0)

    def add(self, generation: Generation) -> None:
        """Queue a sequence."""
        options, drafters = generation.sequence.speculation, self._drafters
        if drafters.eagle is not None and options.method in HEAD_METHODS:
            generation.head = drafters.eagle.start()
        if drafters.policy is not None and options.method == "ngram-eagle" and options.merge == AUTO:
            generation.auto = drafters.policy.start()
        generation.arrival = self._arrivals
        self._arrivals += 1
        self._queue_of(generation).append(generation)

    def cancel(self, generation: Generation) -> None:
        """End a sequence with reason "cancelled" and free its slot; a finished one is left as it is."""
        if generation.finished:
            return
        generation.end(CANCELLED)
        if generation is self._prefilling:
            self._prefilling = None
        elif generation.sequence.slot < 0:
            self._queue_of(generation).remove(generation)
        else:
            self._leave()

    def step(self) -> list[Generation]:
        """Prompts that are due, at most a chunk's tokens in all, then one decode step.

        Returns the sequences that got tokens.
        """
        progressed = self._prefill()
        if self._active:
            batch = list(self._active)
            decode_step(batch, self._target, self._cache, self._drafters, self._limits.max_draft_tokens)
            progressed += [generation for generation in batch if generation not in progressed]
            self._leave()
        return progressed

    def _prefill(self) -> list[Generation]:
        """Read prompts; returns the sequences whose prompt is through.

        Where both kinds wait, a step reads short prompts and the next a chunk of the long one.
        """
        if self._prefilling is None and self._long and self._free_slots and self._is_next(self._long[0]):
            self._prefilling = self._long.popleft()
            self._prefilling.sequence.slot = self._cache.slots - 1
        room = self._limits.prefill_chunk
        joined: list[Generation] = []
        long_first = self._prefilling is not None and not (self._short_turn and self._short and self._free_slots)
        if long_first:
            room -= self._read_long(joined)
        while self._short and self._free_slots and self._short[0].sequence.prompt_length <= room:
            if not self._prefilling and self._long and self._is_next(self._long[0]):
                break
            room -= self._read_short(joined)
        self._short_turn = long_first
        return joined

    def _read_short(self, joined: list[Generation]) -> int:
        """Read the first short prompt; returns its tokens."""
        generation = self._short.popleft()
        generation.sequence.slot = len(self._active)
        self._read(generation)
        self._join(generation, joined)
        return generation.sequence.prompt_length

    def _read_long(self, joined: list[Generation]) -> int:
        """Read the next chunk of the long prompt that is under way; returns its tokens."""
        generation = self._prefilling
        assert generation is not None
        cached = generation.sequence.cached
        if self._read(generation):
            self._prefilling = None
            if not generation.finished and generation.sequence.slot != len(self._active):
                self._move(generation, len(self._active))
            self._join(generation, joined)
        return generation.sequence.cached - cached

    def _read(self, generation: Generation) -> bool:
        return prefill_step(generation, self._target, self._cache, self._drafters, self._limits.prefill_chunk)

    def _join(self, generation: Generation, joined: list[Generation]) -> None:
        """The prompt is through, and the first token is there."""
        if not generation.finished:
            self._active.append(generation)
        joined.append(generation)

    def _queue_of(self, generation: Generation) -> deque[Generation]:
        return self._short if generation.sequence.prompt_length <= self._limits.prefill_chunk else self._long

    def _is_next(self, generation: Generation) -> bool:
        """Whether no sequence has waited longer."""
        return all(not queue or generation.arrival <= queue[0].arrival for queue in (self._short, self._long))

    @property
    def _free_slots(self) -> int:
        return self._cache.slots - len(self._active) - (self._prefilling is not None)

    def _leave(self) -> None:
        """Drop finished sequences; the last ones move into the slots that fall free."""
        staying = [generation for generation in self._active if not generation.finished]
        holes = [slot for slot, generation in enumerate(self._active) if generation.finished and slot < len(staying)]
        movers = [generation for generation in staying if generation.sequence.slot >= len(staying)]
        for slot, generation in zip(holes, movers, strict=True):
            self._move(generation, slot)
        self._active = sorted(staying, key=lambda generation: generation.sequence.slot)

    def _move(self, generation: Generation, slot: int) -> None:
        self._cache.move(generation.sequence.slot, slot, generation.sequence.cached)
        if self._drafters.eagle is not None and generation.head is not None:
            self._drafters.eagle.move(generation.head, generation.sequence.slot, slot)
        generation.sequence.slot = slot
