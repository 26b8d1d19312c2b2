"""EAGLE in batches: each draft is the official one, and the output the target's, however sequences come and go."""

from __future__ import annotations

import random

import pytest
from draft.toy_head import ToyHead
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import PIECES, Request, ToyTarget, reference
from toy_cases import CAPACITY, new_head
from toy_server import Server, outcome, serve

from trtspec.config import HEAD_WIDTH, Limits, SamplingParams, SpeculationConfig
from trtspec.sequence import CANCELLED

NONE, NGRAM_METHOD = SpeculationConfig(method="none"), SpeculationConfig(method="ngram", ngram_min=1)
CHAIN = SpeculationConfig(method="eagle", eagle_tokens=4)
TREE = SpeculationConfig(method="eagle", eagle_topk=3, eagle_depth=2, tree_nodes=7)
PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)

prompts = st.lists(st.integers(0, 4), min_size=1, max_size=40).map(tuple)
samplings = st.builds(
    SamplingParams,
    max_new_tokens=st.sampled_from([24, 1, 17, 5, 40, 11, 2]),
    stop=st.lists(st.text("abé. ", min_size=2, max_size=4), max_size=1).map(tuple),
    ignore_eos=st.booleans(),
)
speculations = st.one_of(
    st.sampled_from([NONE, NGRAM_METHOD]),
    st.builds(SpeculationConfig, method=st.just("eagle"), eagle_tokens=st.integers(1, 6)),
    st.builds(
        SpeculationConfig,
        method=st.just("eagle"),
        eagle_topk=st.integers(2, 4),
        eagle_depth=st.integers(0, 3),
        tree_nodes=st.integers(1, 9),
    ),
)
requests = st.builds(Request, prompts, samplings, speculations, st.frozensets(st.integers(0, 7), max_size=1))
batches = st.integers(1, 7).flatmap(lambda count: st.lists(requests, min_size=count, max_size=count))
all_limits = st.builds(
    Limits,
    max_seq_len=st.just(CAPACITY),
    max_batch_size=st.integers(1, 4),
    max_draft_tokens=st.integers(0, 9),
    prefill_chunk=st.integers(1, 8),
)


settings_of_a_server = st.builds(
    lambda salt, surprise, stride, max_positions, bucketed: (
        target := ToyTarget(vocab=8, salt=salt, surprise=surprise),
        new_head(target, stride=stride, max_positions=max_positions, bucketed=bucketed),
    ),
    st.integers(0, 10**6),
    st.sampled_from([3, 8, 30]),
    st.sampled_from([1, 2]),
    st.sampled_from([10_000, 30, 9]),
    st.booleans(),
)


@settings(max_examples=80, deadline=None)
@given(settings_of_a_server, all_limits, batches, st.randoms(use_true_random=False))
def test_output_depends_on_neither_batch_nor_order(
    setting: tuple[ToyTarget, ToyHead], limits: Limits, batch: list[Request], shuffler: random.Random
) -> None:
    target, head = setting
    expected = [reference(target, request, CAPACITY) for request in batch]
    assert serve(target, limits, batch, head=head) == expected
    order = list(range(len(batch)))
    shuffler.shuffle(order)
    assert serve(target, limits, [batch[i] for i in order], head=head) == [expected[i] for i in order]
    assert target.last_position <= CAPACITY - 2


@settings(max_examples=60, deadline=None)
@given(
    settings_of_a_server, all_limits, batches, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=4)
)
def test_cancellation_leaves_the_others_alone(
    setting: tuple[ToyTarget, ToyHead], limits: Limits, batch: list[Request], cancellations: list[tuple[int, int]]
) -> None:
    target, head = setting
    server = Server(target, limits, head=head)
    generations = [server.add(index, request) for index, request in enumerate(batch)]
    server.run_cancelling(generations, cancellations)
    for generation, request in zip(generations, batch, strict=True):
        assert generation.head is None
        if generation.sequence.finish_reason != CANCELLED:
            assert outcome(generation, server) == reference(target, request, CAPACITY)


