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

    Decoding sequences hold slots 0..n-1 in the order of `active`; one being prefilled holds slot n. When one leaves,
    the last moves into its slot, so a decode step always binds one contiguous block of the cache.
    """

    def __init__(self, target: Target, cache: KVCache, limits: Limits, drafters: Drafters) -> None:
        self._target = target
        self._cache = cache
        self._limits = limits
        self._drafters = drafters
        self._waiting: deque[Generation] = deque()
        self._prefilling: Generation | None = None
        self._active: list[Generation] = []

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._waiting or self._prefilling or self._active)

    @property
    def longest(self) -> int:
        """KV cache rows in use of any sequence, at most."""
        running = self._active + ([self._prefilling] if self._prefilling else [])
        return max((generation.sequence.length for generation in running), default=0)

    def add(self, generation: Generation) -> None:
        """Queue a sequence."""
        options, drafters = generation.sequence.speculation, self._drafters
        if drafters.eagle is not None and options.method in HEAD_METHODS:
            generation.head = drafters.eagle.start()
        if drafters.policy is not None and options.method == "ngram-eagle" and options.merge == AUTO:
            generation.auto = drafters.policy.start()
        self._waiting.append(generation)

    def cancel(self, generation: Generation) -> None:
        """End a sequence with reason "cancelled" and free its slot; a finished one is left as it is."""
        if generation.finished:
            return
        generation.end(CANCELLED)
        if generation in self._waiting:
            self._waiting.remove(generation)
        elif generation is self._prefilling:
            self._prefilling = None
        else:
            self._leave()

    def step(self) -> list[Generation]:
        """One prompt chunk, if a sequence waits for a free slot or is in one, and one decode step.

        Returns the sequences that got tokens.
        """
        progressed = [] if (joined := self._prefill()) is None else [joined]
        if self._active:
            batch = list(self._active)
            decode_step(batch, self._target, self._cache, self._drafters, self._limits.max_draft_tokens)
            progressed += [generation for generation in batch if generation not in progressed]
            self._leave()
        return progressed

    def _prefill(self) -> Generation | None:
        """Run one prompt chunk; returns the sequence whose prompt it completed."""
        if self._prefilling is None:
            if not self._waiting or len(self._active) == self._cache.slots:
                return None
            self._prefilling = self._waiting.popleft()
            self._prefilling.sequence.slot = len(self._active)
        generation = self._prefilling
        if not prefill_step(generation, self._target, self._cache, self._drafters, self._limits.prefill_chunk):
            return None
        self._prefilling = None
        if not generation.finished:
            self._active.append(generation)
        return generation

    def _leave(self) -> None:
        """Drop finished sequences; the last ones move into the slots that fall free."""
        staying = [generation for generation in self._active if not generation.finished]
        holes = [slot for slot, generation in enumerate(self._active) if generation.finished and slot < len(staying)]
        movers = [generation for generation in staying if generation.sequence.slot >= len(staying)]
        for slot, generation in zip(holes, movers, strict=True):
            self._move(generation, slot)
        self._active = sorted(staying, key=lambda generation: generation.sequence.slot)
        if self._prefilling is not None and self._prefilling.sequence.slot != len(self._active):
            self._move(self._prefilling, len(self._active))

    def _move(self, generation: Generation, slot: int) -> None:
        self._cache.move(generation.sequence.slot, slot, generation.sequence.cached)
        if self._drafters.eagle is not None and generation.head is not None:
            self._drafters.eagle.move(generation.head, generation.sequence.slot, slot)
        generation.sequence.slot = slot
