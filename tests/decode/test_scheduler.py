"""Batches: sequences join, leave and are cancelled without touching each other's output."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import PIECES, Request, ToyTarget, reference
from toy_drafters import OracleDrafter, TreeDrafter
from toy_server import Server, outcome, serve

from trtspec.config import Limits, SamplingParams, SpeculationConfig
from trtspec.draft.ngram import NgramDrafter
from trtspec.engine.base import Buckets
from trtspec.sequence import CANCELLED, LENGTH

CAPACITY = 48
NONE, NGRAM_METHOD = SpeculationConfig(method="none"), SpeculationConfig(method="ngram", ngram_min=1)

prompts = st.lists(st.integers(0, 4), min_size=1, max_size=40).map(tuple)
samplings = st.builds(
    SamplingParams,
    max_new_tokens=st.sampled_from([24, 1, 17, 5, 40, 11, 2]),
    stop=st.lists(st.text("abé. ", min_size=2, max_size=4), max_size=1).map(tuple),
    ignore_eos=st.booleans(),
)
speculations = st.one_of(
    st.just(NONE),
    st.builds(
        SpeculationConfig,
        method=st.just("ngram"),
        ngram_min=st.integers(1, 2),
        ngram_max=st.integers(2, 4),
        ngram_tokens=st.integers(1, 8),
        ngram_occurrence=st.sampled_from(["earliest", "latest"]),
    ),
)
requests = st.builds(Request, prompts, samplings, speculations, st.frozensets(st.integers(0, 7), max_size=1))
batches = st.integers(1, 7).flatmap(lambda count: st.lists(requests, min_size=count, max_size=count))
all_limits = st.builds(
    Limits,
    max_seq_len=st.just(CAPACITY),
    max_batch_size=st.integers(1, 4),
    max_draft_tokens=st.integers(0, 7),
    prefill_chunk=st.integers(1, 8),
)
targets = st.builds(
    lambda salt, surprise, bucketed, limits: (
        ToyTarget(
            vocab=8,
            salt=salt,
            surprise=surprise,
            buckets=Buckets((1, 3, limits.max_width), 16, limits.cache_rows) if bucketed else None,
        ),
        limits,
    ),
    st.integers(0, 10**6),
    st.sampled_from([3, 8, 30]),
    st.booleans(),
    all_limits,
)


@settings(max_examples=80, deadline=None)
@given(targets, batches, st.randoms(use_true_random=False))
def test_output_depends_on_neither_batch_nor_order(
    setting: tuple[ToyTarget, Limits], batch: list[Request], shuffler: random.Random
) -> None:
    target, limits = setting
    expected = [reference(target, request, CAPACITY) for request in batch]
    assert serve(target, limits, batch) == expected
    assert serve(target, limits, batch, TreeDrafter(target, seed=len(batch))) == expected
    order = list(range(len(batch)))
    shuffler.shuffle(order)
    assert serve(target, limits, [batch[i] for i in order], OracleDrafter(target, 3)) == [expected[i] for i in order]
    assert target.last_position <= CAPACITY - 2


@settings(max_examples=80, deadline=None)
@given(targets, batches, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6)), max_size=4), st.booleans())
def test_cancellation_leaves_the_others_alone(
    setting: tuple[ToyTarget, Limits], batch: list[Request], cancellations: list[tuple[int, int]], trees: bool
) -> None:
    target, limits = setting
    server = Server(target, limits, TreeDrafter(target, seed=7) if trees else None)
    generations = [server.add(index, request) for index, request in enumerate(batch)]
    server.run_cancelling(generations, cancellations)
    for index, (generation, request) in enumerate(zip(generations, batch, strict=True)):
        expected = reference(target, request, CAPACITY)
        if generation.sequence.finish_reason != CANCELLED:
            assert outcome(generation, server) == expected
        else:
            server.collect(generation)
            cut = outcome(generation, server)
            assert cut.tokens == expected.tokens[: len(cut.tokens)]
            assert len(cut.tokens) < len(expected.tokens)
            assert index in {index for _, index in cancellations}


def long_request(first: int, tokens: int = 20, method: SpeculationConfig = NGRAM_METHOD) -> Request:
    return Request((first, 1, 2, first, 1, 2), SamplingParams(max_new_tokens=tokens), method)


def start(slots: int, count: int, chunk: int = 256) -> tuple[Server, list[Request]]:
    server = Server(ToyTarget(), Limits(max_seq_len=CAPACITY, max_batch_size=slots, prefill_chunk=chunk))
    batch = [long_request(first) for first in range(count)]
    for index, request in enumerate(batch):
        server.add(index, request)
    return server, batch


def check_rest(server: Server, batch: list[Request], cancelled: set[int]) -> None:
    server.run()
    for index, request in enumerate(batch):
        if index not in cancelled:
            assert server.streamed[index] == reference(server.target, request, CAPACITY)


def test_cancel_a_waiting_sequence() -> None:
    server, batch = start(slots=2, count=5)
    server.step()
    waiting = server.waiting
    assert [generation.sequence.index for generation in waiting] == [2, 3, 4]
    server.cancel(waiting[1])
    assert [generation.sequence.index for generation in server.waiting] == [2, 4]
    assert waiting[1].sequence.finish_reason == CANCELLED
    check_rest(server, batch, {3})
    assert server.streamed[3].tokens == []


def test_cancel_a_prefilling_sequence() -> None:
    server, batch = start(slots=2, count=3, chunk=4)
    server.step()
    server.step()
    server.step()
    prefilling = server.prefilling
    assert prefilling is not None
    assert (prefilling.sequence.index, prefilling.sequence.slot, prefilling.sequence.cached) == (1, 1, 4)
    server.cancel(prefilling)
    assert server.prefilling is None
    server.step()
    assert server.prefilling is not None
    assert (server.prefilling.sequence.index, server.prefilling.sequence.slot) == (2, 1)
    check_rest(server, batch, {1})


@pytest.mark.parametrize("position", [0, 1, 2])
def test_cancel_an_active_sequence(position: int) -> None:
    server, batch = start(slots=3, count=5)
    for _ in range(4):
        server.step()
    assert [generation.sequence.index for generation in server.active] == [0, 1, 2]
    cancelled = server.active[position]
    server.cancel(cancelled)
    staying = [generation.sequence.index for generation in server.active]
    assert sorted(staying) == sorted({0, 1, 2} - {position})
    server.step()
    assert 3 in [generation.sequence.index for generation in server.running]
    check_rest(server, batch, {position})


def test_cancel_an_active_sequence_while_another_is_in_prefill() -> None:
    server, batch = start(slots=3, count=3, chunk=4)
    for _ in range(5):
        server.step()
    assert [generation.sequence.index for generation in server.active] == [0, 1]
    assert server.prefilling is not None
    assert (server.prefilling.sequence.slot, server.prefilling.sequence.cached) == (2, 4)
    server.cancel(server.active[0])
    assert (server.prefilling.sequence.slot, server.prefilling.sequence.cached) == (2, 4)
    check_rest(server, batch, {0})


def test_cancel_twice_and_after_the_end_changes_nothing() -> None:
    server, batch = start(slots=1, count=2)
    generations = server.waiting
    server.step()
    server.cancel(generations[0])
    server.cancel(generations[0])
    check_rest(server, batch, {0})
    ended = generations[1].ended_at
    server.cancel(generations[1])
    assert generations[1].sequence.finish_reason == LENGTH
    assert generations[1].ended_at == ended


def test_cancel_everything() -> None:
    server, _ = start(slots=2, count=5, chunk=4)
    generations = server.waiting
    for _ in range(3):
        server.step()
    for generation in generations:
        server.cancel(generation)
    assert not server.scheduler.busy
    assert server.step() == []
    late = long_request(3)
    server.add(9, late)
    check_rest(server, [], set())
    assert server.streamed[9] == reference(server.target, late, CAPACITY)


def test_a_shorter_sequence_in_the_slot_of_a_longer_one() -> None:
    # llama.cpp#27852: state of a slot's last user must not reach the next one.
    target, limits = ToyTarget(surprise=3), Limits(max_seq_len=CAPACITY, max_batch_size=1, max_draft_tokens=6)
    long = Request(tuple([1, 2, 3] * 8), SamplingParams(max_new_tokens=20), NGRAM_METHOD)
    short = Request((3,), SamplingParams(max_new_tokens=20), NGRAM_METHOD)
    alone, together = Server(target, limits), Server(target, limits)
    fresh = alone.add(0, short)
    alone.run()
    together.add(0, long)
    after = together.add(1, short)
    together.run()
    assert outcome(after, together) == reference(target, short, CAPACITY) == outcome(fresh, alone)
    assert after.stats.accepted_tokens == fresh.stats.accepted_tokens
    assert after.stats.draft_tokens == fresh.stats.draft_tokens


def test_drafts_stay_with_their_sequence_when_only_some_rows_draft() -> None:
    # vllm#29779: rows 0 and 2 draft, row 1 does not.
    target = ToyTarget()
    server = Server(target, Limits(max_seq_len=CAPACITY, max_batch_size=3), OracleDrafter(target, 4))
    batch = [long_request(0), long_request(1, method=NONE), long_request(2)]
    generations = [server.add(index, request) for index, request in enumerate(batch)]
    check_rest(server, batch, set())
    assert [generation.stats.draft_tokens > 0 for generation in generations] == [True, False, True]
    for generation in generations:
        assert generation.stats.accepted_tokens == generation.stats.draft_tokens


def test_sequences_join_while_others_decode() -> None:
    server, batch = start(slots=4, count=1)
    for first in range(1, 6):
        server.step()
        server.step()
        batch.append(long_request(first, tokens=5 + 3 * first))
        server.add(first, batch[-1])
    check_rest(server, batch, set())


def test_slots_are_filled_as_they_fall_free() -> None:
    server, batch = start(slots=2, count=6)
    largest = 0

    def watch() -> None:
        nonlocal largest
        largest = max(largest, len(server.active))
        assert len(server.running) == 2 or not server.waiting or server.prefilling is None

    server.run(watch)
    assert largest == 2
    check_rest(server, batch, set())


def test_a_sequence_that_ends_with_its_first_token_takes_no_decode_step() -> None:
    target = ToyTarget()
    server = Server(target, Limits(max_seq_len=CAPACITY, max_batch_size=1))
    generations = [server.add(i, long_request(i, tokens=1)) for i in range(3)]
    assert server.step() == generations
    assert server.running == []
    assert target.widths == [6, 6, 6]
    assert all(generation.stats.steps == 0 for generation in generations)


def test_a_step_reports_each_sequence_that_got_tokens() -> None:
    server, _ = start(slots=2, count=3, chunk=4)
    generations = server.waiting
    assert server.step() == []
    assert server.step() == [generations[0]]
    assert server.step() == [generations[0]]
    progressed = server.step()
    assert set(progressed) == {generations[0], generations[1]}
    assert len(progressed) == 2


def prompt_of(tokens: int) -> Request:
    return Request(tuple([1, 2, 0, 3] * tokens)[:tokens], SamplingParams(max_new_tokens=3), NONE)


def test_short_prompts_of_one_step_share_a_chunk() -> None:
    server = Server(ToyTarget(), Limits(max_seq_len=CAPACITY, max_batch_size=8, prefill_chunk=8))
    generations = [server.add(index, prompt_of(3)) for index in range(5)]
    assert server.step() == generations[:2]
    assert set(server.step()) == {*generations[:4]}
    assert generations[4] in server.step()


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one_at_most() -> None:
    server = Server(ToyTarget(), Limits(max_seq_len=CAPACITY, max_batch_size=4, prefill_chunk=4))
    long = server.add(0, prompt_of(20))
    server.step()
    server.step()
    short = server.add(1, prompt_of(4))
    assert server.step() == [short]
    assert long.sequence.cached == 8
    server.run()


def test_short_prompts_do_not_starve_a_long_one() -> None:
    server = Server(ToyTarget(), Limits(max_seq_len=CAPACITY, max_batch_size=4, prefill_chunk=4))
    long = server.add(0, prompt_of(20))
    steps = 0
    while long.first_token_at is None:
        server.add(steps + 1, prompt_of(4))
        server.step()
        steps += 1
    assert steps <= 10
    server.run()


def test_a_long_prompt_is_not_passed_by_later_ones_when_it_may_start() -> None:
    server = Server(ToyTarget(), Limits(max_seq_len=CAPACITY, max_batch_size=1, prefill_chunk=4))
    first, long, later = (server.add(index, prompt_of(tokens)) for index, tokens in enumerate((2, 9, 2)))
    server.run()
    assert first.first_token_at is not None and long.first_token_at is not None and later.first_token_at is not None
    assert first.first_token_at < long.first_token_at < later.first_token_at


def test_a_long_prompt_moves_into_line_when_it_is_through() -> None:
    server = Server(ToyTarget(), Limits(max_seq_len=CAPACITY, max_batch_size=5, prefill_chunk=4))
    long = server.add(0, prompt_of(10))
    server.add(1, Request((1, 2), SamplingParams(max_new_tokens=20), NONE))
    while long.first_token_at is None:
        server.step()
    assert [generation.sequence.index for generation in server.active] == [1, 0]
    server.run()
    assert server.streamed[0] == reference(server.target, prompt_of(10), CAPACITY)


def test_an_idle_scheduler_does_nothing() -> None:
    server = Server(ToyTarget(), Limits(max_seq_len=CAPACITY), NgramDrafter())
    assert not server.scheduler.busy
    assert server.step() == []


def test_a_batch_larger_than_the_slots_with_many_ends() -> None:
    target = ToyTarget(vocab=len(PIECES), surprise=4)
    shuffler = random.Random(5)
    batch = [
        Request(
            tuple(shuffler.choices(range(12), k=shuffler.randint(1, 40))),
            SamplingParams(max_new_tokens=shuffler.randint(1, 40), stop=shuffler.choice([(), ("c",), ("ab", "世")])),
            shuffler.choice([NONE, NGRAM_METHOD]),
            frozenset(shuffler.sample(range(12), k=shuffler.randint(0, 1))),
        )
        for _ in range(40)
    ]
    limits = Limits(max_seq_len=CAPACITY, max_batch_size=5, max_draft_tokens=6, prefill_chunk=7)
    expected = [reference(target, request, CAPACITY) for request in batch]
    assert {found.reason for found in expected} == {"stop", "length", "context"}
    for drafter in (None, OracleDrafter(target, 6), TreeDrafter(target, 3)):
        assert serve(target, limits, batch, drafter) == expected