@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_are_accepted_and_save_steps(options: SpeculationConfig) -> None:
    target = ToyTarget(surprise=20)
    server = Server(target, Limits(max_seq_len=200, max_batch_size=1), head=new_head(target))
    generation = server.add(0, Request(PROMPT, SamplingParams(max_new_tokens=100), options))
    server.run()
    metrics = generation.stats.metrics()
    assert outcome(generation, server) == reference(target, Request(PROMPT, SamplingParams(max_new_tokens=100)), 200)
    assert metrics["acceptance_length"] > 1.5
    assert metrics["by_source"]["eagle"]["drafts"] == metrics["drafts"] > 0
    assert metrics["by_source"]["ngram"]["drafts"] == 0
    assert metrics["stage_ms"]["eagle"] > 0


def test_trees_have_siblings_and_are_partly_accepted() -> None:
    target = ToyTarget()
    server = Server(target, Limits(max_seq_len=300, max_batch_size=1), head=new_head(target))
    generation = server.add(0, Request(PROMPT, SamplingParams(max_new_tokens=150), TREE))
    server.run()
    assert server.eagle is not None
    assert sum(not tree.is_chain for tree in server.eagle.trees) > 20
    assert 0.05 < generation.stats.metrics()["draft_acceptance_rate"] < 0.9


def test_stages_are_told_apart() -> None:
    """The time in the head's engines is no verification, and a batch without EAGLE has none."""
    target = ToyTarget()
    head = new_head(target)
    server = Server(target, Limits(max_seq_len=64, max_batch_size=2), head=head)
    plain = server.add(0, Request(PROMPT, SamplingParams(max_new_tokens=9), NGRAM_METHOD))
    server.run()
    assert plain.stats.head_seconds == 0
    assert plain.stats.stage_seconds["eagle"] < 0.1 * sum(plain.stats.stage_seconds.values())
    assert head.passes == []
    drafted = server.add(1, Request(PROMPT, SamplingParams(max_new_tokens=9), CHAIN))
    head.seconds_per_pass = 0.5
    server.run()
    assert drafted.stats.stage_seconds["eagle"] > 0
    assert drafted.stats.head_seconds == pytest.approx(0.5 * len(head.passes))
    # The toy target counts no time in engines.
    assert drafted.stats.stage_seconds["verify"] == 0


def test_sequences_join_and_leave_around_one_that_drafts() -> None:
    target = ToyTarget(vocab=len(PIECES))
    server = Server(target, Limits(max_seq_len=300, max_batch_size=4, prefill_chunk=5), head=new_head(target))
    batch = [Request(PROMPT, SamplingParams(max_new_tokens=200), TREE)]
    server.add(0, batch[0])
    for index in range(1, 16):
        for _ in range(3):
            server.step()
        speculation = (CHAIN, NONE, NGRAM_METHOD, TREE)[index % 4]
        batch.append(Request((*PROMPT, index % 12), SamplingParams(max_new_tokens=3 + 5 * (index % 5)), speculation))
        server.add(index, batch[-1])
    server.run()
    for index, request in enumerate(batch):
        assert server.streamed[index] == reference(target, request, 300)


def test_without_a_head_the_method_drafts_nothing() -> None:
    target = ToyTarget()
    server = Server(target, Limits(max_seq_len=64, max_batch_size=1))
    request = Request(PROMPT, SamplingParams(max_new_tokens=9), CHAIN)
    generation = server.add(0, request)
    server.run()
    assert outcome(generation, server) == reference(target, request, 64)
    assert generation.stats.drafts == 0


def test_a_prompts_rows_are_refreshed_with_its_chunks() -> None:
    """No decode step waits for them, and few features wait for a decode step."""
    target = ToyTarget()
    server = Server(target, Limits(max_seq_len=300, max_batch_size=1, prefill_chunk=64), head=new_head(target))
    prompt = tuple(n % 7 for n in range(200))
    generation = server.add(0, Request(prompt, SamplingParams(max_new_tokens=4), CHAIN))
    for cached in (64, 128, 192):
        server.step()
        assert generation.sequence.cached == cached
        assert generation.head is not None
        assert generation.head.queued <= HEAD_WIDTH
    server.run()
    assert outcome(generation, server) == reference(target, Request(prompt, SamplingParams(max_new_tokens=4)), 300)
