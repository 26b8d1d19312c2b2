"""One sequence at a time: the output is the target's own with every way of drafting, and ends where it should."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import PIECES, Outcome, PieceDecoder, Request, ToyTarget, reference, toy_cache
from toy_drafters import OracleDrafter, TreeDrafter
from toy_server import Server, outcome, serve

from trtspec.config import Limits, SamplingParams, SpeculationConfig
from trtspec.decode.detokenize import TextStream
from trtspec.decode.generation import Generation
from trtspec.decode.step import prompt_logits
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.tree import EMPTY, NGRAM, DraftTree
from trtspec.sequence import CANCELLED, CONTEXT, LENGTH, STOP, Sequence

NGRAM_METHOD = SpeculationConfig(method="ngram")
PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)


def plain_tokens(target: ToyTarget, count: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """What the target says after a prompt, when nothing ends the sequence."""
    request = Request(prompt, SamplingParams(max_new_tokens=count))
    return reference(target, request, len(prompt) + count).tokens


def serve_one(
    target: ToyTarget, request: Request, limits: Limits, drafter: NgramDrafter | None = None
) -> tuple[Outcome, Generation]:
    server = Server(target, limits, drafter)
    generation = server.add(0, request)
    server.run()
    return outcome(generation, server), generation


def numbered(tokens: list[int], max_new_tokens: int = 99, stop: tuple[str, ...] = ()) -> tuple[Generation, int]:
    """A generation with a prompt of one token that was handed these tokens at once; token 0 ends a sequence."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop=stop)
    sequence = Sequence.start(0, [1], 40, sampling, SpeculationConfig())
    generation = Generation(sequence, TextStream(PieceDecoder(frozenset({0})), stop), frozenset({0}))
    return generation, generation.extend(tokens)


