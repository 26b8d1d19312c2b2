"""The kernels on a real GPU: the same results as the reference, in CUDA graphs too, and their times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plugin_cases import int32
from test_plugin_kernels import needs_triton

from trtspec.plugins import reference
from trtspec.plugins.kernels import launch

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    needs_triton,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]
LOOKUPS = [
    {"ngram_min": 2, "ngram_max": 5, "num_tokens": 10, "branches": 1, "latest": 0},
    {"ngram_min": 1, "ngram_max": 3, "num_tokens": 7, "branches": 3, "latest": 1},
    {"ngram_min": 3, "ngram_max": 32, "num_tokens": 16, "branches": 4, "latest": 1},
]
Tensors = tuple[torch.Tensor, ...]


def lookup_case(batch: int, columns: int, seed: int) -> Tensors:
    """Histories of few tokens and repeated motifs, and their lengths."""
    generator = torch.Generator().manual_seed(seed)
    histories = []
    for sequence in range(batch):
        motif = torch.randint(0, 2 + 3 * sequence, (1 + 17 * sequence,), generator=generator)
        history = motif.repeat(columns // len(motif) + 1)[:columns]
        slips = torch.rand(columns, generator=generator) < 0.02 * sequence
        histories.append(torch.where(slips, torch.randint(0, 9, (columns,), generator=generator), history))
    lengths = torch.randint(0, columns + 1, (batch,), generator=generator)
    lengths[:2] = torch.tensor([columns, columns - 1])[:batch]
    return torch.stack(histories).int(), lengths.int()


def tree_case(batch: int, nodes: int, seed: int) -> Tensors:
    """EAGLE's tokens, parents and counts, and room."""
    generator = torch.Generator().manual_seed(seed)
    parents = (torch.rand(batch, nodes, generator=generator) * torch.arange(1, nodes + 1)).int()
    tokens = torch.randint(0, 4, (batch, nodes), generator=generator)
    counts, room = (torch.randint(0, nodes + 1, (batch,), generator=generator) for _ in range(2))
    return tokens.int(), parents, counts.int(), room.int()


def cache_case(batch: int, nodes: int, seed: int) -> Tensors:
    """A cache, and the row of each root."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(6, batch + 1, 2, 64 + nodes, 80, generator=generator).to(torch.bfloat16)
    return cache, torch.randint(0, 63, (batch,), generator=generator).int()


def on_device(tensors: Tensors) -> Tensors:
    return tuple(tensor.to(DEVICE) for tensor in tensors)


def check(found: Tensors, expected: Tensors) -> None:
    for tensor, right in zip(found, expected, strict=True):
        assert torch.equal(tensor.cpu(), right)


@pytest.mark.parametrize("options", LOOKUPS)
@pytest.mark.parametrize("columns", [1, 100, 5000])
def test_ngram_draft(options: dict[str, int], columns: int) -> None:
    for seed in range(4):
        case = lookup_case(6, columns, seed)
        check(launch.ngram_draft(*on_device(case), **options), reference.ngram_draft(*case, **options))


@pytest.mark.parametrize(("branches", "num_tokens", "nodes", "size"), [(1, 10, 15, 25), (4, 10, 60, 63), (2, 1, 0, 3)])
def test_merge_drafts_then_accept(branches: int, num_tokens: int, nodes: int, size: int) -> None:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 3, (6, branches, num_tokens), generator=generator).int()
        counts = torch.randint(0, num_tokens + 1, (6, branches), generator=generator).int()
        inputs = tokens, counts, *tree_case(6, nodes, seed)
        draft = reference.merge_drafts(*inputs, size=size)
        check(launch.merge_drafts(*on_device(inputs), size=size), draft)
        target = torch.randint(0, 3, (6, size + 1), generator=generator).int()
        verified = draft.tokens, draft.parents, draft.counts, target
        check(launch.accept(*on_device(verified)), reference.accept(*verified))


def test_kv_commit() -> None:
    for seed in range(4):
        tokens, parents, counts, _ = tree_case(5, 12, seed)
        target = torch.randint(0, 2, (5, 13), generator=torch.Generator().manual_seed(seed)).int()
        path = reference.accept(tokens % 2, parents, counts, target)
        cache, starts = cache_case(5, 12, seed)
        inputs = starts, path.rows, path.num_accepted
        found = cache.to(DEVICE)
        launch.kv_commit(found, *on_device(inputs))
        reference.kv_commit(cache, *inputs)
        assert torch.equal(found.cpu(), cache)


def test_a_cache_of_more_than_2_to_the_31_elements() -> None:
    shape = 3, 2, 8, 2**16, 1024
    size = 3 * 2 * 8 * 2**26
    if torch.cuda.mem_get_info()[0] < 2 * size:
        pytest.skip(f"needs {2 * size / 1e9:.0f} GB of free memory on the GPU")
    cache = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
    cache[2, 1, 7, 2**16 - 3] = 1
    cache[2, 1, 7, 2**16 - 1] = 3
    launch.kv_commit(cache, *on_device((int32([0, 2**16 - 3]), int32([[0, 0], [2, 0]]), int32([0, 1]))))
    assert cache[2, 1, 7, -3:, 0].tolist() == [1, 3, 3]
    assert int(cache.sum(dtype=torch.int64)) == 1024 * 7


def test_a_captured_step_follows_its_inputs() -> None:
    batch, columns, nodes, size = 4, 3000, 15, 25
    options = LOOKUPS[1]

    def inputs(seed: int) -> Tensors:
        target = torch.randint(0, 2, (batch, size + 1), generator=torch.Generator().manual_seed(seed)).int()
        return (
            *lookup_case(batch, columns, seed),
            *tree_case(batch, nodes, seed),
            target,
            *cache_case(batch, size, seed),
        )

    def step(operations: Any, history: torch.Tensor, lengths: torch.Tensor, *rest: torch.Tensor) -> Tensors:
        *eagle, target, cache, starts = rest
        draft = operations.ngram_draft(history, lengths, **options)
        tree = operations.merge_drafts(draft.tokens, draft.counts, *eagle, size=size)
        path = operations.accept(tree.tokens, tree.parents, tree.counts, target)
        operations.kv_commit(cache, starts, path.rows, path.num_accepted)
        return (*draft, *tree, *path, cache)

    static = on_device(inputs(0))
    step(launch, *static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(launch, *static)
    for seed in range(1, 6):
        case = inputs(seed)
        for tensor, value in zip(static, case, strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        check(found, step(reference, *case))


def microseconds(call: Callable[[], object]) -> float:
    """Of one call among many in a CUDA graph, so that the host's own time doesn't count."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    graph.replay()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / 20)
    return min(times)


@pytest.mark.parametrize(("batch", "columns"), [(1, 4096), (8, 4096), (8, 131072)])
def test_times(batch: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 500, (batch, columns), generator=generator).int().to(DEVICE)
    lengths = torch.full((batch,), columns, dtype=torch.int32, device=DEVICE)
    copy = torch.empty_like(history)
    draft = launch.ngram_draft(history, lengths, **LOOKUPS[0])
    eagle = on_device(tree_case(batch, 15, 0))
    times = {
        "copy of the history": microseconds(lambda: copy.copy_(history)),
        "ngram_draft": microseconds(lambda: launch.ngram_draft(history, lengths, **LOOKUPS[0], out=draft)),
        "merge_drafts": microseconds(lambda: launch.merge_drafts(draft.tokens, draft.counts, *eagle, size=25)),
    }
    print(f"\nbatch {batch}, {columns} tokens:", ", ".join(f"{name} {time:.1f} us" for name, time in times.items()))
