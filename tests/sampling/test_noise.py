"""The noise: known answers, its distribution, and that its streams have nothing in common."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracle import gumbel, splitmix64

from trtspec.sampling import noise as module
from trtspec.sampling.noise import GumbelNoise

VOCAB = 3 * module.CHUNK + 77
SEEDS = [0, 1, 2**32, 2**63, 2**64 - 1]


def test_the_oracle_is_the_reference_generator() -> None:
    """The reference implementation's first numbers of seed 1234567."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [splitmix64(1234567, n) for n in range(1, 6)] == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", [0, 1, 131071])
def test_known_answers(seed: int, position: int) -> None:
    found = GumbelNoise(seed, VOCAB).at(position)
    assert found.dtype == np.float32
    assert found.shape == (VOCAB,)
    for token in (0, 1, 2, 1000, module.CHUNK - 1, module.CHUNK, VOCAB - 1):
        assert found[token] == pytest.approx(gumbel(seed, position, token), rel=2e-7, abs=2e-7)


def test_a_value_does_not_depend_on_the_vocabularys_size() -> None:
    whole = GumbelNoise(5, VOCAB).at(7)
    for size in (*range(1, 70), 1000, module.CHUNK - 1, module.CHUNK, module.CHUNK + 1, 2 * module.CHUNK + 3):
        assert np.array_equal(GumbelNoise(5, size).at(7), whole[:size])


def test_extreme_bits_are_finite() -> None:
    bits = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint64) << np.uint64(32)
    found = np.empty(5, dtype=np.float32)
    module._to_gumbel(bits, np.empty(5), found)
    uniform = (np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1]) + 0.5) / 2**32
    assert found == pytest.approx(-np.log(-np.log1p(-uniform)), rel=2e-7, abs=2e-7)
    assert np.isfinite(found).all()


def test_distribution() -> None:
    """Kolmogorov and Smirnov's distance, below what one in a thousand true samples exceeds; moments of the tail."""
    values = np.sort(np.concatenate([GumbelNoise(seed, VOCAB).at(seed % 1000) for seed in SEEDS]))
    assert len(np.unique(values)) > 0.9 * len(values)
    expected = np.exp(-np.exp(-values.astype(np.float64)))
    steps = np.arange(len(values) + 1) / len(values)
    distance = max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())
    assert distance * np.sqrt(len(values)) < 1.95
    assert values.mean() == pytest.approx(np.euler_gamma, abs=4 * np.pi / np.sqrt(6 * len(values)))
    assert np.count_nonzero(values > 5) == pytest.approx(len(values) * (1 - np.exp(-np.exp(-5))), rel=0.1)


def test_streams_have_nothing_in_common() -> None:
    """Neighbouring seeds and positions, their diagonals, and high bits; also with one stream moved by a token."""
    keys = [*itertools.product((0, 1, 2, 3), (0, 1, 2, 3)), (2**63, 0), (2**32, 0), (0, 2**16), (0, 2**32)]
    streams = [GumbelNoise(seed, VOCAB).at(position) for seed, position in keys]
    for lag in (0, 1):
        table = np.corrcoef(
            [stream[: VOCAB - 1] for stream in streams], [stream[lag:][: VOCAB - 1] for stream in streams]
        )
        between = table[: len(keys), len(keys) :]
        if lag == 0:
            between = between - np.eye(len(keys))
        assert np.abs(between).max() < 5 / np.sqrt(VOCAB)
    # Streams that ran into one another, wherever, would share pairs of neighbouring values.
    words = [stream.view(np.uint32).astype(np.uint64) for stream in streams]
    pairs = np.concatenate([(word[1:] << np.uint64(32)) | word[:-1] for word in words])
    assert len(np.unique(pairs)) == len(pairs)


def test_one_token_over_positions_and_seeds() -> None:
    """What one token meets from step to step, and from request to request, is noise as well."""
    by_position = GumbelNoise(3, 2)
    for values in (
        np.array([by_position.at(position) for position in range(5000)]),
        np.array([GumbelNoise(seed, 2).at(100) for seed in range(5000)]),
    ):
        for first, second in ((values[1:, 0], values[:-1, 0]), (values[:, 0], values[:, 1])):
            assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(5000)
        expected = np.exp(-np.exp(-np.sort(values[:, 0].astype(np.float64))))
        assert np.abs(expected - np.arange(5000) / 5000).max() * np.sqrt(5000) < 1.95


def test_positions_are_kept_until_they_are_past() -> None:
    noise = GumbelNoise(1, 50)
    kept = [noise.at(position) for position in range(5)]
    assert all(noise.at(position) is kept[position] for position in range(5))
    with pytest.raises(ValueError, match="read-only"):
        kept[0][0] = 0
    noise.forget(3)
    assert [noise.at(position) is kept[position] for position in range(5)] == [False, False, False, True, True]
    assert np.array_equal(noise.at(0), kept[0])


def test_what_is_kept_is_bounded() -> None:
    noise = GumbelNoise(1, 50)
    first = noise.at(0)
    for position in range(1, 3 * module.MAX_POSITIONS):
        noise.at(position)
        assert len(noise._known) <= module.MAX_POSITIONS
    assert noise.at(0) is not first
    assert np.array_equal(noise.at(0), first)