targets = st.builds(
    ToyTarget, vocab=st.integers(2, len(PIECES)), salt=st.integers(0, 10**6), surprise=st.sampled_from([3, 6, 20, 1000])
)
ngrams = st.builds(
    lambda ngram_min, more, ngram_tokens, occurrence: SpeculationConfig(
        method="ngram",
        ngram_min=ngram_min,
        ngram_max=ngram_min + more,
        ngram_tokens=ngram_tokens,
        ngram_occurrence=occurrence,
    ),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 10),
    st.sampled_from(["earliest", "latest"]),
)
samplings = st.builds(
    SamplingParams,
    max_new_tokens=st.sampled_from([40, 30, 23, 17, 9, 5, 2, 1]),
    stop=st.lists(st.text("abcdé. ", min_size=1, max_size=4), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(
    targets,
    st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple),
    samplings,
    ngrams,
    st.sampled_from([frozenset(), frozenset({5}), frozenset({0, 9}), frozenset({1}), frozenset({11})]),
    st.integers(0, 6),
    st.integers(1, 8),
    st.sampled_from([50, 39, 22, 13, 7, 4, 1, 0]),
)
def test_output_does_not_depend_on_the_drafter(
    target: ToyTarget,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    ngram: SpeculationConfig,
    eos: frozenset[int],
    max_draft_tokens: int,
    prefill_chunk: int,
    spare: int,
) -> None:
    # vllm#40875, #41758: the output must not depend on the n-gram settings.
    limits = Limits(
        max_seq_len=len(prompt) + 1 + spare,
        max_batch_size=1,
        max_draft_tokens=max_draft_tokens,
        prefill_chunk=prefill_chunk,
    )
    plain = Request(prompt, sampling, eos=eos)
    expected = reference(target, plain, limits.max_seq_len)
    drafted = Request(prompt, sampling, ngram, eos)
    assert serve_one(target, plain, limits)[0] == expected
    assert serve_one(target, drafted, limits)[0] == expected
    trees = TreeDrafter(target, seed=spare, favourites=sorted(token for token in eos if token < target.vocab))
    assert serve_one(target, drafted, limits, trees)[0] == expected
    assert serve_one(target, drafted, limits, OracleDrafter(target, 5))[0] == expected
    assert target.last_position <= limits.max_seq_len - 2
    assert max(target.widths) <= max(limits.max_width, prefill_chunk)


@settings(max_examples=60, deadline=None)
@given(targets, st.integers(0, 10**6), st.sampled_from([0.3, 0.7, 0.95]), st.integers(1, 12))
def test_random_trees_give_the_same_tokens(target: ToyTarget, seed: int, skill: float, max_draft_tokens: int) -> None:
    limits = Limits(max_seq_len=70, max_batch_size=1, max_draft_tokens=max_draft_tokens)
    request = Request((0, 1, 0), SamplingParams(max_new_tokens=50), NGRAM_METHOD)
    drafter = TreeDrafter(target, seed, skill)
    found, generation = serve_one(target, request, limits, drafter)
    assert found == reference(target, request, 70)
    counts = generation.stats
    assert counts.drafts == len(drafter.trees)
    assert counts.draft_tokens == sum(tree.size for tree in drafter.trees)
    assert counts.emitted_tokens == 49
    assert counts.accepted_tokens == counts.emitted_tokens - counts.steps


def test_the_trees_of_these_tests_have_siblings_and_are_partly_accepted() -> None:
    target = ToyTarget()
    drafter = TreeDrafter(target, seed=1)
    request = Request(PROMPT, SamplingParams(max_new_tokens=200), NGRAM_METHOD)
    _, generation = serve_one(target, request, Limits(max_seq_len=300, max_batch_size=1, max_draft_tokens=8), drafter)
    assert sum(not tree.is_chain for tree in drafter.trees) > 20
    assert 0.1 < generation.stats.metrics()["draft_acceptance_rate"] < 0.9
    assert generation.stats.steps < 150


def test_ngram_drafts_are_accepted_and_save_steps() -> None:
    target = ToyTarget(surprise=20)
    request = Request(PROMPT, SamplingParams(max_new_tokens=100), NGRAM_METHOD)
    _, generation = serve_one(target, request, Limits(max_seq_len=200, max_batch_size=1))
    metrics = generation.stats.metrics()
    assert metrics["emitted_tokens"] == 99
    assert metrics["acceptance_length"] > 1.5
    assert metrics["steps"] + metrics["accepted_tokens"] == 99


def test_a_perfect_drafter_is_accepted_whole() -> None:
    target = ToyTarget()
    request = Request(PROMPT, SamplingParams(max_new_tokens=41), NGRAM_METHOD)
    _, generation = serve_one(target, request, Limits(max_seq_len=100, max_batch_size=1), OracleDrafter(target, 4))
    metrics = generation.stats.metrics()
    assert metrics["steps"] == 8
    assert metrics["acceptance_length"] == 5
    assert metrics["draft_acceptance_rate"] == metrics["match_rate"] == metrics["system_efficiency"] == 1
    assert metrics["acceptance_per_position"] == [1, 1, 1, 1]


@pytest.mark.parametrize("chunk", range(1, 9))
def test_prefill_in_chunks(chunk: int) -> None:
    target = ToyTarget(surprise=2)
    limits = Limits(max_seq_len=40, max_batch_size=1, prefill_chunk=chunk)
    prompt = tuple(np.random.default_rng(chunk).integers(0, 11, size=17).tolist())
    request = Request(prompt, SamplingParams(max_new_tokens=1))
    assert serve_one(target, request, limits)[0] == reference(target, request, 40)
    assert target.widths == [chunk] * (17 // chunk) + ([17 % chunk] if 17 % chunk else [])

    sequence = Sequence.start(0, prompt, 40, SamplingParams(), SpeculationConfig())
    logits = prompt_logits(sequence, target, toy_cache(limits).view(0, 1), chunk)
    assert logits.shape == (11,)
    assert int(logits.argmax()) == target.next_token(prompt)


# How a sequence ends


def test_a_stop_string_before_the_length_limit_in_one_step() -> None:
    # sglang#31599: outputs [10, 11, STOP, 20, 21, 22], at most 5 new tokens, 6 accepted: must end at 3.
    stop = PIECES.index("c")
    generation, kept = numbered([10, 11, stop, 8, 9, 10], max_new_tokens=5, stop=("c",))
    assert kept == 3
    assert generation.sequence.finish_reason == STOP
    assert generation.take() == (PIECES[10] + PIECES[11], [10, 11, stop])


def test_the_end_of_sequence_before_the_length_limit_in_one_step() -> None:
    generation, kept = numbered([10, 11, 0, 8, 9, 10], max_new_tokens=5)
    assert kept == 3
    assert generation.sequence.finish_reason == STOP
    assert generation.take() == (PIECES[10] + PIECES[11], [10, 11, 0])


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_the_length_limit_before_the_end_of_sequence(stop: tuple[str, ...]) -> None:
    generation, kept = numbered([10, 11, 8, 0], max_new_tokens=3, stop=stop)
    assert kept == 3
    assert generation.sequence.finish_reason == LENGTH
    assert generation.take() == (PIECES[10] + PIECES[11] + PIECES[8], [10, 11, 8])


@pytest.mark.parametrize(
    ("tokens", "stop"), [([10, 11, 0], ()), ([10, 11, PIECES.index("c")], ("c",)), ([10, 3, 1], (". b",))]
)
def test_stop_wins_when_the_last_token_allowed_is_also_a_stop(tokens: list[int], stop: tuple[str, ...]) -> None:
    generation, kept = numbered([*tokens, 5], max_new_tokens=3, stop=stop)
    assert (kept, generation.sequence.finish_reason) == (3, STOP)


def test_stop_wins_over_the_end_of_the_context() -> None:
    for tokens, reason in (([4] * 38 + [0], STOP), ([4] * 39, CONTEXT)):
        generation, kept = numbered([*tokens, 4])
        assert (kept, generation.sequence.finish_reason) == (39, reason)
        assert generation.sequence.length == generation.sequence.capacity


def test_an_unfinished_stop_string_is_text() -> None:
    generation, _ = numbered([1, 3], max_new_tokens=2, stop=(". x",))
    assert generation.take() == ("b. ", [1, 3])


@pytest.mark.parametrize("stop", [(), ("zz",)])
@pytest.mark.parametrize("special", [frozenset(), frozenset({4})])
def test_the_end_of_sequence_token_has_no_text(stop: tuple[str, ...], special: frozenset[int]) -> None:
    # Some checkpoints name end-of-sequence tokens that their tokenizer does not hold for special.
    sequence = Sequence.start(0, [1], 40, SamplingParams(stop=stop), SpeculationConfig())
    generation = Generation(sequence, TextStream(PieceDecoder(special), stop), frozenset({4}))
    generation.extend([10])
    generation.extend([11, 4, 8])
    assert generation.take() == (PIECES[10] + PIECES[11], [10, 11, 4])


def first_appearance(tokens: list[int], earliest: int) -> int:
    """Where, from a position on, a token appears that was not there before."""
    return next(i for i in range(earliest, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize("num_tokens", [3, 8, 30])
def test_nothing_behind_an_end_of_sequence_inside_an_accepted_draft(num_tokens: int) -> None:
    # transformers#47912, koboldcpp#1276: a drafter that is right beyond the end of the sequence.
    target = ToyTarget(surprise=2)
    tokens = plain_tokens(target, 40)
    end = first_appearance(tokens, 5)
    request = Request(PROMPT, SamplingParams(max_new_tokens=40), NGRAM_METHOD, frozenset({tokens[end]}))
    drafter = OracleDrafter(target, num_tokens)
    found, generation = serve_one(target, request, Limits(max_seq_len=64, max_batch_size=1), drafter)
    assert found == Outcome(tokens[: end + 1], "".join(PIECES[token] for token in tokens[:end]), STOP)
    assert drafter.trees[-1].size == num_tokens
    assert end % (num_tokens + 1) != 0, "the end is not inside a draft"
    assert generation.stats.emitted_tokens == end
    assert generation.stats.accepted_tokens == end - end // (num_tokens + 1)


@pytest.mark.parametrize("num_tokens", [3, 8, 30])
def test_nothing_behind_a_stop_string_inside_an_accepted_draft(num_tokens: int) -> None:
    target = ToyTarget(surprise=2)
    tokens = plain_tokens(target, 40)
    end = first_appearance(tokens, 5)
    text = "".join(PIECES[token] for token in tokens[: end + 1])
    stop = text[-3:]
    request = Request(PROMPT, SamplingParams(max_new_tokens=40, stop=(stop,)), NGRAM_METHOD)
    drafter = OracleDrafter(target, num_tokens)
    found, generation = serve_one(target, request, Limits(max_seq_len=64, max_batch_size=1), drafter)
    assert found == reference(target, request, 64)
    assert found.reason == STOP
    assert stop not in found.text
    assert generation.stats.emitted_tokens == len(found.tokens) - 1


class EagerToEnd(NgramDrafter):
    """Always proposes the end of the sequence, then more."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.calls = 0

    def draft(self, sequence: Sequence, room: int) -> DraftTree:
        self.calls += 1
        return DraftTree.chain(np.array([self.token, 1, 2][:room]), NGRAM) if room else EMPTY


def test_a_drafted_end_of_sequence_that_the_target_rejects_does_not_end_it() -> None:
    # openvino.genai#3293
    target = ToyTarget()
    tokens = plain_tokens(target, 20)
    never = next(token for token in range(11) if token not in tokens)
    drafter = EagerToEnd(never)
    request = Request(PROMPT, SamplingParams(max_new_tokens=20), NGRAM_METHOD, frozenset({never}))
    found, generation = serve_one(target, request, Limits(max_seq_len=64, max_batch_size=1), drafter)
    assert (found.tokens, found.reason) == (tokens, LENGTH)
    assert drafter.calls >= 18
    assert generation.stats.accepted_tokens == 0
    assert generation.stats.draft_tokens > 50


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_without_any_end_of_sequence_token(method: str) -> None:
    # transformers#46790
    target = ToyTarget()
    request = Request((5, 6, 7, 8, 9, 10, 7, 8), SamplingParams(max_new_tokens=25), SpeculationConfig(method=method))
    found, _ = serve_one(target, request, Limits(max_seq_len=64, max_batch_size=1))
    assert found.reason == LENGTH
    assert found.tokens == plain_tokens(target, 25, request.prompt)


@pytest.mark.parametrize("max_seq_len", range(9, 16))
def test_no_draft_past_the_context(max_seq_len: int) -> None:
    # vllm#42533: length = max - 2, five draft tokens.
    target = ToyTarget()
    drafter = OracleDrafter(target, 99)
    request = Request(PROMPT, SamplingParams(max_new_tokens=50), NGRAM_METHOD)
    limits = Limits(max_seq_len=max_seq_len, max_batch_size=1, max_draft_tokens=5)
    found, generation = serve_one(target, request, limits, drafter)
    assert found == reference(target, request, max_seq_len)
    assert found.reason == CONTEXT
    assert len(found.tokens) == max_seq_len - len(PROMPT)
    assert generation.sequence.length == max_seq_len
    assert target.last_position <= max_seq_len - 2
    assert all(tree.size <= 5 for tree in drafter.trees)
    # Every draft leaves room for the bonus token, so a perfect drafter loses nothing to trimming.
    assert generation.stats.accepted_tokens == generation.stats.draft_tokens


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_no_draft_past_the_length_limit(max_new_tokens: int) -> None:
    target = ToyTarget()
    drafter = OracleDrafter(target, 4)
    request = Request(PROMPT, SamplingParams(max_new_tokens=max_new_tokens), NGRAM_METHOD)
    found, generation = serve_one(target, request, Limits(max_seq_len=64, max_batch_size=1), drafter)
    assert found == reference(target, request, 64)
    assert generation.stats.accepted_tokens == generation.stats.draft_tokens


def test_without_room_for_drafts_every_step_is_plain() -> None:
    target = ToyTarget()
    request = Request(PROMPT, SamplingParams(max_new_tokens=20), NGRAM_METHOD)
    limits = Limits(max_seq_len=64, max_batch_size=1, max_draft_tokens=0)
    found, generation = serve_one(target, request, limits)
    assert found.tokens == plain_tokens(target, 20)
    assert (generation.stats.steps, generation.stats.drafts) == (19, 0)
    assert target.widths == [len(PROMPT)] + [1] * 19


def test_tokens_and_text_are_handed_out_once() -> None:
    generation, _ = numbered([5, 6])
    assert generation.take() == (PIECES[5] + PIECES[6], [5, 6])
    assert generation.take() == ("", [])
    generation.extend([7])
    assert generation.take() == (PIECES[7], [7])


def test_cancellation_releases_the_held_text() -> None:
    generation, _ = numbered([2, 3], stop=(". x",))
    assert generation.take() == ("ab", [2, 3])
    generation.end(CANCELLED)
    assert generation.finished
    assert generation.take() == (". ", [])


def test_stage_times_are_shared_and_never_negative() -> None:
    target = ToyTarget()
    server = Server(target, Limits(max_seq_len=64, max_batch_size=3))
    generations = [server.add(i, Request(PROMPT, SamplingParams(max_new_tokens=9), NGRAM_METHOD)) for i in range(3)]
    server.run()
    for generation in generations:
        assert all(seconds >= 0 for seconds in generation.stats.stage_seconds.values())
        assert generation.stats.stage_seconds["prefill"] > 0
        assert generation.first_token_at is not None
        assert generation.ended_at is not None
        assert generation.started <= generation.first_token_at <= generation.ended_at


def test_the_toy_target_notices_what_it_must_notice() -> None:
    # Were this target blind to some part of the path, the tests here would prove less than they say.
    target, changed = ToyTarget(surprise=2), 0
    paths = [list(path) for path in itertools.product(range(3), repeat=5)]
    for path in paths:
        changed += target.next_token(path) != target.next_token([path[0] ^ 1, *path[1:]])
    assert changed > len(paths) / 4
    assert [outcome.tokens for outcome in serve(target, Limits(max_seq_len=30), [Request((0, 1))])] == [
        plain_tokens(target, 28, (0, 1))
    ]
