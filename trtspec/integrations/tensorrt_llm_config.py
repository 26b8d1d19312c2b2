"""The speculative part of a TensorRT-LLM configuration, and what TensorRT-LLM has no equivalent for.

Fields are those of the LLM API reference of TensorRT-LLM 1.4.0rc4 (NGramDecodingConfig, Eagle3DecodingConfig,
SAEnhancerConfig); docs/tensorrt-llm.md lists them with their sources. Nothing here imports TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from trtspec.checkpoint.draft_head.config import EAGLE3, DraftHeadConfig
from trtspec.config import AUTO, EXCLUSIVE, HEAD_METHODS, SpeculationConfig
from trtspec.errors import ConfigError

VERSION = "1.4.0rc4"
SPECULATIVE = "speculative_config"
# The formats of the heads that TensorRT-LLM's documentation links, and SpecForge's, which has their names.
KNOWN_FORMATS = ("eagle3-official", "eagle3-specforge", "eagle3-nvidia")
EAGLE1_REMEDY = "TensorRT-LLM takes EAGLE-3 heads only (its support for EAGLE-1 and 2 went with its TensorRT engines)"


@dataclass(frozen=True)
class ExportedHead:
    """What the export needs to know of a draft head."""

    model: str
    """Its directory or hub id, as the user named it."""
    config: DraftHeadConfig | None
    """None: an EAGLE-1 head, of which nothing else is needed."""
    decisions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """How it was wired: value and origin of every decision, by name."""
    lm_head: str = "own"
    """One of engine_dir.DRAFT_LM_HEADS."""

    @property
    def eagle3(self) -> DraftHeadConfig | None:
        """Its configuration if it is an EAGLE-3 head, the only kind that TensorRT-LLM takes."""
        return self.config if self.config is not None and self.config.kind == EAGLE3 else None


@dataclass(frozen=True)
class Export:
    """A configuration, the method that it is for, and what was asked for that it can't express, a line each."""

    method: str
    config: Mapping[str, Any]
    missing: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The drafting in a few words."""
        fields = self.config[SPECULATIVE]
        if fields is None:
            return "no speculative decoding"
        also = " with suffix automaton" if "sa_config" in fields else ""
        return f"{fields['decoding_type']}{also}, max_draft_len {fields['max_draft_len']}"

    def to_yaml(self) -> str:
        """The file's text: comments, then the configuration."""
        lines = [
            f"Speculative decoding for the PyTorch backend of TensorRT-LLM {VERSION}: what comes nearest to trtspec's",
            f"method {self.method}. Written by trtspec export tensorrt-llm; it has not been run with TensorRT-LLM.",
            "Use it with: trtllm-serve MODEL --config FILE, where MODEL is the target's Hugging Face checkpoint.",
            *(["No equivalent:"] if self.missing else []),
            *(f"- {line}" for line in self.missing),
        ]
        head = "".join(f"# {line}\n" for line in lines)
        body: str = yaml.safe_dump(dict(self.config), sort_keys=False, allow_unicode=True)
        return head + body


def export(speculation: SpeculationConfig, head: ExportedHead | None) -> Export:
    """The configuration for a method, by default the best of those that TensorRT-LLM has an equivalent for.

    Args:
        head: the draft head that the source has; None: none.

    Raises:
        ConfigError: the method needs an EAGLE-3 head and there is none, or one that takes a state TensorRT-LLM can't.
    """
    method, missing = speculation.method, []
    head_config = None if head is None else head.eagle3
    if method is None:
        method = "ngram" if head_config is None else "ngram-eagle"
        if head is not None and head_config is None:
            missing.append(f"the draft head {head.model} is left out and only the lookup exported: {EAGLE1_REMEDY}")
    if method not in HEAD_METHODS:
        config: dict[str, Any] = {SPECULATIVE: None}
        if method == "ngram":
            config = {SPECULATIVE: _ngram_fields(speculation), "disable_overlap_scheduler": True}
            missing += _ngram_missing(speculation)
        return Export(method, config, _as_lines(missing))
    if head is None:
        raise ConfigError(f"--method {method} needs an EAGLE-3 head; add --eagle HEAD, or use --method ngram")
    if head_config is None:
        raise ConfigError(f"the draft head {head.model} is an EAGLE-1 or 2 head: {EAGLE1_REMEDY}; use --method ngram")
    both = method == "ngram-eagle"
    fields, tree_missing = _eagle_fields(speculation, head.model, head_config, as_chain=both)
    if both:
        fields["sa_config"] = {"threshold": speculation.hybrid_ngram_min, "enable_global_pool": False}
        missing += _hybrid_missing(speculation, fields["max_draft_len"])
    missing += [*tree_missing, *_head_missing(head, head_config)]
    return Export(method, {SPECULATIVE: fields}, _as_lines(missing))


def _as_lines(missing: list[str]) -> tuple[str, ...]:
    """Each in one line, whatever the names in it hold."""
    return tuple(" ".join(line.split()) for line in missing)


def _ngram_fields(speculation: SpeculationConfig) -> dict[str, Any]:
    return {
        "decoding_type": "NGram",
        "max_draft_len": speculation.ngram_tokens,
        "max_matching_ngram_size": speculation.ngram_max,
        # All continuations are kept, or the occurrence could not be chosen; each request has its own, as here.
        "is_keep_all": True,
        "is_use_oldest": speculation.ngram_occurrence == "earliest",
        "is_public_pool": False,
    }


