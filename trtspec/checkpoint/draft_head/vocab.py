"""Embedding, LM head and token ids of a draft head, and whether they are the target's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trtspec.checkpoint.draft_head.config import EAGLE, HEAD_EMBEDDING, HEAD_LM_HEAD
from trtspec.checkpoint.draft_head.reading import Reading
from trtspec.checkpoint.draft_head.tables import differing_rows
from trtspec.checkpoint.draft_head.token_ids import EagleIds, draft_to_target, eagle_ids
from trtspec.errors import CheckpointError, ConfigError

Table = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Vocabulary:
    """Which tables a head uses; `rows` are those of the file's LM head that are taken, None for all."""

    own_embedding: bool
    own_lm_head: bool
    draft_vocab_size: int
    token_ids: tuple[int, ...] | None
    rows: tuple[int, ...] | None = None


def read_vocabulary(reading: Reading, hidden_size: int, embedding: Table | None, lm_head: Table | None) -> Vocabulary:
    """The head's tables and token ids.

    Args:
        embedding: loads the target's embedding table `[vocab, target hidden]`, for comparison.
        lm_head: the same for its LM head.

    Raises:
        CheckpointError: the head has another vocabulary than the target, lacks a table, or maps ids wrongly.
        ConfigError: the option embedding asks for a table that isn't there or doesn't fit.
    """
    _check_vocab_size(reading)
    own_embedding = _own_embedding(reading, hidden_size, embedding)
    if reading.kind == EAGLE:
        return _eagle_vocabulary(reading, own_embedding, lm_head)
    return _eagle3_vocabulary(reading, hidden_size, own_embedding)


def _check_vocab_size(reading: Reading) -> None:
    target = reading.target.vocab_size
    seen = {name: reading.matrix(name)[0] for name in (HEAD_EMBEDDING,) if reading.has(name)}
    if reading.has("t2d"):
        seen["t2d"] = reading.vector("t2d")
    for name, size in seen.items():
        if size != target:
            raise CheckpointError(
                f"{reading.name(name)} is for a vocabulary of {size} tokens, the target has {target}; use the head of "
                "this target"
            )
    stated = reading.integer("vocab_size")
    if stated is not None and stated != target:
        if not seen:
            raise CheckpointError(
                f"config.json is for a vocabulary of {stated} tokens, the target has {target}; use the head of this "
                "target"
            )
        reading.findings.warn(f"config.json says vocab_size {stated}, the tensors show {target}")


def _own_embedding(reading: Reading, hidden_size: int, target: Table | None) -> bool:
    """Whether the head's own embedding table is used."""
    asked, present = reading.options.get("embedding"), reading.has(HEAD_EMBEDDING)
    fits = hidden_size == reading.target.hidden_size
    if asked == "head" and not present:
        raise ConfigError(f"EAGLE option embedding=head: the draft head has no {HEAD_EMBEDDING}; leave the option out")
    if asked == "target" and not fits:
        raise ConfigError(
            f"EAGLE option embedding=target: the head needs rows of {hidden_size}, the target's have "
            f"{reading.target.hidden_size}; leave the option out"
        )
    if not fits and not present:
        raise reading.missing(
            HEAD_EMBEDDING, f"hidden size {hidden_size} is not the target's, so neither is the embedding"
        )
    if asked is not None:
        own, origin, note = bool(asked == "head"), "option", ""
    elif not fits:
        own, origin, note = True, "tensor", "its hidden size is not the target's"
    elif not present:
        own, origin, note = False, "tensor", "the file has none"
    else:
        own, origin, note = _compare_embedding(reading, target)
    if present and not own:
        reading.findings.unused.add(HEAD_EMBEDDING)
    reading.findings.decide("own_embedding", own, origin, note)
    return own


def _compare_embedding(reading: Reading, target: Table | None) -> tuple[bool, str, str]:
    """Own or not, where it came from and why, for a head that could use either table."""
    if reading.flag("embed_requires_grad"):
        return True, "config", "embed_requires_grad: it was trained"
    if target is None:
        return False, "default", "assumed to be a copy of the target's; not compared"
    difference = differing_rows(reading.tensors.load(HEAD_EMBEDDING), target())
    if difference is None:
        return False, "tensor", "equal to the target's"
    reading.findings.warn(
        f"{reading.name(HEAD_EMBEDDING)} is not the target's embedding table ({difference}); it is normally a frozen "
        "copy, so the target's is used (EAGLE option embedding=head takes the file's)"
    )
    return False, "default", "differs from the target's, which is taken"


def _eagle_vocabulary(reading: Reading, own_embedding: bool, target: Table | None) -> Vocabulary:
    ids = eagle_ids(reading)
    own = _own_eagle_lm_head(reading, ids, target)
    size = reading.target.vocab_size if ids.token_ids is None else len(ids.token_ids)
    return Vocabulary(own_embedding, own, size, ids.token_ids, ids.rows if own else None)


def _own_eagle_lm_head(reading: Reading, ids: EagleIds, target: Table | None) -> bool:
    if not reading.has(HEAD_LM_HEAD):
        reading.findings.decide("own_lm_head", False, "tensor", "the file has none")
        return False
    rows, vocab = reading.matrix(HEAD_LM_HEAD)[0], reading.target.vocab_size
    if rows != vocab and (ids.token_ids is None or rows != len(ids.token_ids)):
        raise CheckpointError(
            f"{reading.name(HEAD_LM_HEAD)} has {rows} rows, the target {vocab} tokens, and no token_map says which "
            "they are; use the head of this target"
        )
    note = "not compared with the target's"
    if target is not None:
        theirs = target()
        if rows != vocab and ids.token_ids is not None:
            theirs = theirs[torch.tensor(ids.token_ids, dtype=torch.int64)]
        difference = differing_rows(reading.tensors.load(HEAD_LM_HEAD), theirs)
        if difference is None:
            reading.findings.unused.add(HEAD_LM_HEAD)
            reading.findings.decide("own_lm_head", False, "tensor", "equal to the target's")
            return False
        note = "differs from the target's"
        reading.findings.warn(
            f"{reading.name(HEAD_LM_HEAD)} is not the target's LM head ({difference}); the file's is used for drafting"
        )
    reading.findings.decide("own_lm_head", True, "tensor", note)
    return True


def _eagle3_vocabulary(reading: Reading, hidden_size: int, own_embedding: bool) -> Vocabulary:
    vocab, stated = reading.target.vocab_size, reading.integer("draft_vocab_size")
    own = reading.has(HEAD_LM_HEAD)
    if own:
        size = reading.matrix(HEAD_LM_HEAD)[0]
        reading.compare("draft_vocab_size", size)
    else:
        mapped = reading.vector("d2t") if reading.has("d2t") else vocab
        size = stated or mapped
        if size != vocab or mapped != vocab or hidden_size != reading.target.hidden_size:
            raise reading.missing(HEAD_LM_HEAD, f"the target's serves only heads with its {vocab} tokens and its width")
    note = "" if own else "the file has none; vocabulary and hidden size are the target's"
    reading.findings.decide("own_lm_head", own, "tensor", note)
    if size > vocab:
        raise CheckpointError(
            f"{reading.name(HEAD_LM_HEAD)} has {size} rows, the target {vocab} tokens; use the head of this target"
        )
    return Vocabulary(own_embedding, own, size, draft_to_target(reading, size))
