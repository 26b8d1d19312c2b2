"""The proposal graph: a sequence's history and EAGLE's draft in, one draft tree out, in two nodes.

Both nodes are operations of the plugin, and functions of standard operations for a runtime without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx_ir as ir

from trtspec import tensors
from trtspec.errors import ConfigError
from trtspec.graph.builder import GraphBuilder
from trtspec.graph.function import DOMAIN, DOMAIN_VERSION, call
from trtspec.graph.merge_function import Merge, merge_function
from trtspec.graph.ngram_function import NgramLookup, ngram_function
from trtspec.plugins.definition import LONGEST_MATCH, MAX_COLUMNS
from trtspec.tensors import GraphSpec


@dataclass(frozen=True)
class ProposalConfig:
    """What the proposal graph is made for."""

    max_len: int
    """Length of the history's axis."""
    eagle_nodes: int
    """Room for EAGLE's nodes; where it isn't used, 1, with counts of 0."""
    size: int
    """Room for the nodes of the tree."""
    ngram_min: int
    ngram_max: int
    ngram_tokens: int
    """Tokens of a branch at most."""
    ngram_branches: int
    latest: bool
    """Whether later matches go before earlier ones."""

    def __post_init__(self) -> None:
        for name in ("max_len", "eagle_nodes", "size", "ngram_min", "ngram_max", "ngram_tokens", "ngram_branches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; the proposal graph needs at least 1")
        if not self.ngram_min <= min(self.ngram_max, LONGEST_MATCH):
            raise ConfigError(
                f"ngram_min is {self.ngram_min}; it must be at most ngram_max, which is {self.ngram_max}, and at most "
                f"{LONGEST_MATCH}, up to which the proposal graph counts"
            )
        if self.max_len > MAX_COLUMNS:
            raise ConfigError(f"max_len is {self.max_len}; the proposal graph takes at most {MAX_COLUMNS}")

    @classmethod
    def from_json(cls, data: Mapping[str, int]) -> ProposalConfig:
        """The inverse of `to_json`.

        Raises:
            ConfigError, KeyError, TypeError: the data isn't what `to_json` gives.
        """
        sizes = {name: value for name, value in data.items() if name != "latest"}
        return cls(**sizes, latest=bool(data["latest"]))

    def to_json(self) -> dict[str, int]:
        """A JSON object: the fields by name."""
        return asdict(self)

    @property
    def lookup(self) -> NgramLookup:
        """The first node's sizes and attributes."""
        return NgramLookup(
            max_len=self.max_len,
            ngram_min=self.ngram_min,
            ngram_max=self.ngram_max,
            num_tokens=self.ngram_tokens,
            branches=self.ngram_branches,
            latest=self.latest,
        )

    @property
    def merge(self) -> Merge:
        """The second node's sizes."""
        return Merge(
            branches=self.ngram_branches, num_tokens=self.ngram_tokens, eagle_nodes=self.eagle_nodes, size=self.size
        )


def proposal_spec(config: ProposalConfig) -> GraphSpec:
    """The declared inputs and outputs."""
    return tensors.proposal_spec(
        max_len=config.max_len,
        branches=config.ngram_branches,
        eagle_nodes=config.eagle_nodes,
        size=config.size,
    )


def proposal_graph(config: ProposalConfig) -> ir.Model:
    """The graph with the functions of its two nodes."""
    builder = GraphBuilder(proposal_spec(config), {}, Path())
    inputs = builder.inputs
    lookup, merge = ngram_function(config.lookup), merge_function(config.merge)
    drafting = call(
        lookup, [inputs[name] for name in (tensors.HISTORY, tensors.LENGTHS)], config.lookup.attributes, "/ngram_draft"
    )
    ngram_tokens, ngram_counts, match_lengths = drafting.outputs
    others = (tensors.EAGLE_TOKENS, tensors.EAGLE_PARENTS, tensors.EAGLE_COUNTS, tensors.ROOM)
    # Options and room limit a continuation further than its axis; what lies behind a count is no token.
    counts = builder.op("Min", "/ngram_counts", ngram_counts, inputs[tensors.NGRAM_LIMITS])
    drafts = [ngram_tokens, counts, *(inputs[name] for name in others)]
    merging = call(merge, drafts, config.merge.attributes, "/merge_drafts")
    names = (
        tensors.DRAFT_TOKENS,
        tensors.DRAFT_PARENTS,
        tensors.DRAFT_DEPTHS,
        tensors.DRAFT_SOURCES,
        tensors.DRAFT_COUNTS,
    )
    for name, value in zip(names, merging.outputs, strict=True):
        builder.output(name, value)
    builder.output(tensors.MATCH_LENGTHS, match_lengths)
    model = builder.model()
    model.graph.insert_before(model.graph[0], drafting)
    model.graph.append(merging)
    model.graph.opset_imports[DOMAIN] = DOMAIN_VERSION
    for function in (lookup, merge):
        model.functions[function.identifier()] = function
    return model
