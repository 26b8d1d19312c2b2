"""Sampling parameters, seeds and log-probabilities with drafts are those of decoding one token at a time."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from draft.toy_head import ToyHead
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Request, ToyTarget, chosen, reference
from toy_cases import CAPACITY, Setting, batches, new_head, settings_of_a_server
from toy_checks import FicklePolicy
from toy_drafters import OracleDrafter, TreeDrafter
from toy_server import Server, outcome, serve

from trtspec.config import MERGES, Limits, SamplingParams, SpeculationConfig
from trtspec.decode.generation import Generation
from trtspec.draft.ngram import NgramDrafter
from trtspec.engine.draft_head import RowNoise
from trtspec.sampling import TokenLogprob
from trtspec.sequence import Sequence

PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)
NONE, NGRAM_METHOD = SpeculationConfig(method="none"), SpeculationConfig(method="ngram", ngram_min=1)
METHODS = [
    NONE,
    NGRAM_METHOD,
    SpeculationConfig(method="eagle"),
    SpeculationConfig(method="eagle", eagle_topk=3),
    *(SpeculationConfig(method="ngram-eagle", merge=merge, ngram_min=1, hybrid_ngram_min=2) for merge in MERGES),
]
LIMITS = Limits(max_seq_len=120, max_batch_size=3, max_draft_tokens=8)


def new_target(salt: int = 0, **options: int) -> ToyTarget:
    return ToyTarget(vocab=8, salt=salt, **{"levels": 5, "peak": 2, "surprise": 8, **options})  # type: ignore[arg-type]


def serve_one(
    target: ToyTarget, request: Request, drafter: NgramDrafter | None = None, head: ToyHead | None = None
) -> Generation:
    """A finished sequence, whose output is the target's own."""
    policy = FicklePolicy(target.salt, LIMITS, target.buckets)
    server = Server(target, LIMITS, drafter, head or new_head(target), policy)
    generation = server.add(0, request)
    server.run()
    assert outcome(generation, server) == reference(target, request, LIMITS.max_seq_len)
    return generation


def logprobs_behind(
    target: ToyTarget, path: list[int], token: int, count: int
) -> tuple[float, list[tuple[int, float]]]:
    """The token's log-probability, and the `count` most probable tokens with theirs."""
    logits = target.logits_behind(path)
    total = math.log(math.fsum(map(math.exp, logits)))
    best = sorted(range(target.vocab), key=lambda one: (-logits[one], one))[:count]
    return logits[token] - total, [(one, logits[one] - total) for one in best]


@settings(max_examples=40, deadline=None)
@given(settings_of_a_server(), batches, st.integers(0, 4))
def test_logprobs_with_drafts_are_those_without(setting: Setting, batch: list[Request], count: int) -> None:
    """vllm#17876, llama.cpp#27972: missing, or 0, with speculation.

    They are the target's own, whatever penalties and filters made of them.
    """
    target, head, limits, seed = setting
    batch = [replace(request, sampling=replace(request.sampling, logprobs=count)) for request in batch]
    server = Server(target, limits, TreeDrafter(target, seed), head, setting.policy())
    generations = [server.add(index, request) for index, request in enumerate(batch)]
    server.run()
    for generation, request in zip(generations, batch, strict=True):
        path, found = list(request.prompt), generation.logprobs
        tokens = reference(target, request, CAPACITY).tokens
        assert [each.token_id for each in found] == tokens
        for each, token in zip(found, tokens, strict=True):
            logprob, top = logprobs_behind(target, path, token, count)
            assert each.logprob == pytest.approx(logprob, abs=1e-6)
            assert [token for token, _ in each.top] == [token for token, _ in top]
            assert [value for _, value in each.top] == pytest.approx([value for _, value in top], abs=1e-6)
            path.append(token)


def test_logprobs_do_not_depend_on_the_method() -> None:
    sampling = SamplingParams(max_new_tokens=60, temperature=0.9, seed=3, frequency_penalty=0.3, logprobs=3)
    found: list[list[TokenLogprob]] = [
        serve_one(new_target(), Request(PROMPT, sampling, options)).logprobs for options in METHODS
    ]
    assert all(logprobs == found[0] for logprobs in found)
    assert len(found[0]) == 60
    assert all(each.logprob < 0 for each in found[0])
    assert serve_one(new_target(), Request(PROMPT, SamplingParams(max_new_tokens=5), METHODS[-1])).logprobs == []


class Careless(OracleDrafter):
    """Proposes what the target would choose, were some parameters other than they are."""

    def __init__(self, target: ToyTarget, num_tokens: int, **changes: float) -> None:
        super().__init__(target, num_tokens)
        self._changes = changes
        self.wrong = 0

    def _future(self, sequence: Sequence, room: int) -> np.ndarray:
        path, careless = sequence.history.tolist(), replace(sequence.sampling, **self._changes)
        for _ in range(min(room, self._num_tokens)):
            token = chosen(self._target, path, sequence.prompt_length, careless)
            self.wrong += token != chosen(self._target, path, sequence.prompt_length, sequence.sampling)
            path.append(token)
        return np.array(path[sequence.length :], dtype=np.int32)


