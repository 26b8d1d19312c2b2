"""Gumbel noise that depends on (seed, sequence position, token id) alone, so that every way to decode meets the same.

The generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): the n-th number
of a stream is a mix of key + n * GAMMA, so any of them can be had without those before it.
"""

from __future__ import annotations

import numpy as np

CHUNK = 1 << 14
"""Token ids worked on at once: the scratch buffers stay in the core's own cache."""
MAX_POSITIONS = 64
"""Positions kept at most, each 4 bytes per token id."""

_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_WORD = (1 << 64) - 1
_STEPS = np.arange(1, CHUNK + 1, dtype=np.uint64) * np.uint64(_GAMMA)


class GumbelNoise:
    """The noise of one seed. `argmax(log-probabilities + noise)` draws a token from the distribution."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        """`seed` is in [0, 2**64)."""
        self._seed_key = _mixed(seed + _GAMMA)
        self._vocab_size = vocab_size
        self._known: dict[int, np.ndarray] = {}
        self._bits = np.empty(min(CHUNK, vocab_size), dtype=np.uint64)
        self._spare = np.empty_like(self._bits)

    def at(self, position: int) -> np.ndarray:
        """The noise for the token at a sequence position (0 or more), float32 `[vocab]`, read-only.

        A token's value depends neither on the vocabulary's size nor on what was asked for before.
        """
        noise = self._known.get(position)
        if noise is None:
            noise = self._draw(position)
            if len(self._known) == MAX_POSITIONS:
                del self._known[next(iter(self._known))]
            self._known[position] = noise
        return noise

    def forget(self, before: int) -> None:
        """Drop what is kept of the positions before this one."""
        for position in [position for position in self._known if position < before]:
            del self._known[position]

    def _draw(self, position: int) -> np.ndarray:
        # Seed and position are mixed one after the other: a sum of the two would give neighbours the same streams.
        key = _mixed(self._seed_key + (position + 1) * _GAMMA)
        noise = np.empty(self._vocab_size, dtype=np.float32)
        for start in range(0, self._vocab_size, CHUNK):
            part = noise[start : start + CHUNK]
            bits, spare = self._bits[: len(part)], self._spare[: len(part)]
            np.add(_STEPS[: len(part)], np.uint64((key + start * _GAMMA) & _WORD), out=bits)
            _mix(bits, spare)
            _to_gumbel(bits, spare.view(np.float64), part)
        noise.setflags(write=False)
        return noise


def _mixed(word: int) -> int:
    """SplitMix64's output function of one number, taken modulo 2**64."""
    word &= _WORD
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        word = ((word ^ (word >> shift)) * factor) & _WORD
    return word ^ (word >> _SHIFTS[-1])


def _mix(bits: np.ndarray, spare: np.ndarray) -> None:
    """`_mixed` of each element in place; both uint64 `[n]`."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        np.right_shift(bits, shift, out=spare)
        np.bitwise_xor(bits, spare, out=bits)
        np.multiply(bits, np.uint64(factor), out=bits)
    np.right_shift(bits, _SHIFTS[-1], out=spare)
    np.bitwise_xor(bits, spare, out=bits)


def _to_gumbel(bits: np.ndarray, uniform: np.ndarray, gumbel: np.ndarray) -> None:
    """-log(-log(1 - u)) of u = (the upper 32 bits + 0.5) / 2**32, into float32 `[n]`; overwrites the other two.

    1 - u is exact in float64 and never 0 or 1: all values are finite (-3.2 to 22.9), and the large ones, which decide,
    come from small u, where there are many of them.
    """
    np.right_shift(bits, 32, out=bits)
    np.copyto(uniform, bits)
    np.subtract(2.0**32 - 0.5, uniform, out=uniform)
    np.multiply(uniform, 2.0**-32, out=uniform)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=gumbel, casting="same_kind")
    np.log(gumbel, out=gumbel)
    np.negative(gumbel, out=gumbel)
