"""The operations of `trtspec.plugins.definition` on kernels: the same calls as in `trtspec.plugins.reference`.

Nothing waits for the GPU and no launch depends on values, so calls may be captured into a CUDA graph (after a first
call, which compiles) when `out` is given. Kernels run on CUDA tensors, and on CPU tensors under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from trtspec.plugins import checks
from trtspec.plugins.definition import Acceptance, MergedDraft, NgramDraft
from trtspec.plugins.kernels import plans
from trtspec.plugins.kernels.plans import Plan

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def ngram_draft(
    history: torch.Tensor,
    lengths: torch.Tensor,
    *,
    ngram_min: int,
    ngram_max: int,
    num_tokens: int,
    branches: int = 1,
    latest: int = 0,
    out: NgramDraft | None = None,
) -> NgramDraft:
    """What followed each history's last tokens earlier; see `trtspec.plugins.reference.ngram_draft`.

    Raises:
        TypeError, ValueError: see `trtspec.plugins.checks`.
        ImportError: triton is missing.
    """
    checks.check_ngram_attributes(ngram_min, ngram_max, num_tokens, branches, latest)
    checks.check_ngram_draft(history, lengths)
    batch, columns = history.shape
    if out is None:
        shapes = (batch, branches, num_tokens), (batch, branches), (batch, branches)
        out = NgramDraft(*map(history.new_empty, shapes))
    else:
        checks.check_ngram_out(out, history, batch, branches, num_tokens)
    plan = plans.ngram_draft_plan(
        ngram_min=ngram_min, ngram_max=ngram_max, num_tokens=num_tokens, branches=branches, latest=latest
    )
    _launch("ngram", "ngram_draft_kernel", (batch,), (history, lengths, columns, *out), plan)
    return out


def merge_drafts(
    ngram_tokens: torch.Tensor,
    ngram_counts: torch.Tensor,
    eagle_tokens: torch.Tensor,
    eagle_parents: torch.Tensor,
    eagle_counts: torch.Tensor,
    room: torch.Tensor,
    *,
    size: int,
    out: MergedDraft | None = None,
) -> MergedDraft:
    """The branches of a lookup and an EAGLE tree as one tree; see `trtspec.plugins.reference.merge_drafts`.

    Raises:
        TypeError, ValueError: see `trtspec.plugins.checks`.
        ImportError: triton is missing.
    """
    checks.check_size(size)
    checks.check_merge_drafts(ngram_tokens, ngram_counts, eagle_tokens, eagle_parents, eagle_counts, room)
    batch, branches, num_tokens = ngram_tokens.shape
    if out is None:
        columns = (ngram_tokens.new_empty(batch, size) for _ in range(4))
        out = MergedDraft._make((*columns, ngram_tokens.new_empty(batch)))
    else:
        checks.check_merge_out(out, ngram_tokens, batch, size)
    plan = plans.merge_drafts_plan(branches=branches, num_tokens=num_tokens, nodes=eagle_tokens.shape[1], size=size)
    inputs = ngram_tokens, ngram_counts, eagle_tokens, eagle_parents, eagle_counts, room
    _launch("merge", "merge_drafts_kernel", (batch,), (*inputs, *out), plan)
    return out


def accept(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    counts: torch.Tensor,
    target_tokens: torch.Tensor,
    *,
    out: Acceptance | None = None,
) -> Acceptance:
    """The path that the target would have taken itself; see `trtspec.plugins.reference.accept`.

    Raises:
        TypeError, ValueError: see `trtspec.plugins.checks`.
        ImportError: triton is missing.
    """
    checks.check_accept(tokens, parents, counts, target_tokens)
    batch, nodes = tokens.shape
    if out is None:
        scalars = (tokens.new_empty(batch) for _ in range(3))
        out = Acceptance(torch.empty_like(tokens), *scalars)
    else:
        checks.check_accept_out(out, tokens, batch, nodes)
    arguments = tokens, parents, counts, target_tokens, *out
    _launch("verify", "accept_kernel", (batch,), arguments, plans.accept_plan(nodes=nodes))
    return out


def kv_commit(cache: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """Move the accepted rows of each sequence behind its root; see `trtspec.plugins.reference.kv_commit`.

    Raises:
        TypeError, ValueError: see `trtspec.plugins.checks`.
        ImportError: triton is missing.
    """
    checks.check_kv_commit(cache, starts, rows, num_accepted)
    planes, slots, heads, cache_rows, head_dim = cache.shape
    batch, nodes = rows.shape
    # Rows are only copied, so elements of one size are all alike.
    words = cache.view(_WORDS[cache.element_size()])
    arguments = words, starts, rows, num_accepted, slots, heads, cache_rows, head_dim
    plan = plans.kv_commit_plan(nodes=nodes, head_dim=head_dim)
    _launch("verify", "kv_commit_kernel", (planes * heads, batch), arguments, plan)


def _launch(module: str, name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], plan: Plan) -> None:
    kernel, is_interpreted = kernel_of(module, name)
    device = arguments[0].device
    if device.type != "cuda" and not is_interpreted:
        raise ValueError(
            f"the tensors are on {device}, where kernels don't run: move them to a GPU, "
            "or call trtspec.plugins.reference"
        )
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **plan.constants, num_warps=plan.num_warps, **plans.OPTIONS)


@cache
def kernel_of(module: str, name: str) -> tuple[Any, bool]:
    """A kernel, and whether it runs in triton's interpreter."""
    try:
        from triton.runtime import JITFunction
    except ImportError as error:
        raise ImportError("kernels need triton: install it with pip install 'trtspec[kernels]'") from error
    kernel = getattr(importlib.import_module(f"trtspec.plugins.kernels.{module}"), name)
    return kernel, not isinstance(kernel, JITFunction)