def _ngram_missing(speculation: SpeculationConfig) -> Iterator[str]:
    if speculation.ngram_min > 1:
        yield f"--ngram-min {speculation.ngram_min}: matches of every length down to 1 token are drafted from"
    which = "oldest" if speculation.ngram_occurrence == "earliest" else "newest"
    yield (
        f"--ngram-occurrence {speculation.ngram_occurrence}: the {which} stored continuation is taken, and shorter "
        "ones are dropped when a longer one is stored, so it may be another one"
    )
    yield from _branches_missing(speculation)


def _branches_missing(speculation: SpeculationConfig) -> Iterator[str]:
    if speculation.ngram_branches > 1:
        yield f"--ngram-branches {speculation.ngram_branches}: only one continuation is drafted"


def _eagle_fields(
    speculation: SpeculationConfig, model: str, head: DraftHeadConfig, *, as_chain: bool
) -> tuple[dict[str, Any], list[str]]:
    """The fields of an EAGLE-3 draft, and what they can't express.

    Args:
        as_chain: no tree, whatever was asked for: the suffix automaton is ignored beside a dynamic tree.
    """
    fields: dict[str, Any] = {"decoding_type": "Eagle3", "speculative_model": model}
    missing = []
    if speculation.eagle_topk == 1:
        fields["max_draft_len"] = speculation.eagle_tokens
    else:
        # A path is as long as the levels, the first one included, but has no more tokens than the whole tree.
        nodes, width = speculation.tree_nodes, speculation.eagle_topk
        length = min(speculation.eagle_depth + 1, nodes)
        fields["max_draft_len"] = length
        if as_chain:
            missing.append(f"--eagle-topk {width}: a tree does not go with lookups; a chain of {length} is drafted")
        else:
            most = width * length
            fields.update(use_dynamic_tree=True, dynamic_tree_max_topK=width, max_total_draft_tokens=min(nodes, most))
            if nodes > most:
                missing.append(f"--tree-nodes {nodes}: at most dynamic_tree_max_topK * max_draft_len = {most}")
    layers = _layers_to_capture(model, head)
    if layers is not None:
        fields["eagle3_layers_to_capture"] = layers
    return fields, missing


def _layers_to_capture(model: str, head: DraftHeadConfig) -> list[int] | None:
    """The target's layers whose outputs the head takes: boundary b is the output of layer b - 1.

    Always named where there are any, since what TensorRT-LLM does by default need not be what this head was made for.
    """
    if head.feature != "boundaries":
        return None
    if 0 in head.boundaries:
        raise ConfigError(
            f"the draft head {model} takes the target's embeddings (boundary 0), which TensorRT-LLM can't give; "
            "use --method ngram"
        )
    return [boundary - 1 for boundary in head.boundaries]


def _hybrid_missing(speculation: SpeculationConfig, length: int) -> Iterator[str]:
    """What of ngram-eagle the suffix automaton beside an EAGLE-3 chain does not do."""
    replaced = f"a match of at least {speculation.hybrid_ngram_min} tokens replaces all of its tokens"
    if speculation.merge == EXCLUSIVE:
        yield f"--merge {EXCLUSIVE}: the head runs in every step; {replaced}"
    else:
        what = "no draft is sized by its cost" if speculation.merge == AUTO else "both drafts are never in one tree"
        yield f"--merge {speculation.merge}: {what}; the head runs in every step, and {replaced}"
    if speculation.ngram_tokens != length:
        yield f"--ngram-tokens {speculation.ngram_tokens}: both drafters have one draft length, max_draft_len {length}"
    yield (
        f"--ngram-min {speculation.ngram_min}, --ngram-max {speculation.ngram_max}: the automaton takes the longest "
        "match of any length"
    )
    if speculation.ngram_occurrence != "earliest":
        yield f"--ngram-occurrence {speculation.ngram_occurrence}: the automaton continues the earliest match"
    yield from _branches_missing(speculation)


def _head_missing(head: ExportedHead, config: DraftHeadConfig) -> Iterator[str]:
    """What of this head TensorRT-LLM does otherwise, or is not known to do."""
    if config.source_format not in KNOWN_FORMATS:
        yield f"the head's file format ({config.source_format}): whether TensorRT-LLM reads it is not known"
    if config.residual == "normed":
        yield "norm_before_residual: TensorRT-LLM adds the raw hidden state in the first layer, so fewer drafts hold"
    unknown = {
        "a head without fc": not config.has_fc,
        "norms of the target's features": config.feature_norm != "none",
        "norms of queries and keys": config.qk_norm,
        "double_hidden_norm": config.double_hidden_norm,
    }
    for name, present in unknown.items():
        if present:
            yield f"{name}: whether TensorRT-LLM does this is not known"
    for name, decision in head.decisions.items():
        # Boundaries are exported.
        if decision["origin"] == "option" and name != "boundaries":
            yield f"--eagle-option for {name}: TensorRT-LLM follows the head's own config.json"
    if head.lm_head in ("reduced", "int4"):
        kind = "4-bit draft LM head" if head.lm_head == "int4" else "reduced draft vocabulary"
        yield f"the {kind} of the engine directory: TensorRT-LLM drafts with the head's own LM head and vocabulary"
