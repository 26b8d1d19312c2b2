"""The kernels in triton's interpreter against the reference; test_plugin_kernels.py runs this in a process of its own.

TRITON_INTERPRET has to be set before anything imports triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from plugin_cases import (
    AcceptCase,
    CommitCase,
    MergeCase,
    NgramCase,
    accept_cases,
    commit_cases,
    int32,
    merge_cases,
    ngram_cases,
)

from trtspec.plugins import reference
from trtspec.plugins.definition import Acceptance, MergedDraft, NgramDraft
from trtspec.plugins.kernels import launch, plans

GARBAGE = -77


@pytest.fixture(scope="module", autouse=True)
def small_tiles() -> Iterator[None]:
    """Several tiles and chunks even with little data."""
    with mock.patch.object(plans, "TILE", 16), mock.patch.object(plans, "COMPARISONS", 16):
        yield


@settings(max_examples=500, deadline=None)
@given(ngram_cases(longest=44))
def test_ngram_draft(case: NgramCase) -> None:
    expected = reference.ngram_draft(case.history, case.lengths, **case.attributes)
    out = NgramDraft(*(torch.full_like(tensor, GARBAGE) for tensor in expected))
    launch.ngram_draft(case.history, case.lengths, **case.attributes, out=out)
    for found, tensor in zip(out, expected, strict=True):
        assert torch.equal(found, tensor), (out, expected)


@settings(max_examples=500, deadline=None)
@given(merge_cases())
def test_merge_drafts(case: MergeCase) -> None:
    expected = reference.merge_drafts(*case.inputs, size=case.size)
    out = MergedDraft(*(torch.full_like(tensor, GARBAGE) for tensor in expected))
    launch.merge_drafts(*case.inputs, size=case.size, out=out)
    for found, tensor in zip(out, expected, strict=True):
        assert torch.equal(found, tensor), (out, expected)


@settings(max_examples=500, deadline=None)
@given(accept_cases())
def test_accept(case: AcceptCase) -> None:
    expected = reference.accept(*case)
    out = Acceptance(*(torch.full_like(tensor, GARBAGE) for tensor in expected))
    launch.accept(*case, out=out)
    for found, tensor in zip(out, expected, strict=True):
        assert torch.equal(found, tensor), (out, expected)


@settings(max_examples=500, deadline=None)
@given(commit_cases())
def test_kv_commit(case: CommitCase) -> None:
    expected, found = case.cache.clone(), case.cache.clone()
    reference.kv_commit(expected, *case[1:])
    launch.kv_commit(found, *case[1:])
    assert torch.equal(found, expected)


def test_outputs_are_made_where_none_are_given() -> None:
    lookup = int32([[1, 2, 1, 2]]), int32([4])
    options = {"ngram_min": 1, "ngram_max": 2, "num_tokens": 3}
    draft = launch.ngram_draft(*lookup, **options)
    assert all(map(torch.equal, draft, reference.ngram_draft(*lookup, **options)))
    inputs = *draft[:2], int32([[5]]), int32([[0]]), int32([1]), int32([2])
    tree = launch.merge_drafts(*inputs, size=2)
    assert all(map(torch.equal, tree, reference.merge_drafts(*inputs, size=2)))
    verified = tree.tokens, tree.parents, tree.counts, int32([[5, 1, 1]])
    assert all(map(torch.equal, launch.accept(*verified), reference.accept(*verified)))
