"""Which target token each row of a draft head's LM head stands for."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from trtspec.checkpoint.draft_head.config import HEAD_LM_HEAD
from trtspec.checkpoint.draft_head.reading import Reading
from trtspec.errors import CheckpointError

DAMAGED = "the head's vocabulary map is damaged: fetch it again"
RANKING = "token_ranking.json"
"""A file beside the weights: token ids, the most frequent in the head's training data first."""
INTEGERS = ("int64", "int32")


@dataclass(frozen=True)
class EagleIds:
    """Token ids of an EAGLE-1 head's rows (None: the identity), and the rows of the file's LM head to take."""

    token_ids: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None


def eagle_ids(reading: Reading) -> EagleIds:
    """The token map that vLLM's EAGLE-1 files may have: absolute ids, in any order.

    Raises:
        CheckpointError: the map has ids twice or outside the vocabulary, or doesn't fit the LM head.
    """
    vocab = reading.target.vocab_size
    truncated = reading.integer("truncated_vocab_size") or vocab
    if not reading.has("token_map"):
        if truncated != vocab:
            raise CheckpointError(
                f"config.json says truncated_vocab_size {truncated} of {vocab} tokens, but there is no "
                f"token_map; {DAMAGED}"
            )
        reading.findings.decide("token_ids", None, "tensor", "no token_map: rows are token ids")
        return EagleIds()
    reading.findings.unused.add("token_map")
    ids = _integers(reading, "token_map")
    lm_rows = reading.matrix(HEAD_LM_HEAD)[0] if reading.has(HEAD_LM_HEAD) else vocab
    if truncated == vocab and lm_rows != len(ids):
        reading.findings.warn("token_map is ignored: config.json has no truncated_vocab_size below vocab_size")
        reading.findings.decide("token_ids", None, "config", "rows are token ids")
        return EagleIds()
    if truncated not in (vocab, len(ids)):
        raise CheckpointError(
            f"token_map has {len(ids)} ids, config.json says truncated_vocab_size {truncated}; {DAMAGED}"
        )
    if len(set(ids)) != len(ids) or min(ids, default=-1) < 0 or max(ids) >= vocab:
        raise CheckpointError(f"token_map has ids twice or outside 0 to {vocab - 1}; {DAMAGED}")
    reading.findings.decide("token_ids", len(ids), "tensor", f"token_map: {len(ids)} of {vocab} tokens")
    return EagleIds(ids, ids if lm_rows > len(ids) else None)


def draft_to_target(reading: Reading, size: int) -> tuple[int, ...] | None:
    """Token ids of an EAGLE-3 head's `size` LM head rows, from the offsets d2t; None for the identity.

    Raises:
        CheckpointError: d2t is missing, no offsets, of another length, or contradicts t2d.
    """
    vocab = reading.target.vocab_size
    reading.findings.unused.update(name for name in ("d2t", "t2d") if reading.has(name))
    if not reading.has("d2t"):
        if size != vocab:
            raise CheckpointError(
                f"the draft head has {size} of {vocab} tokens but no d2t that says which; it is "
                "incomplete: fetch it again"
            )
        _check_membership(reading, range(vocab))
        reading.findings.decide("token_ids", None, "tensor", "rows are token ids")
        return None
    offsets = _integers(reading, "d2t")
    if len(offsets) != size:
        raise CheckpointError(f"d2t has {len(offsets)} entries, the LM head {size} rows; {DAMAGED}")
    ids = _absolute(offsets, vocab)
    _check_membership(reading, ids)
    if size == vocab:
        reading.findings.decide("token_ids", None, "tensor", "d2t is all zeros: rows are token ids")
        return None
    reading.findings.decide("token_ids", size, "tensor", f"row + d2t: {size} of {vocab} tokens")
    return ids


def read_ranking(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids of RANKING, or none where the head has no such file.

    Raises:
        CheckpointError: it is no JSON array of distinct token ids.
    """
    file = directory / RANKING
    if not file.exists():
        return ()
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); fetch the head again or remove the file") from None
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise CheckpointError(f"{file} is no JSON array of token ids from 0 to {vocab_size - 1}; remove the file")
    if len(set(ids)) != len(ids):
        raise CheckpointError(f"{file} has token ids twice; fetch the head again or remove the file")
    return tuple(ids)


def _absolute(offsets: tuple[int, ...], vocab: int) -> tuple[int, ...]:
    """Row + offset, checked to be what sorted selected ids give."""
    size = len(offsets)
    if size > 1 and offsets == tuple(range(size)):
        raise CheckpointError(f"d2t is 0, 1, 2, ..., an untouched default that would double every id; {DAMAGED}")
    if size < vocab and not any(offsets):
        raise CheckpointError(
            f"d2t is all zeros, which fits only a head with all {vocab} tokens, not {size}; {DAMAGED}"
        )
    ids = tuple(row + offset for row, offset in enumerate(offsets))
    ascending = all(a < b for a, b in itertools.pairwise(ids))
    if not ids or ids[0] < 0 or ids[-1] >= vocab or not ascending:
        absolute = all(0 <= a < b < vocab for a, b in itertools.pairwise(offsets))
        found = "absolute ids" if absolute else "offsets that give ids out of order or out of range"
        raise CheckpointError(
            f"d2t holds {found}; expected offsets (token id - row) that give ascending ids below {vocab}: {DAMAGED}"
        )
    return ids


def _check_membership(reading: Reading, ids: tuple[int, ...] | range) -> None:
    if not reading.has("t2d"):
        return
    member = reading.tensors.load("t2d")
    expected = torch.zeros(member.shape[0], dtype=torch.bool)
    expected[torch.tensor(list(ids), dtype=torch.int64)] = True
    if not torch.equal(member.to(torch.bool), expected):
        count = int(member.to(torch.bool).sum())
        raise CheckpointError(f"t2d marks {count} tokens, not the {len(ids)} that d2t gives; {DAMAGED}")


def _integers(reading: Reading, name: str) -> tuple[int, ...]:
    reading.vector(name)
    dtype = reading.tensors.tensors[name].dtype
    if dtype not in INTEGERS:
        raise CheckpointError(f"{reading.name(name)} has dtype {dtype}; expected one of: {', '.join(INTEGERS)}")
    return tuple(int(value) for value in reading.tensors.load(name).tolist())
