"""Moving rows of the KV cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.engine.kv_cache import KVCache

ROWS = 12


def filled(dtype: torch.dtype) -> KVCache:
    """Two layers, three slots; every row holds a number of its own."""
    cache = KVCache(
        num_layers=2, slots=3, num_kv_heads=2, rows=ROWS, head_dim=2, dtype=dtype, device=torch.device("cpu")
    )
    cache.block.copy_(torch.arange(cache.block.numel()).view(cache.block.shape) % 251)
    return cache


@settings(deadline=None)
@given(
    st.integers(0, 2),
    st.integers(0, 4),
    st.lists(st.integers(0, 7), min_size=1, unique=True).map(sorted),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_accepted_rows_come_to_lie_behind_each_other(
    slot: int, start: int, rows: list[int], dtype: torch.dtype
) -> None:
    cache = filled(dtype)
    expected = cache.block.clone()
    for place, row in enumerate(rows):
        expected[:, slot, :, start + place] = cache.block[:, slot, :, start + row].clone()
    cache.keep_path(slot, start, rows)
    assert torch.equal(cache.block, expected)


@pytest.mark.parametrize("length", [0, 5, ROWS])
def test_a_slots_rows_move_to_another(length: int) -> None:
    cache = filled(torch.float32)
    expected = cache.block.clone()
    expected[:, 0, :, :length] = expected[:, 2, :, :length]
    cache.move(2, 0, length)
    assert torch.equal(cache.block, expected)
