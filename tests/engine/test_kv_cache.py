"""Moving rows of the KV cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.engine.kv_cache import KeptPath, KVCache
from trtspec.plugins import reference

ROWS = 12


def filled(dtype: torch.dtype, device: str = "cpu") -> KVCache:
    """Two layers, three slots; every row holds a number of its own."""
    cache = KVCache(
        num_layers=2, slots=3, num_kv_heads=2, rows=ROWS, head_dim=2, dtype=dtype, device=torch.device(device)
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


paths_of_slots = st.dictionaries(
    st.integers(0, 2),
    st.tuples(st.integers(0, 4), st.sets(st.integers(1, 7)).map(lambda rows: [0, *sorted(rows)])),
)


@settings(deadline=None)
@given(paths_of_slots, st.booleans())
def test_paths_of_a_batch(paths: dict[int, tuple[int, list[int]]], in_one_call: bool) -> None:
    """In one call of the operation, as on a GPU, or slot by slot."""
    cache, expected = filled(torch.float32), filled(torch.float32)
    calls = 0

    def commit(*arguments: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        reference.kv_commit(*arguments)

    cache._commit = commit if in_one_call else None
    cache.keep_paths([KeptPath(slot, start, rows) for slot, (start, rows) in paths.items()])
    for slot, (start, rows) in paths.items():
        expected.keep_path(slot, start, rows)
    assert torch.equal(cache.block, expected.block)
    assert calls == (in_one_call and any(rows != list(range(len(rows))) for _, rows in paths.values()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_paths_of_a_batch_on_a_gpu(dtype: torch.dtype) -> None:
    found, expected = filled(dtype, "cuda"), filled(dtype)
    for cache in (found, expected):
        cache.keep_paths([KeptPath(0, 3, [0, 2, 5]), KeptPath(2, 1, [0, 1, 2, 6])])
    assert torch.equal(found.block.cpu(), expected.block)
