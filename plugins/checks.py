"""Checks of arguments that the reference, the kernels and the graph operators share.

A wrong type raises TypeError, anything else ValueError; the message names the argument, what it has and the remedy.
Types, shapes, devices and attributes are always checked. Values are checked on the CPU only: on a GPU the host would
have to wait for them, so there a wrong value gives an unspecified draft.
"""

from __future__ import annotations

import torch

from trtspec.plugins.definition import LONGEST_MATCH, MAX_COLUMNS, Acceptance, MergedDraft, NgramDraft

Shape = tuple["int | str", ...]
"""A number is a size that is asked for; a name stands for any size of at least 1, or of at least 0 with a `?`."""


def check_ngram_attributes(ngram_min: int, ngram_max: int, num_tokens: int, branches: int, latest: int) -> None:
    """Attributes of `ngram_draft`.

    Raises:
        TypeError, ValueError: one is no integer or out of range.
    """
    _attribute("ngram_min", ngram_min, 1, LONGEST_MATCH)
    _attribute("ngram_max", ngram_max, 1)
    _attribute("num_tokens", num_tokens, 1)
    _attribute("branches", branches, 1)
    _attribute("latest", latest, 0, 1)
    if ngram_max < ngram_min:
        raise ValueError(f"ngram_max is {ngram_max}, less than ngram_min {ngram_min}: choose ngram_max >= ngram_min")


def check_size(size: int) -> None:
    """The attribute of `merge_drafts`.

    Raises:
        TypeError, ValueError: it is no integer or less than 1.
    """
    _attribute("size", size, 1)


def check_ngram_draft(history: torch.Tensor, lengths: torch.Tensor) -> None:
    """Tensors of `ngram_draft`.

    Raises:
        TypeError, ValueError: see the module.
    """
    batch, columns = _shape("history", history, ("batch", "columns"))
    if columns > MAX_COLUMNS:
        raise ValueError(f"history has {columns} columns: at most {MAX_COLUMNS} can be searched, pass the last ones")
    _shape("lengths", lengths, (batch,), history)
    _values("lengths", lengths, 0, columns, "it counts committed tokens, at most the columns of history")


def check_merge_drafts(
    ngram_tokens: torch.Tensor,
    ngram_counts: torch.Tensor,
    eagle_tokens: torch.Tensor,
    eagle_parents: torch.Tensor,
    eagle_counts: torch.Tensor,
    room: torch.Tensor,
) -> None:
    """Tensors of `merge_drafts`.

    Raises:
        TypeError, ValueError: see the module.
    """
    batch, branches, num_tokens = _shape("ngram_tokens", ngram_tokens, ("batch", "branches", "tokens"))
    _shape("ngram_counts", ngram_counts, (batch, branches), ngram_tokens)
    _, nodes = _shape("eagle_tokens", eagle_tokens, (batch, "nodes?"), ngram_tokens)
    _shape("eagle_parents", eagle_parents, (batch, nodes), ngram_tokens)
    _shape("eagle_counts", eagle_counts, (batch,), ngram_tokens)
    _shape("room", room, (batch,), ngram_tokens)
    _values("ngram_counts", ngram_counts, 0, num_tokens, "it counts tokens of ngram_tokens")
    _values("eagle_counts", eagle_counts, 0, nodes, "it counts nodes of eagle_tokens")
    _values("room", room, 0, None, "pass 0 for a sequence that must not draft")
    _topological("eagle_parents", eagle_parents, eagle_counts)


def check_accept(
    tokens: torch.Tensor, parents: torch.Tensor, counts: torch.Tensor, target_tokens: torch.Tensor
) -> None:
    """Tensors of `accept`.

    Raises:
        TypeError, ValueError: see the module.
    """
    batch, nodes = _shape("tokens", tokens, ("batch", "nodes"))
    _shape("parents", parents, (batch, nodes), tokens)
    _shape("counts", counts, (batch,), tokens)
    _shape("target_tokens", target_tokens, (batch, nodes + 1), tokens)
    _values("counts", counts, 0, nodes, "it counts nodes of tokens")
    _topological("parents", parents, counts)