@pytest.mark.parametrize(
    ("filters", "off"),
    [
        ({"min_p": 0.5}, {"min_p": 0.0}),
        ({"top_p": 0.61}, {"top_p": 1.0}),
        ({"top_k": 2}, {"top_k": 0}),
        ({}, {"temperature": 4.0}),
        ({}, {"seed": 8}),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [NGRAM_METHOD, *METHODS[-3:]], ids=["ngram", *MERGES])
def test_a_drafted_token_that_a_filter_removes_is_rejected(
    filters: dict[str, float], off: dict[str, float], options: SpeculationConfig
) -> None:
    """vllm#42802: min_p must hold in every verified row, not in the bonus token's alone; so must all parameters."""
    wrong = rejected = 0
    for seed in range(4):
        target = new_target(salt=seed, peak=0, levels=3)
        sampling = SamplingParams(max_new_tokens=50, temperature=1.0, seed=seed, **filters)
        drafter = Careless(target, 4, **off)
        counts = serve_one(target, Request(PROMPT, sampling, options), drafter).stats.by_source["ngram"]
        wrong += drafter.wrong
        rejected += counts.draft_tokens - counts.accepted_tokens
    assert wrong > 20
    assert rejected > 5


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 3.0},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"repetition_penalty": 0.7, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_penalties_with_repeats_in_the_draft(penalties: dict[str, float], temperature: float) -> None:
    """TensorRT-LLM#17701, sglang#33643, vllm#33251: each drafted token counts for those behind it, once, if accepted.

    A perfect drafter is accepted whole only if rows are penalised as if their path were committed already; one that
    ignores the penalties is not.
    """
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    sampling = SamplingParams(max_new_tokens=60, temperature=temperature, seed=11, **penalties)
    changed = repeated = wrong = 0
    for salt in range(4):
        target = new_target(salt, peak=1, levels=4)
        request, unpenalised = Request(PROMPT, sampling, NGRAM_METHOD), Request(PROMPT, replace(sampling, **off))
        changed += reference(target, request, 120) != reference(target, unpenalised, 120)
        drafter = OracleDrafter(target, 8)
        stats = serve_one(target, request, drafter).stats
        assert stats.accepted_tokens == stats.draft_tokens > 45
        repeated += sum(len(set(tree.tokens.tolist())) < tree.size for tree in drafter.trees)
        careless = Careless(target, 8, **off)
        for options in METHODS:
            serve_one(target, Request(PROMPT, sampling, options), careless)
        wrong += careless.wrong
    assert changed > 0
    assert repeated > 20
    assert wrong > 20


@pytest.mark.parametrize("options", METHODS, ids=lambda options: f"{options.method}-{options.merge}")
def test_seeds_beside_greedy_rows_in_any_order(options: SpeculationConfig) -> None:
    # vllm#6038, #11123, #9441
    target = new_target(peak=0)
    samplings = [
        SamplingParams(max_new_tokens=30, temperature=1.0, seed=5),
        SamplingParams(max_new_tokens=30),
        SamplingParams(max_new_tokens=30, temperature=1.0, seed=6),
        SamplingParams(max_new_tokens=30, temperature=1.0, seed=5),
        SamplingParams(max_new_tokens=30, frequency_penalty=0.5),
        SamplingParams(max_new_tokens=30, temperature=1.0, top_k=1, seed=7),
    ]
    batch = [Request(PROMPT, sampling, options) for sampling in samplings]
    expected = [reference(target, request, LIMITS.max_seq_len) for request in batch]
    for seed in range(4):
        order = random.Random(seed).sample(range(len(batch)), len(batch))
        policy = FicklePolicy(seed, LIMITS, target.buckets)
        found = serve(target, LIMITS, [batch[i] for i in order], None, new_head(target), policy)
        assert found == [expected[i] for i in order]
    assert expected[0] == expected[3] != expected[2]
    assert expected[1] == expected[5] != expected[4]
    assert len({tuple(each.tokens) for each in expected}) == 4


class KnowingHead(ToyHead):
    """Its logits are those of a target that reads nothing but the last two tokens."""

    def __init__(self, target: ToyTarget) -> None:
        super().__init__(target.vocab, stride=1)
        self.target = target

    def ranking(self, checksum: int, noise: RowNoise | None = None) -> list[tuple[int, float]]:
        logits = np.array(self.target.logits_behind(self._seen[checksum]))[self.ids]
        scores = (logits if noise is None else logits / noise.temperature + noise.values[self.ids]).tolist()
        order = sorted(range(len(scores)), key=lambda row: (-scores[row], int(self.ids[row])))
        return [(int(self.ids[row]), scores[row] - max(scores)) for row in order]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 3.0])
def test_a_head_that_drafts_with_the_targets_noise_may_be_right_at_any_temperature(temperature: float) -> None:
    """The noise of a drafted token is that of its position, from the first draft on and whatever was accepted."""
    target = new_target(surprise=2**60, peak=0)
    sampling = SamplingParams(max_new_tokens=81, temperature=temperature, seed=3)
    options = SpeculationConfig(method="eagle", eagle_tokens=3)
    stats = serve_one(target, Request(PROMPT, sampling, options), head=KnowingHead(target)).stats
    assert stats.accepted_tokens == stats.draft_tokens == 60
    tree = SpeculationConfig(method="eagle", eagle_topk=2, eagle_depth=2, tree_nodes=6)
    stats = serve_one(target, Request(PROMPT, sampling, tree), head=KnowingHead(target)).stats
    assert stats.metrics()["acceptance_length"] > 3
