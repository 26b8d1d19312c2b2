"""Sampling in plain Python, a token at a time and a vocabulary as a list: what the package's arrays must agree with."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence as Seq

from trtspec.config import SamplingParams

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def f32(value: float) -> float:
    """Rounded to float32; of +, -, * and / of two float32 this is their float32 result."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def splitmix64(state: int, n: int) -> int:
    """The n-th number, from 1, of the reference generator seeded with `state`."""
    z = (state + n * GAMMA) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def gumbel(seed: int, position: int, token: int) -> float:
    """A stream per seed, whose numbers seed a stream per position, whose numbers are the tokens' own."""
    number = splitmix64(splitmix64(splitmix64(seed, 1), position + 1), token + 1)
    return -math.log(-math.log1p(-((number >> 32) + 0.5) / 2**32))


def penalised(
    logits: Seq[float], prompt: Seq[int], output: Seq[int], repetition: float, presence: float, frequency: float
) -> list[float]:
    """float32 logits, each changed for what came before."""
    repetition, presence, frequency = f32(repetition), f32(presence), f32(frequency)
    result = []
    for token, value in enumerate(logits):
        if token in prompt or token in output:
            value = f32(value / repetition) if value > 0 else f32(value * repetition)
        value = f32(value - f32(frequency * list(output).count(token)))
        result.append(f32(value - presence) if token in output else value)
    return result


def kept(scaled: dict[int, float], top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """The tokens, with their scaled logits, that the filters leave."""
    best = sorted(scaled.items(), key=lambda item: (-item[1], item[0]))
    if top_k:
        best = best[:top_k]
    if top_p < 1:
        weights = [math.exp(value) for _, value in best]
        sums = list(itertools.accumulate(weights))
        best = best[: 1 + sum(reached < top_p * sums[-1] for reached in sums)]
    return {token: value for token, value in best if math.exp(value) >= min_p}


def remaining(logits: Seq[float], params: SamplingParams, slack: float = 0.0) -> dict[int, float]:
    """Tokens that may be sampled; `slack` moves the edges of top-p and min-p by this fraction."""
    top = max(logits)
    scaled = {token: f32(f32(value - top) / f32(params.temperature)) for token, value in enumerate(logits)}
    top_p = params.top_p * (1 - slack) if params.top_p < 1 else 1.0
    return kept(scaled, params.top_k, top_p, min(params.min_p * (1 - slack), 1.0))


def probabilities(logits: Seq[float], params: SamplingParams) -> list[float]:
    """Of penalised logits."""
    left = remaining(logits, params)
    total = math.fsum(map(math.exp, left.values()))
    return [math.exp(left[token]) / total if token in left else 0.0 for token in range(len(logits))]


def choices(logits: Seq[float], prompt: Seq[int], output: Seq[int], params: SamplingParams, position: int) -> set[int]:
    """Tokens that are right: one, or several where float32 cannot tell which."""
    values = penalised(
        logits, prompt, output, params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    )
    if params.temperature == 0:
        return {values.index(max(values))}
    assert params.seed is not None
    right = set()
    for slack in (0.0, 1e-6, -1e-6):
        left = remaining(values, params, slack)
        scores = {token: value + gumbel(params.seed, position, token) for token, value in left.items()}
        best = max(scores.values())
        right |= {token for token, score in scores.items() if score >= best - 1e-5 * max(1.0, abs(best))}
    return right


def ancestors(parents: Seq[int], row: int) -> list[int]:
    """Rows of the draft tokens on the way to a row, itself included, from the top; row 0 is the root."""
    path = []
    while row:
        path.append(row)
        row = parents[row - 1]
    return path[::-1]
