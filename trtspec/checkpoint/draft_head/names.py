"""Tensor names of draft head files, turned into canonical ones, and tensors read under those."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from trtspec.checkpoint.draft_head.config import EAGLE, EAGLE3
from trtspec.checkpoint.shards import FileRange, TensorInfo, TensorSource
from trtspec.errors import CheckpointError

PREFIXES = ("model.model.", "model.")
EVERYWHERE = [(r"draft_id_to_target_id", "d2t")]
# Patterns of whole names, after prefixes are gone; the first that matches is applied.
RULES: dict[str, list[tuple[str, str]]] = {
    EAGLE: [
        (r"fusion_fc\.(weight|bias)", r"fc.\1"),
        (r"(?:transformer\.input_layernorm|hidden_layernorm)\.weight", "layers.0.input_norm.weight"),
        (r"transformer\.(.+)", r"layers.0.\1"),
        (
            r"(?:enorm|embed_layernorm|embedding_layernorm|post_embedding_layernorm)\.weight",
            "embedding_norm.weight",
        ),
        (r"hnorm\.weight", "hidden_norm.weight"),
        (r"(?:lm_head_layernorm|pre_lm_head_layernorm)\.weight", "norm.weight"),
        (r"layers\.(\d+)\.input_layernorm\.weight", r"layers.\1.input_norm.weight"),
    ],
    EAGLE3: [
        (r"(?:midlayer|midlayer\.0|layers\.0)\.input_layernorm\.weight", "embedding_norm.weight"),
        (r"(?:midlayer|midlayer\.0|layers\.0)\.hidden_norm\.weight", "hidden_norm.weight"),
        # Runtimes disagree on the name of the one norm before the attention of later layers.
        (r"(?:midlayer|layers)\.(\d+)\.(?:input_layernorm|hidden_norm)\.weight", r"layers.\1.input_norm.weight"),
        (r"midlayer\.(\d+\..+)", r"layers.\1"),
        (r"midlayer\.(.+)", r"layers.0.\1"),
        (r"input_norm\.weight", "feature_norm.weight"),
        (r"fc_norms?\.(\d+)\.weight", r"feature_norm.\1.weight"),
    ],
}


@dataclass(frozen=True)
class Part:
    """A tensor of the file, or some of its rows: those from `start` to `stop`, or those that `ids` lists."""

    name: str
    start: int = 0
    stop: int | None = None
    ids: tuple[int, ...] | None = None

    def describe(self, info: TensorInfo) -> TensorInfo:
        """The description of this part of a tensor that has the given one."""
        if self.ids is not None:
            return TensorInfo(info.dtype, (len(self.ids), *info.shape[1:]))
        if self.stop is None:
            return info
        at, rows = info.file_range, self.stop - self.start
        if at is not None:
            row = at.nbytes // info.shape[0]
            at = FileRange(at.path, at.offset + self.start * row, rows * row)
        return TensorInfo(info.dtype, (rows, *info.shape[1:]), at)


class RenamedSource:
    """Tensors of another source under new names, whole or some of their rows; nothing is loaded before it's asked."""

    def __init__(self, source: TensorSource, parts: Mapping[str, Part]) -> None:
        self._source = source
        self.parts = dict(parts)
        self.tensors: dict[str, TensorInfo] = {
            name: part.describe(source.tensors[part.name]) for name, part in self.parts.items()
        }

    def load(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype; treat it as read-only.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be read.
        """
        if name not in self.parts:
            raise CheckpointError(f"the draft head has no tensor {name}")
        part = self.parts[name]
        tensor = self._source.load(part.name)
        if part.ids is not None:
            return tensor[torch.tensor(part.ids, dtype=torch.int64)]
        return tensor if part.stop is None else tensor[part.start : part.stop]

    def restricted(self, changes: Mapping[str, Part], names: Iterable[str]) -> RenamedSource:
        """The named tensors alone, in that order, some of them replaced."""
        parts = {**self.parts, **changes}
        return RenamedSource(self._source, {name: parts[name] for name in names})


def base_names(names: Iterable[str]) -> dict[str, str]:
    """The file's names by the same name without the prefixes that wrappers add (`module.`, `model.`).

    Raises:
        CheckpointError: two tensors have one name without their prefixes.
    """
    result: dict[str, str] = {}
    for name in names:
        base = name
        while base.startswith("module."):
            base = base.removeprefix("module.")
        for prefix in PREFIXES:
            if base.startswith(prefix):
                base = base.removeprefix(prefix)
                break
        _add(result, _apply(EVERYWHERE, base), name)
    return result


def canonical_names(kind: str, base: Mapping[str, str]) -> dict[str, str]:
    """The file's names by canonical name; one that no rule knows stays as it is.

    Raises:
        CheckpointError: two tensors mean the same weight.
    """
    result: dict[str, str] = {}
    for name, original in base.items():
        _add(result, _apply(RULES[kind], name), original)
    return result


def name_in_file(kind: str, canonical: str) -> str:
    """How most files of this kind call a weight, for messages."""
    if kind == EAGLE3:
        renamed = {
            "embedding_norm.weight": "layers.0.input_layernorm.weight",
            "hidden_norm.weight": "layers.0.hidden_norm.weight",
            "feature_norm.weight": "input_norm.weight",
        }
        canonical = re.sub(r"feature_norm\.(\d+)\.", r"fc_norm.\1.", renamed.get(canonical, canonical))
    else:
        renamed = {"embedding_norm.weight": "enorm.weight", "hidden_norm.weight": "hnorm.weight"}
        canonical = renamed.get(canonical, canonical)
    return re.sub(r"(layers\.\d+)\.input_norm", r"\1.input_layernorm", canonical)


def _add(names: dict[str, str], name: str, original: str) -> None:
    if name in names:
        raise CheckpointError(f"the draft head has both {names[name]} and {original}, one weight; remove one of them")
    names[name] = original


def _apply(rules: Iterable[tuple[str, str]], name: str) -> str:
    for pattern, replacement in rules:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return match.expand(replacement)
    return name
