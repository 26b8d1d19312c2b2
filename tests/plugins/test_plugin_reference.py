"""The reference against brute force, and against what the host does in the step."""

from __future__ import annotations

import numpy as np
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
from plugin_oracles import accepted, committed, merged, ngram_branches

from trtspec.decode.accept import accept
from trtspec.draft.merge import union
from trtspec.draft.ngram import Match, find_branches, find_match, tree_of
from trtspec.draft.tree import EAGLE, DraftTree
from trtspec.engine.kv_cache import KVCache
from trtspec.plugins import reference
from trtspec.plugins.definition import Acceptance, MergedDraft, NgramDraft

pytestmark = pytest.mark.usefixtures("one_torch_thread")
Branch = tuple[list[int], int]


def branches_of(draft: NgramDraft, sequence: int) -> list[Branch]:
    """The branches of one sequence, after a look at what stands behind them."""
    rows = zip(*(tensor[sequence].tolist() for tensor in draft), strict=True)
    found = []
    for tokens, count, length in rows:
        assert (count > 0) == (length > 0)
        assert tokens[count:] == [0] * (len(tokens) - count)
        found.append((tokens[:count], length))
    real = [branch for branch in found if branch[1]]
    assert found[: len(real)] == real
    return real


def nodes_of(draft: MergedDraft, sequence: int) -> list[tuple[int, ...]]:
    count = int(draft.counts[sequence])
    columns = [tensor[sequence].tolist() for tensor in draft[:4]]
    assert all(column[count:] == [0] * (len(column) - count) for column in columns)
    return list(zip(*(column[:count] for column in columns), strict=True))


def tree_of_case(case: MergeCase, sequence: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Branches, and EAGLE's tokens and parents."""
    branches = zip(case.ngram_tokens[sequence].tolist(), case.ngram_counts[sequence].tolist(), strict=True)
    count = int(case.eagle_counts[sequence])
    tokens, parents = (tensor[sequence, :count].tolist() for tensor in (case.eagle_tokens, case.eagle_parents))
    return [tokens_[:n] for tokens_, n in branches], tokens, parents


@settings(max_examples=500, deadline=None)
@given(ngram_cases())
def test_ngram_draft_is_brute_force(case: NgramCase) -> None:
    draft = reference.ngram_draft(case.history, case.lengths, **case.attributes)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in draft)
    for sequence, history in enumerate(case.histories()):
        assert branches_of(draft, sequence) == ngram_branches(history, **case.attributes)


@settings(max_examples=500, deadline=None)
@given(ngram_cases(max_branches=1))
def test_ngram_draft_is_what_the_host_finds(case: NgramCase) -> None:
    draft = reference.ngram_draft(case.history, case.lengths, **case.attributes)
    options = {name: case.attributes[name] for name in ("ngram_min", "num_tokens")}
    options["ngram_max"] = min(case.attributes["ngram_max"], 32)
    occurrence = "latest" if case.attributes["latest"] else "earliest"
    for sequence, history in enumerate(case.histories()):
        tokens = np.array(history, dtype=np.int32)
        found = find_match(tokens, **options, occurrence=occurrence)
        expected = [] if found is None else [(found.continuation.tolist(), found.length)]
        assert branches_of(draft, sequence) == expected


@settings(max_examples=200, deadline=None)
@given(ngram_cases(longest=30))
def test_branches_begin_like_the_hosts(case: NgramCase) -> None:
    options = {name: case.attributes[name] for name in ("ngram_min", "ngram_max", "num_tokens")}
    occurrence = "latest" if case.attributes["latest"] else "earliest"
    draft = reference.ngram_draft(case.history, case.lengths, **case.attributes)
    for sequence, history in enumerate(case.histories()):
        tokens = np.array(history, dtype=np.int32)
        # The host stops after some searches, so it may miss branches that come later.
        found = find_branches(tokens, **options, occurrence=occurrence, count=case.attributes["branches"])
        expected = [(match.continuation.tolist(), match.length) for match in found]
        assert branches_of(draft, sequence)[: len(expected)] == expected


@settings(max_examples=500, deadline=None)
@given(merge_cases())
def test_merge_drafts_is_brute_force(case: MergeCase) -> None:
    draft = reference.merge_drafts(*case.inputs, size=case.size)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in draft)
    for sequence, room in enumerate(case.room.tolist()):
        expected = merged(*tree_of_case(case, sequence), min(room, case.size))
        assert nodes_of(draft, sequence) == expected


