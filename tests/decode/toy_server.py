"""A scheduler over a toy target, checked after every step."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from draft.toy_head import ToyHead, committed_rows, head_rows, toy_head_cache
from toy import Outcome, PieceDecoder, Request, ToyTarget, stored_rows, toy_cache
from toy_checks import CheckedDrafters, CheckedEagle

from trtspec.config import HEAD_METHODS, Limits
from trtspec.decode.detokenize import TextStream
from trtspec.decode.generation import Generation
from trtspec.decode.scheduler import Scheduler
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.policy import AutoPolicy
from trtspec.sequence import Sequence


class Server:
    """A scheduler over a toy target, checked after every step."""

    def __init__(
        self,
        target: ToyTarget,
        limits: Limits,
        drafter: NgramDrafter | None = None,
        head: ToyHead | None = None,
        policy: AutoPolicy | None = None,
    ) -> None:
        """`policy` is needed where a sequence has the `auto` merge."""
        self.target, self.limits, self.cache = target, limits, toy_cache(limits)
        self.head, self.head_cache = head, toy_head_cache(limits)
        self.eagle = CheckedEagle(target, head, self.head_cache) if head else None
        self.drafters = CheckedDrafters(drafter or NgramDrafter(), self.eagle)
        self.drafters.policy = policy
        self.scheduler = Scheduler(target, self.cache, limits, self.drafters)
        self.streamed: dict[int, Outcome] = {}

    def add(self, index: int, request: Request, special: frozenset[int] | None = None) -> Generation:
        """Queue a request; its end-of-sequence tokens have no text unless `special` says otherwise."""
        sequence = Sequence.start(index, request.prompt, self.limits.max_seq_len, request.sampling, request.speculation)
        decoder = PieceDecoder(request.eos if special is None else special)
        generation = Generation(sequence, TextStream(decoder, request.sampling.stop), request.eos)
        self.scheduler.add(generation)
        self.streamed[index] = Outcome([], "", None)
        return generation

    def step(self) -> list[Generation]:
        """One step of the scheduler; what it yields is collected as a stream."""
        progressed = self.scheduler.step()
        assert len({id(generation) for generation in progressed}) == len(progressed)
        for generation in progressed:
            self.collect(generation)
        self.check()
        return progressed

    def collect(self, generation: Generation) -> None:
        """Take what is new."""
        text, tokens = generation.take()
        index, so_far = generation.sequence.index, self.streamed[generation.sequence.index]
        assert so_far.reason is None, "tokens after the end"
        self.streamed[index] = Outcome(so_far.tokens + tokens, so_far.text + text, generation.sequence.finish_reason)

    def cancel(self, generation: Generation) -> None:
        self.scheduler.cancel(generation)
        self.check()

    def run(self, after_step: Callable[[], None] | None = None) -> None:
        """Step until nothing is left; a step without any progress for long would be a hang."""
        budget = sum(len(g.sequence.tokens) for g in self.waiting + self.running) + 10
        while self.scheduler.busy:
            self.step()
            if after_step:
                after_step()
            budget -= 1
            assert budget > 0, "the scheduler makes no progress"
        assert self.running == []

    def run_cancelling(self, generations: Seq[Generation], cancellations: Seq[tuple[int, int]]) -> None:
        """Step until nothing is left, cancelling at (step, number of a generation), where there is such a one."""
        steps = 0
        while self.scheduler.busy:
            for at, index in cancellations:
                if at == steps and index < len(generations):
                    self.cancel(generations[index])
            self.step()
            steps += 1
            assert steps < 500

    @property
    def waiting(self) -> list[Generation]:
        """In the order of their arrival."""
        return sorted([*self.scheduler._short, *self.scheduler._long], key=lambda generation: generation.arrival)

    @property
    def active(self) -> list[Generation]:
        return self.scheduler._active

    @property
    def prefilling(self) -> Generation | None:
        return self.scheduler._prefilling

    @property
    def running(self) -> list[Generation]:
        """Those with a slot."""
        return self.scheduler.running

    def check(self) -> None:
        """What holds between steps."""
        assert len(self.running) <= self.cache.slots
        for place, generation in enumerate(self.running):
            sequence = generation.sequence
            slot = self.cache.slots - 1 if generation is self.prefilling else place
            assert not generation.finished
            assert sequence.slot == slot
            assert sequence.length < sequence.capacity
            assert sequence.generated < sequence.sampling.max_new_tokens
            if generation is not self.prefilling:
                assert sequence.cached == sequence.length - 1
            else:
                assert sequence.cached < sequence.prompt_length == sequence.length
            stored = stored_rows(self.cache.view(0, self.cache.slots).tensors, slot, sequence.cached)
            committed = sequence.history[: sequence.cached].tolist()
            assert stored.tokens.tolist() == committed
            assert stored.positions.tolist() == list(range(sequence.cached))
            assert stored.fingerprints.tolist() == self.target.fingerprints(committed)
            self._check_head(slot, generation)

    def _check_head(self, slot: int, generation: Generation) -> None:
        """The head's cache holds the committed tokens with the target's features of the tokens before them."""
        state, sequence = generation.head, generation.sequence
        drafts = self.head is not None and sequence.speculation.method in HEAD_METHODS
        assert (state is not None) == drafts
        if self.head is None or state is None:
            return
        if state.stopped:
            assert sequence.cached > state.max_rows
            assert (state.refreshed, state.queued, state._queue) == (0, 0, [])
            return
        assert state.refreshed + state.queued == sequence.cached
        assert state.queued == sum(len(waiting) for waiting in state._queue)
        tokens = sequence.history[: state.refreshed + 1].tolist()
        features = [self.target.feature(tokens[: i + 1]) for i in range(state.refreshed)]
        stored = head_rows(self.head_cache.view(0, self.cache.slots), slot, state.refreshed)
        assert stored == committed_rows(self.head, tokens, features)


def outcome(generation: Generation, server: Server) -> Outcome:
    """The outcome of a finished sequence; its stream must have said the same."""
    sequence = generation.sequence
    streamed = server.streamed[sequence.index]
    assert streamed.tokens == sequence.history[sequence.prompt_length :].tolist()
    assert streamed.reason == sequence.finish_reason
    assert generation.stats.draft_tokens == server.drafters.drafted[sequence.index]
    return streamed


def serve(
    target: ToyTarget,
    limits: Limits,
    requests: Seq[Request],
    drafter: NgramDrafter | None = None,
    head: ToyHead | None = None,
    policy: AutoPolicy | None = None,
) -> list[Outcome]:
    """Serve the requests together; outcomes in the order of the requests."""
    server = Server(target, limits, drafter, head, policy)
    generations = [server.add(index, request) for index, request in enumerate(requests)]
    server.run()
    return [outcome(generation, server) for generation in generations]