def check_kv_commit(cache: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """Tensors of `kv_commit`.

    Raises:
        TypeError, ValueError: see the module.
    """
    _is_tensor("cache", cache)
    if cache.ndim != 5 or 0 in cache.shape:
        wanted = "[planes, slots, heads, rows, head_dim] without empty axes"
        raise ValueError(f"cache has the shape {list(cache.shape)}: pass {wanted}")
    _contiguous("cache", cache)
    batch, nodes = _shape("rows", rows, ("batch", "nodes"), cache)
    slots, cache_rows = cache.shape[1], cache.shape[3]
    if batch > slots:
        raise ValueError(f"rows has {batch} sequences but cache {slots} slots: pass at most one sequence for each slot")
    _shape("starts", starts, (batch,), cache)
    _shape("num_accepted", num_accepted, (batch,), cache)
    _values("starts", starts, 0, cache_rows - 1, "it is a row of cache")
    _values("num_accepted", num_accepted, 0, nodes, "it counts rows")
    if rows.is_cpu:
        accepted = torch.arange(nodes) < num_accepted[:, None]
        steps = torch.diff(rows, dim=1, prepend=torch.zeros_like(rows[:, :1]))
        if bool((accepted & (steps < 1)).any()):
            raise ValueError(f"rows must begin at 1 and increase up to num_accepted: pass those of accept, not {rows}")
        if bool((accepted & (starts[:, None] + rows >= cache_rows)).any()):
            raise ValueError(f"starts + rows lie behind the {cache_rows} rows of cache: pass rows that were written")


def check_ngram_out(out: NgramDraft, like: torch.Tensor, batch: int, branches: int, num_tokens: int) -> None:
    """Given outputs of `ngram_draft`; `like` is an input on their device.

    Raises:
        TypeError, ValueError: see the module.
    """
    _shape("out.tokens", out.tokens, (batch, branches, num_tokens), like)
    _shape("out.counts", out.counts, (batch, branches), like)
    _shape("out.match_lengths", out.match_lengths, (batch, branches), like)


def check_merge_out(out: MergedDraft, like: torch.Tensor, batch: int, size: int) -> None:
    """Given outputs of `merge_drafts`; `like` is an input on their device.

    Raises:
        TypeError, ValueError: see the module.
    """
    for name in ("tokens", "parents", "depths", "sources"):
        _shape(f"out.{name}", getattr(out, name), (batch, size), like)
    _shape("out.counts", out.counts, (batch,), like)


def check_accept_out(out: Acceptance, like: torch.Tensor, batch: int, nodes: int) -> None:
    """Given outputs of `accept`; `like` is an input on their device.

    Raises:
        TypeError, ValueError: see the module.
    """
    _shape("out.rows", out.rows, (batch, nodes), like)
    for name in ("num_accepted", "next_token", "num_matches"):
        _shape(f"out.{name}", getattr(out, name), (batch,), like)


def _attribute(name: str, value: int, least: int, most: int | None = None) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: pass an integer")
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} is {value}: choose {wanted}")


def _is_tensor(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: pass a torch tensor")


def _contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has the strides {tensor.stride()}: pass a contiguous tensor")


def _shape(name: str, tensor: torch.Tensor, shape: Shape, like: torch.Tensor | None = None) -> tuple[int, ...]:
    """Check type, shape, layout and device of an int32 tensor; returns its shape."""
    _is_tensor(name, tensor)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} is {tensor.dtype}: pass torch.int32, for instance {name}.to(torch.int32)")
    fits = len(shape) == tensor.ndim and all(map(_fits, tensor.shape, shape))
    if not fits:
        wanted = ", ".join(str(size).rstrip("?") for size in shape)
        raise ValueError(f"{name} has the shape {list(tensor.shape)}: pass [{wanted}]{_note(tensor, shape)}")
    _contiguous(name, tensor)
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, others on {like.device}: move them to one device")
    return tuple(tensor.shape)


def _fits(size: int, wanted: int | str) -> bool:
    return size == wanted if isinstance(wanted, int) else size >= (not wanted.endswith("?"))


def _note(tensor: torch.Tensor, shape: Shape) -> str:
    return " with at least one of each" if tensor.ndim == len(shape) and 0 in tensor.shape else ""


def _values(name: str, tensor: torch.Tensor, least: int, most: int | None, meaning: str) -> None:
    if not tensor.is_cpu:
        return
    low, high = (int(value) for value in tensor.aminmax())
    if low < least or (most is not None and high > most):
        wrong = low if low < least else high
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} has {wrong}: pass {wanted}; {meaning}")


def _topological(name: str, parents: torch.Tensor, counts: torch.Tensor) -> None:
    if not parents.is_cpu:
        return
    nodes = torch.arange(parents.shape[1], dtype=torch.int32)
    wrong = ((parents < 0) | (parents > nodes)) & (nodes < counts[:, None])
    if bool(wrong.any()):
        sequence, node = wrong.nonzero()[0].tolist()
        parent = int(parents[sequence, node])
        raise ValueError(f"{name}[{sequence}, {node}] is {parent}: pass rows from 0 (the root) to the node's own index")
