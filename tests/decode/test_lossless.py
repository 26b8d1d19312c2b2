"""Whatever is drafted, merged, sampled or served beside it: a request gets what plain decoding gives it alone.

Targets compute with whole numbers, so nothing but an error can make a difference (vllm#41758: greedy text that differs
with n-gram on). All methods and merges, greedy and sampled requests with seeds of their own share the batches.
"""

from __future__ import annotations

import random

from hypothesis import event, given, settings
from hypothesis import strategies as st
from toy import Request, reference
from toy_cases import CAPACITY, Setting, batches, requests, settings_of_a_server
from toy_drafters import OracleDrafter, TreeDrafter
from toy_server import Server, outcome, serve

from trtspec.sequence import CANCELLED


@settings(max_examples=120, deadline=None)
@given(settings_of_a_server(), batches, st.randoms(use_true_random=False))
def test_output_depends_on_neither_drafts_nor_batch_nor_order(
    setting: Setting, batch: list[Request], shuffler: random.Random
) -> None:
    # vllm#6038, #9441, #11123: seeds mixed with greedy rows, in any order.
    target, head, limits, seed = setting
    expected = [reference(target, request, CAPACITY) for request in batch]
    assert serve(target, limits, batch, None, head, setting.policy()) == expected
    drafter = TreeDrafter(target, seed)
    order = list(range(len(batch)))
    shuffler.shuffle(order)
    shuffled = serve(target, limits, [batch[i] for i in order], drafter, head, setting.policy())
    assert shuffled == [expected[i] for i in order]
    assert target.last_position <= CAPACITY - 2


@settings(max_examples=100, deadline=None)
@given(
    settings_of_a_server(),
    st.lists(st.tuples(requests, st.integers(0, 5)), min_size=1, max_size=7),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=3),
    st.sampled_from(["lookup", "trees", "oracle"]),
)
def test_joining_leaving_and_cancelling_changes_no_other_output(
    setting: Setting, arrivals: list[tuple[Request, int]], cancellations: list[tuple[int, int]], kind: str
) -> None:
    target, head, limits, seed = setting
    drafter = {"lookup": None, "trees": TreeDrafter(target, seed), "oracle": OracleDrafter(target, 3)}[kind]
    server = Server(target, limits, drafter, head, setting.policy())
    generations = []
    for request, steps in arrivals:
        generations.append(server.add(len(generations), request))
        for _ in range(steps):
            server.step()
    server.run_cancelling(generations, cancellations)
    for generation, (request, _) in zip(generations, arrivals, strict=True):
        expected = reference(target, request, CAPACITY)
        if generation.sequence.finish_reason != CANCELLED:
            assert outcome(generation, server) == expected
        else:
            server.collect(generation)
            tokens = outcome(generation, server).tokens
            assert tokens == expected.tokens[: len(tokens)]
        for merge, used in server.drafters.kinds:
            event(f"{merge}: {('plain', 'n-gram only', 'EAGLE only', 'both')[used]}")
