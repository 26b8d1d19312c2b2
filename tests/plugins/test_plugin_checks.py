"""Wrong use: reference and kernels refuse it with the same errors, which name argument, value and remedy."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from plugin_cases import int32

from trtspec.plugins import reference
from trtspec.plugins.definition import MAX_COLUMNS, Acceptance, MergedDraft, NgramDraft
from trtspec.plugins.kernels import launch

Arguments = dict[str, Any]


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **{"dtype": torch.int32, **options})


def arguments(operation: str) -> Arguments:
    """Right ones; two sequences of everything."""
    if operation == "ngram_draft":
        attributes = {"ngram_min": 1, "ngram_max": 3, "num_tokens": 4, "branches": 2, "latest": 1}
        return {"history": zeros(2, 9), "lengths": int32([9, 0]), **attributes}
    if operation == "merge_drafts":
        names = ("ngram_tokens", "ngram_counts", "eagle_tokens", "eagle_parents", "eagle_counts", "room")
        values = zeros(2, 3, 4), zeros(2, 3), zeros(2, 5), zeros(2, 5), int32([5, 0]), int32([0, 99])
        return {**dict(zip(names, values, strict=True)), "size": 6}
    if operation == "accept":
        parents = int32([[0, 1, 2], [0, 0, -5]])
        return {"tokens": zeros(2, 3), "parents": parents, "counts": int32([3, 2]), "target_tokens": zeros(2, 4)}
    cache = torch.zeros(4, 3, 2, 8, 16)
    return {"cache": cache, "starts": int32([0, 5]), "rows": int32([[1, 3], [2, 0]]), "num_accepted": int32([2, 1])}


ANY: list[tuple[str, Arguments, type[Exception], str]] = [
    (
        "ngram_draft",
        {"history": zeros(2, 9, dtype=torch.float32)},
        TypeError,
        "history is torch.float32: pass torch.int32",
    ),
    ("ngram_draft", {"history": zeros(2, 9, dtype=torch.int64)}, TypeError, r"history is torch.int64: pass .*int32"),
    ("ngram_draft", {"history": [[1, 2]]}, TypeError, "history is a list: pass a torch tensor"),
    ("ngram_draft", {"history": zeros(9)}, ValueError, r"history has the shape \[9\]: pass \[batch, columns\]"),
    ("ngram_draft", {"history": zeros(2, 0)}, ValueError, r"history has the shape \[2, 0\].* at least one of each"),
    ("ngram_draft", {"history": zeros(0, 9)}, ValueError, r"history has the shape \[0, 9\].* at least one of each"),
    ("ngram_draft", {"history": zeros(9, 2).T}, ValueError, "history has the strides .*: pass a contiguous tensor"),
    ("ngram_draft", {"history": zeros(2, 9, device="meta")}, ValueError, "lengths is on cpu, others on meta"),
    ("ngram_draft", {"lengths": zeros(3)}, ValueError, r"lengths has the shape \[3\]: pass \[2\]"),
    ("ngram_draft", {"lengths": int32([[1], [2]])}, ValueError, r"lengths has the shape \[2, 1\]: pass \[2\]"),
    ("ngram_draft", {"lengths": zeros(2, dtype=torch.bool)}, TypeError, "lengths is torch.bool: pass"),
    ("ngram_draft", {"lengths": int32([0, -1])}, ValueError, "lengths has -1: pass 0 to 9"),
    ("ngram_draft", {"lengths": int32([0, 10])}, ValueError, "lengths has 10: pass 0 to 9"),
    ("ngram_draft", {"ngram_min": 0}, ValueError, "ngram_min is 0: choose 1 to 32"),
    ("ngram_draft", {"ngram_min": 33, "ngram_max": 40}, ValueError, "ngram_min is 33: choose 1 to 32"),
    ("ngram_draft", {"ngram_max": 0}, ValueError, "ngram_max is 0: choose at least 1"),
    ("ngram_draft", {"ngram_min": 4}, ValueError, "ngram_max is 3, less than ngram_min 4: choose"),
    ("ngram_draft", {"num_tokens": 0}, ValueError, "num_tokens is 0: choose at least 1"),
    ("ngram_draft", {"num_tokens": 2.0}, TypeError, "num_tokens is 2.0: pass an integer"),
    ("ngram_draft", {"branches": 0}, ValueError, "branches is 0: choose at least 1"),
    ("ngram_draft", {"latest": 2}, ValueError, "latest is 2: choose 0 to 1"),
    ("ngram_draft", {"latest": "latest"}, TypeError, "latest is 'latest': pass an integer"),
    (
        "ngram_draft",
        {"out": NgramDraft(zeros(2, 2, 3), zeros(2, 2), zeros(2, 2))},
        ValueError,
        r"out.tokens has the shape \[2, 2, 3\]: pass \[2, 2, 4\]",
    ),
    (
        "ngram_draft",
        {"out": NgramDraft(zeros(2, 2, 4), zeros(2, 2), zeros(2, 2, dtype=torch.int64))},
        TypeError,
        "out.match_lengths is torch.int64",
    ),
    ("merge_drafts", {"size": 0}, ValueError, "size is 0: choose at least 1"),
    ("merge_drafts", {"ngram_tokens": zeros(2, 3, 0)}, ValueError, r"ngram_tokens has the shape .* one of each"),
    ("merge_drafts", {"ngram_tokens": zeros(2, 12)}, ValueError, r"ngram_tokens .*: pass \[batch, branches, tokens\]"),
    ("merge_drafts", {"ngram_counts": zeros(2, 4)}, ValueError, r"ngram_counts has the shape \[2, 4\]: pass \[2, 3\]"),
    ("merge_drafts", {"ngram_counts": zeros(2, 3) + 5}, ValueError, "ngram_counts has 5: pass 0 to 4"),
    ("merge_drafts", {"ngram_counts": zeros(2, 3) - 1}, ValueError, "ngram_counts has -1: pass 0 to 4"),
    (
        "merge_drafts",
        {"eagle_tokens": zeros(3, 5)},
        ValueError,
        r"eagle_tokens has .*: pass \[2, nodes\]",
    ),
    ("merge_drafts", {"eagle_tokens": zeros(2, 5, dtype=torch.float16)}, TypeError, "eagle_tokens is torch.float16"),
    ("merge_drafts", {"eagle_parents": zeros(2, 4)}, ValueError, r"eagle_parents has .*: pass \[2, 5\]"),
    ("merge_drafts", {"eagle_parents": zeros(2, 5) + 1}, ValueError, r"eagle_parents\[0, 0\] is 1: pass rows from 0"),
    ("merge_drafts", {"eagle_parents": zeros(2, 5) - 1}, ValueError, r"eagle_parents\[0, 0\] is -1: pass rows from 0"),
    ("merge_drafts", {"eagle_counts": int32([6, 0])}, ValueError, "eagle_counts has 6: pass 0 to 5"),
    ("merge_drafts", {"room": int32([3, -2])}, ValueError, "room has -2: pass at least 0"),
    ("merge_drafts", {"room": int32([3])}, ValueError, r"room has the shape \[1\]: pass \[2\]"),
    (
        "merge_drafts",
        {"out": MergedDraft(*(zeros(2, 5) for _ in range(4)), counts=zeros(2))},
        ValueError,
        r"out.tokens has the shape \[2, 5\]: pass \[2, 6\]",
    ),
    ("accept", {"tokens": zeros(2, 3, dtype=torch.float32)}, TypeError, "tokens is torch.float32"),
    ("accept", {"tokens": zeros(2, 0)}, ValueError, r"tokens has the shape \[2, 0\].* one of each"),
    ("accept", {"parents": zeros(2, 4)}, ValueError, r"parents has the shape \[2, 4\]: pass \[2, 3\]"),
    ("accept", {"parents": int32([[0, 1, 2], [0, 3, 0]])}, ValueError, r"parents\[1, 1\] is 3: pass rows"),
    ("accept", {"counts": int32([4, 0])}, ValueError, "counts has 4: pass 0 to 3"),
    ("accept", {"target_tokens": zeros(2, 3)}, ValueError, r"target_tokens has the shape \[2, 3\]: pass \[2, 4\]"),
    (
        "accept",
        {"out": Acceptance(zeros(2, 3), zeros(2), zeros(2, 1), zeros(2))},
        ValueError,
        r"out.next_token has the shape \[2, 1\]: pass \[2\]",
    ),
    ("kv_commit", {"cache": torch.zeros(4, 3, 8, 16)}, ValueError, r"cache has the shape .*: pass \[planes, slots"),
    ("kv_commit", {"cache": torch.zeros(4, 3, 2, 0, 16)}, ValueError, "cache has the shape .* without empty axes"),
    ("kv_commit", {"cache": torch.zeros(4, 3, 8, 2, 16).transpose(2, 3)}, ValueError, "cache has the strides"),
    ("kv_commit", {"cache": torch.zeros(4, 1, 2, 8, 16)}, ValueError, "rows has 2 sequences but cache 1 slots"),
    ("kv_commit", {"cache": None}, TypeError, "cache is a NoneType: pass a torch tensor"),
    ("kv_commit", {"starts": int32([0, 8])}, ValueError, "starts has 8: pass 0 to 7"),
    ("kv_commit", {"starts": int32([-1, 0])}, ValueError, "starts has -1: pass 0 to 7"),
    ("kv_commit", {"starts": int32([5, 0])}, ValueError, r"starts \+ rows lie behind the 8 rows of cache"),
    ("kv_commit", {"rows": zeros(2, 2, dtype=torch.int64)}, TypeError, "rows is torch.int64"),
    ("kv_commit", {"rows": int32([[2, 2], [1, 0]])}, ValueError, "rows must begin at 1 and increase"),
    ("kv_commit", {"rows": int32([[0, 1], [1, 0]])}, ValueError, "rows must begin at 1 and increase"),
    ("kv_commit", {"num_accepted": int32([3, 0])}, ValueError, "num_accepted has 3: pass 0 to 2"),
    ("kv_commit", {"num_accepted": zeros(2, 1)}, ValueError, r"num_accepted has the shape \[2, 1\]: pass \[2\]"),
]


@pytest.mark.parametrize("module", [reference, launch], ids=["reference", "kernels"])
@pytest.mark.parametrize(("operation", "wrong", "error", "message"), ANY)
def test_wrong_use_is_refused(
    module: ModuleType, operation: str, wrong: Arguments, error: type[Exception], message: str
) -> None:
    call: Callable[..., Any] = getattr(module, operation)
    with pytest.raises(error, match=message):
        call(**{**arguments(operation), **wrong})


@pytest.mark.parametrize("operation", ["ngram_draft", "merge_drafts", "accept", "kv_commit"])
def test_right_use_is_not(operation: str) -> None:
    given = arguments(operation)
    outputs = getattr(reference, operation)(**given)
    # kv_commit changes its cache in place.
    rows = [output.shape[0] for output in outputs or ()]
    assert rows == [len(next(iter(given.values())))] * len(rows)
    assert bool(rows) == (operation != "kv_commit")


@pytest.mark.parametrize("module", [reference, launch], ids=["reference", "kernels"])
def test_a_history_too_long_for_its_ranks_is_refused(module: ModuleType) -> None:
    history = zeros(1, MAX_COLUMNS + 1, device="meta")
    with pytest.raises(ValueError, match=f"history has {MAX_COLUMNS + 1} columns: at most {MAX_COLUMNS}"):
        module.ngram_draft(history, zeros(1, device="meta"), ngram_min=1, ngram_max=1, num_tokens=1)


@pytest.mark.parametrize("operation", ["ngram_draft", "merge_drafts", "accept", "kv_commit"])
def test_kernels_ask_for_a_gpu(operation: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    with pytest.raises(ValueError, match=r"are on cpu, .*move them to a GPU, or call trtspec.plugins.reference"):
        getattr(launch, operation)(**arguments(operation))
