"""Many short sampled sequences are distributed as the target's probabilities say, whatever drafts them."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling.oracle import penalised, probabilities
from toy import PieceDecoder
from toy_checks import FicklePolicy

from trtspec.config import AUTO, MERGES, Limits, SamplingParams, SpeculationConfig
from trtspec.decode.detokenize import TextStream
from trtspec.decode.generation import Generation
from trtspec.decode.stats import Stats
from trtspec.decode.step import decode_step
from trtspec.draft.eagle import EagleDrafter
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.proposer import Drafters
from trtspec.engine.base import Buckets, CacheView
from trtspec.engine.draft_head import DraftHeadRunner, HeadOutput, Noise
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.target import Pass, Rows, Target
from trtspec.sampling import top_k
from trtspec.sequence import Sequence

VOCAB, LENGTH, SLOTS = 5, 3, 256
SEQUENCES = int(os.environ.get("TRTSPEC_TEST_SEQUENCES", "60000"))
"""Each merge decodes so many; 200000 take three times as long and see a bias of half the size."""
PROMPT_LENGTH = 6
LIMITS = Limits(max_seq_len=PROMPT_LENGTH + LENGTH + 1, max_batch_size=SLOTS, max_draft_tokens=5)
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.3}
CASES = [
    ((0, 1, 2, 0, 3, 1), SamplingParams(max_new_tokens=LENGTH, temperature=0.9)),
    ((0, 3, 1, 2, 3, 1), SamplingParams(max_new_tokens=LENGTH, temperature=1.1)),
    ((0, 1, 2, 0, 3, 1), SamplingParams(max_new_tokens=LENGTH, temperature=0.9, top_p=0.93, **PENALTIES)),
]
"""Prompts and sampling parameters, which sequences have in turn. The second prompt's last two tokens are repeated, so
that `exclusive` begins with a lookup."""
TURNS = (0, 1, 0, 1, 0, 1, 0, 2)
"""The cases of sequences one after the other. Penalties and top-p take most of the time, so few have them."""
METHODS = {
    merge: SpeculationConfig(method="ngram-eagle", merge=merge, ngram_min=1, hybrid_ngram_min=2, eagle_tokens=2)
    for merge in MERGES
}


def random_table(seed: int) -> np.ndarray:
    """Logits behind a token at a position, float32 `[positions, vocab, vocab]`."""
    values = np.random.default_rng(seed).integers(-12, 13, (LIMITS.max_seq_len, VOCAB, VOCAB))
    return (values / 8).astype(np.float32)


TARGET_TABLE = random_table(0)
HEAD_TABLE = TARGET_TABLE + random_table(1) / 4


def chi_squared_tail(statistic: float, freedom: int) -> float:
    """The chance that a chi-squared variable exceeds `statistic`."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


class TableTarget(Target):
    """Its logits depend on a row's token and position."""

    def __init__(self) -> None:
        self.buckets = Buckets()
        self.engine_seconds = 0.0
        self.passes = 0

    def forward(self, rows: Rows, cache: CacheView) -> Pass:
        self.passes += 1
        hidden = torch.stack([rows.positions, rows.tokens.long()], dim=2)
        return Pass(hidden, hidden)

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        positions, tokens = hidden_rows.numpy().T
        return torch.from_numpy(TARGET_TABLE[positions, tokens])


class Config:
    """The fields of a DraftHeadConfig that drafting reads."""

    max_position_embeddings = 1000
    draft_vocab_size = VOCAB


