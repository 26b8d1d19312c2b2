"""Opening an EAGLE draft head of any writer as one canonical record, with every decision that was made on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from trtspec.checkpoint.draft_head.config import HEAD_LM_HEAD, DraftHeadConfig, weight_shapes
from trtspec.checkpoint.draft_head.features import read_features
from trtspec.checkpoint.draft_head.format import identify
from trtspec.checkpoint.draft_head.names import RenamedSource, canonical_names
from trtspec.checkpoint.draft_head.numbers import read_numbers
from trtspec.checkpoint.draft_head.options import check_kind, parse_options
from trtspec.checkpoint.draft_head.reading import Decision, Findings, Reading
from trtspec.checkpoint.draft_head.sizes import read_biases, read_sizes, split_fused
from trtspec.checkpoint.draft_head.token_ids import read_ranking
from trtspec.checkpoint.draft_head.vocab import Vocabulary, read_vocabulary
from trtspec.checkpoint.draft_head.wiring import read_wiring
from trtspec.checkpoint.hub import download, is_hub_id
from trtspec.checkpoint.shards import TensorSource, open_tensors, read_json
from trtspec.checkpoint.target import TargetConfig
from trtspec.errors import CheckpointError
from trtspec.tensors import SERVING_DTYPES

NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
# The target's tables, which some files hold copies of for its own engine.
VERIFIER_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True)
class DraftHead:
    """A draft head, opened but not loaded.

    `tensors` has the names of `weight_shapes(config)` and no others, in the dtypes of the file, which may be mixed.
    """

    config: DraftHeadConfig
    tensors: TensorSource
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    ranking: tuple[int, ...] = ()
    """Token ids, the most frequent first, where the head comes with such a list."""


def open_draft_head(
    path: str | Path,
    target: TargetConfig,
    options: Mapping[str, str] = NO_OPTIONS,
    target_embedding: Callable[[], torch.Tensor] | None = None,
    target_lm_head: Callable[[], torch.Tensor] | None = None,
) -> DraftHead:
    """Open the head in a directory, or of a hub id, for use with a target.

    Args:
        options: wiring decisions by key of OPTIONS.
        target_embedding: loads the target's embedding table `[vocab, hidden]`, to compare the head's copy with.
        target_lm_head: the same for its LM head, of which EAGLE-1 files made for vLLM hold a copy.

    Raises:
        CheckpointError: there is no head, it can't be read, is not supported, incomplete, or another target's.
        ConfigError: an option is unknown, malformed, or contradicts the head.
    """
    chosen = parse_options(options)
    directory = _directory(path)
    source = open_tensors(directory)
    found = identify(read_json(directory / "config.json"), source.tensors)
    check_kind(chosen, found.kind)
    _reject_unsupported(found.config)
    parts = split_fused(canonical_names(found.kind, found.names), source.tensors, found.config)
    reading = Reading(
        found.kind, found.source_format, found.config, RenamedSource(source, parts), target, chosen, Findings()
    )
    reading.findings.decide("kind", found.kind, "tensor")
    reading.findings.decide("source_format", found.source_format, "tensor")
    config, vocabulary = _read(reading, target_embedding, target_lm_head)
    return DraftHead(
        config=config,
        tensors=_checked(reading, config, vocabulary),
        decisions=tuple(reading.findings.decisions),
        warnings=tuple(reading.findings.warnings),
        ranking=read_ranking(directory, target.vocab_size),
    )


def describe(head: DraftHead) -> dict[str, Any]:
    """What `trtspec inspect` shows of a head, as a JSON object: every decision with its origin, and the problems."""
    ids = head.config.token_ids
    dtypes: dict[str, int] = {}
    for info in head.tensors.tensors.values():
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + 1
    return {
        "kind": "draft head",
        "config": {**head.config.to_json(), "token_ids": None if ids is None else len(ids)},
        "decisions": {decision.name: decision.to_json() for decision in head.decisions},
        "tensors": len(head.tensors.tensors),
        "dtypes": dtypes,
        "problems": list(head.warnings),
    }


def _directory(path: str | Path) -> Path:
    directory = Path(path).expanduser()
    if directory.is_file():
        raise CheckpointError(f"{path} is a file; give the directory that holds the draft head and its config.json")
    if not directory.is_dir():
        if not isinstance(path, str) or not is_hub_id(path):
            raise CheckpointError(f"{path} does not exist; expected a draft head's directory or a hub id owner/name")
        directory = download(path)
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json; expected a draft head's directory")
    return directory.absolute()


def _reject_unsupported(config: Mapping[str, Any]) -> None:
    """Fields that change what the head computes and that the graph does not have."""
    if config.get("quantization_config"):
        raise CheckpointError("the draft head's weights are quantised, which is not read; use the unquantised head")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {config['hidden_act']!r} is not supported in a draft head (only silu)")
    if (config.get("pretraining_tp") or 1) != 1:
        raise CheckpointError(f"pretraining_tp {config['pretraining_tp']} is not supported (only 1)")


def _read(
    reading: Reading,
    target_embedding: Callable[[], torch.Tensor] | None,
    target_lm_head: Callable[[], torch.Tensor] | None,
) -> tuple[DraftHeadConfig, Vocabulary]:
    sizes = read_sizes(reading)
    features = read_features(reading, sizes.hidden_size)
    vocabulary = read_vocabulary(reading, sizes.hidden_size, target_embedding, target_lm_head)
    config = DraftHeadConfig(
        kind=reading.kind,
        source_format=reading.source_format,
        target_hidden_size=reading.target.hidden_size,
        vocab_size=reading.target.vocab_size,
        draft_vocab_size=vocabulary.draft_vocab_size,
        own_embedding=vocabulary.own_embedding,
        own_lm_head=vocabulary.own_lm_head,
        token_ids=vocabulary.token_ids,
        **vars(sizes),
        **vars(features),
        **vars(read_biases(reading, sizes.num_layers)),
        **vars(read_wiring(reading)),
        **vars(read_numbers(reading)),
    )
    return config, vocabulary


def _checked(reading: Reading, config: DraftHeadConfig, vocabulary: Vocabulary) -> RenamedSource:
    """The weights that the configuration asks for, all there, of the right shape and dtype, and none left over."""
    expected = weight_shapes(config)
    lm_head = reading.tensors.parts.get(HEAD_LM_HEAD)
    changes = {}
    if vocabulary.rows is not None and lm_head is not None:
        changes[HEAD_LM_HEAD] = dataclasses.replace(lm_head, ids=vocabulary.rows)
    for name in expected:
        reading.shape(name)
    tensors = reading.tensors.restricted(changes, expected)
    for name, shape in expected.items():
        info = tensors.tensors[name]
        if info.shape != shape:
            raise CheckpointError(
                f"{reading.name(name)} has shape {list(info.shape)}, expected {list(shape)}; "
                "is config.json this head's?"
            )
        if info.dtype not in SERVING_DTYPES:
            raise CheckpointError(
                f"{reading.name(name)} has dtype {info.dtype}; supported: {', '.join(SERVING_DTYPES)}: use an "
                "unquantised head"
            )
    _check_surplus(reading, expected)
    return tensors


def _check_surplus(reading: Reading, expected: Mapping[str, tuple[int, ...]]) -> None:
    for name in reading.tensors.tensors:
        if name in expected or name in reading.findings.unused:
            continue
        if name in VERIFIER_TENSORS:
            reading.leave_out(name, "it is the target's")
            continue
        raise CheckpointError(
            f"the draft head has a tensor {reading.name(name)}, which an {reading.kind} head "
            f"({reading.source_format}) has not; leaving it out could change what it drafts"
        )