@settings(max_examples=500, deadline=None)
@given(merge_cases(distinct=True))
def test_merge_drafts_is_the_hosts_union(case: MergeCase) -> None:
    draft = reference.merge_drafts(*case.inputs, size=case.size)
    for sequence, room in enumerate(case.room.tolist()):
        branches, tokens, parents = tree_of_case(case, sequence)
        lookup = tree_of([Match(np.array(branch, np.int32), 1) for branch in branches if branch], 1000)
        sources = np.full(len(tokens), EAGLE, np.int8)
        eagle = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), sources)
        tree = union(lookup, eagle, min(room, case.size))
        columns = tree.tokens, tree.parents, tree.depths[1:], tree.sources
        assert nodes_of(draft, sequence) == list(zip(*(column.tolist() for column in columns), strict=True))


def acceptance_of(found: Acceptance, sequence: int) -> tuple[list[int], int, int]:
    rows, count, next_token, matches = (tensor[sequence].tolist() for tensor in found)
    assert rows[count:] == [0] * (len(rows) - count)
    return rows[:count], next_token, matches


@settings(max_examples=500, deadline=None)
@given(accept_cases())
def test_accept_is_brute_force(case: AcceptCase) -> None:
    found = reference.accept(*case)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in found)
    for sequence, count in enumerate(case.counts.tolist()):
        tokens, parents = case.tokens[sequence, :count].tolist(), case.parents[sequence, :count].tolist()
        assert acceptance_of(found, sequence) == accepted(tokens, parents, case.target_tokens[sequence].tolist())


@settings(max_examples=500, deadline=None)
@given(accept_cases(distinct=True))
def test_accept_is_the_hosts(case: AcceptCase) -> None:
    found = reference.accept(*case)
    for sequence, count in enumerate(case.counts.tolist()):
        columns = (tensor[sequence, :count].numpy() for tensor in (case.tokens, case.parents))
        tree = DraftTree(*columns, np.ones(count, np.int8))
        host = accept(tree, case.target_tokens[sequence].tolist())
        assert acceptance_of(found, sequence) == (host.rows, host.tokens[-1], host.num_matches)


@settings(max_examples=500, deadline=None)
@given(commit_cases())
def test_kv_commit_is_brute_force_and_the_hosts(case: CommitCase) -> None:
    planes, slots, heads, cache_rows, head_dim = case.cache.shape
    host = KVCache(
        num_layers=planes // 2,
        slots=slots,
        num_kv_heads=heads,
        rows=cache_rows,
        head_dim=head_dim,
        dtype=case.cache.dtype,
        device=torch.device("cpu"),
    )
    host.block.copy_(case.cache)
    expected, found = case.cache.clone(), case.cache.clone()
    for slot, (start, rows, count) in enumerate(zip(*(tensor.tolist() for tensor in case[1:]), strict=True)):
        host.keep_path(slot, start, [0, *rows[:count]])
        moved = committed(list(range(cache_rows)), start, rows[:count])
        expected[:, slot] = case.cache[:, slot][:, :, moved]
    reference.kv_commit(found, *case[1:])
    assert torch.equal(found, expected)
    assert torch.equal(found, host.block)


def test_matches_are_told_up_to_32_and_ranked_up_to_ngram_max() -> None:
    copied = list(range(100, 140))
    history = int32([[*copied[-5:], 8, *copied, 7, 9, *copied]])
    lengths = int32([history.shape[1]])
    options = {"ngram_min": 2, "num_tokens": 1, "branches": 2}
    for ngram_max, expected in ((5, [([8], 5), ([7], 32)]), (6, [([7], 32), ([8], 5)])):
        draft = reference.ngram_draft(history, lengths, **options, ngram_max=ngram_max)
        assert branches_of(draft, 0) == expected


def test_outputs_go_where_they_are_asked_for() -> None:
    case = int32([[1, 2, 1, 2]]), int32([4])
    plain = reference.ngram_draft(*case, ngram_min=1, ngram_max=2, num_tokens=3)
    out = NgramDraft(*map(torch.empty_like, plain))
    assert reference.ngram_draft(*case, ngram_min=1, ngram_max=2, num_tokens=3, out=out) is out
    assert all(map(torch.equal, out, plain))
    inputs = *plain[:2], int32([[5]]), int32([[0]]), int32([1]), int32([2])
    tree = reference.merge_drafts(*inputs, size=2)
    merged_out = MergedDraft(*map(torch.empty_like, tree))
    assert reference.merge_drafts(*inputs, size=2, out=merged_out) is merged_out
    assert all(map(torch.equal, merged_out, tree))
    verified = tree.tokens, tree.parents, tree.counts, int32([[5, 1, 1]])
    path = reference.accept(*verified)
    path_out = Acceptance(*map(torch.empty_like, path))
    assert reference.accept(*verified, out=path_out) is path_out
    assert all(map(torch.equal, path_out, path))