class TableHead(DraftHeadRunner):
    """Its logits depend on a row's token and on the position of the target's feature in front of it."""

    def __init__(self) -> None:
        self.buckets = Buckets()
        self.engine_seconds = 0.0
        self.config = Config()  # type: ignore[assignment]

    def first_hidden(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def forward(self, rows: Rows, hidden: torch.Tensor, cache: CacheView) -> HeadOutput:
        # The token stands behind that of the features.
        output = torch.stack([hidden[:, :, 0] + 1, rows.tokens.long()], dim=2)
        return HeadOutput(output, output)

    def best_tokens(self, hidden_rows: torch.Tensor, noise: Noise = ()) -> np.ndarray:
        return self._logits(hidden_rows, noise).argmax(axis=1)

    def top_tokens(self, hidden_rows: torch.Tensor, count: int, noise: Noise = ()) -> tuple[np.ndarray, np.ndarray]:
        return top_k(torch.from_numpy(self._logits(hidden_rows, noise)), count)

    def _logits(self, hidden_rows: torch.Tensor, noise: Noise) -> np.ndarray:
        positions, tokens = hidden_rows.numpy().T
        logits = HEAD_TABLE[positions, tokens]
        if noise:
            temperatures = [1.0 if own is None else own.temperature for own in noise]
            added = [np.zeros(VOCAB) if own is None else own.values for own in noise]
            logits = logits / np.array(temperatures)[:, None] + np.array(added)
        return logits.astype(np.float32)


def new_cache(dtype: torch.dtype) -> KVCache:
    return KVCache(
        num_layers=1,
        slots=SLOTS,
        num_kv_heads=1,
        rows=LIMITS.head_cache_rows,
        head_dim=1,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def begin(slot: int, seed: int, options: SpeculationConfig, drafters: Drafters) -> Generation:
    """A sequence whose last prompt token is the root: all of its tokens come from decode steps."""
    prompt, sampling = CASES[TURNS[seed % len(TURNS)]]
    sequence = Sequence.start(seed, prompt, LIMITS.max_seq_len, replace(sampling, seed=seed), options)
    sequence.slot, sequence.cached = slot, PROMPT_LENGTH - 1
    generation = Generation(sequence, TextStream(PieceDecoder(), ()), frozenset())
    # As if it had drawn a token already: the first draft is made with the noise, too.
    generation.sampler_of(VOCAB)
    if options.method != "none":
        assert drafters.eagle is not None
        generation.head = drafters.eagle.start()
        generation.head.push(torch.tensor([*enumerate(prompt[:-1])]))
    if drafters.policy is not None:
        generation.auto = drafters.policy.start()
    return generation


def decoded(options: SpeculationConfig, drafters: Drafters, target: TableTarget) -> Iterator[Generation]:
    """Finished sequences; the next one takes the slot at once."""
    cache, seeds = new_cache(torch.float32), iter(range(SEQUENCES))
    batch = [begin(slot, next(seeds), options, drafters) for slot in range(SLOTS)]
    while batch:
        decode_step(batch, target, cache, drafters, LIMITS.max_draft_tokens)
        for slot, generation in enumerate(batch):
            if generation.finished:
                yield generation
                seed = next(seeds, None)
                if seed is not None:
                    batch[slot] = begin(slot, seed, options, drafters)
        batch = [generation for generation in batch if not generation.finished]
        for slot, generation in enumerate(batch):
            generation.sequence.slot = slot


def exact_distribution(prompt: tuple[int, ...], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of each output."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    found = {}
    for output in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for at, token in enumerate(output):
            path = [*prompt, *output[:at]]
            logits = TARGET_TABLE[len(path) - 1, path[-1]].tolist()
            chance *= probabilities(penalised(logits, prompt, output[:at], *penalties), params)[token]
        found[output] = chance
    assert math.fsum(found.values()) == pytest.approx(1)
    return found


def chi_squared(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; outcomes that are too rare for it are one together."""
    size = sum(counts.values())
    assert all(exact[output] > 0 for output in counts), "an output that is impossible"
    likely = {output: size * chance for output, chance in exact.items() if size * chance >= 5}
    expected = [*likely.values(), size - math.fsum(likely.values())]
    drawn = [*(counts[output] for output in likely), size - sum(counts[output] for output in likely)]
    if expected[-1] < 5:
        expected, drawn = expected[:-1], drawn[:-1]
    return math.fsum((n - mean) ** 2 / mean for n, mean in zip(drawn, expected, strict=True)), len(expected) - 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", METHODS)
def test_chi_squared(name: str) -> None:
    """Sequences with seeds of their own, an eighth of them with penalties and top-p; drafts share the noise.

    They are independent of one another, so the statistics of all cases add up to one.
    """
    options, target = METHODS[name], TableTarget()
    drafters = Drafters(NgramDrafter(), EagleDrafter(TableHead(), new_cache(torch.int64)))
    if name == AUTO:
        drafters.policy = FicklePolicy(0, LIMITS, target.buckets, spread=0.1)
    counts = [Counter[tuple[int, ...]]() for _ in CASES]
    stats = Stats()
    for generation in decoded(options, drafters, target):
        sequence = generation.sequence
        counts[TURNS[sequence.index % len(TURNS)]][tuple(sequence.history[PROMPT_LENGTH:].tolist())] += 1
        stats.add(generation.stats)
    results = [chi_squared(own, exact_distribution(*case)) for own, case in zip(counts, CASES, strict=True)]
    freedom = sum(freedom for _, freedom in results)
    assert sum(own.total() for own in counts) == SEQUENCES
    assert freedom > 250
    assert chi_squared_tail(math.fsum(statistic for statistic, _ in results), freedom) > 0.001
    assert stats.steps + stats.accepted_tokens == LENGTH * SEQUENCES
    assert min(own.accepted_tokens for own in stats.by_source.values()) > SEQUENCES / 20


def test_the_tail_of_chi_squared() -> None:
    """By a table, and the test must be able to fail."""
    for statistic, freedom, tail in ((10.828, 1, 0.001), (16.266, 3, 0.001), (149.449, 100, 0.001), (99.334, 100, 0.5)):
        assert chi_squared_tail(statistic, freedom) == pytest.approx(tail, rel=2e-3)
