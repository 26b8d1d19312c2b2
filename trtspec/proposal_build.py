"""The part `proposal` of an engine directory: lookup and merge as an engine, with the plugins' kernels inside."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from trtspec.config import Limits, SpeculationConfig
from trtspec.engine.tensorrt_build import batch_profiles
from trtspec.errors import DependencyError
from trtspec.graph.proposal import ProposalConfig, proposal_graph, proposal_spec
from trtspec.runtime_build import TENSORRT, Part


def proposal_config(runtime: str, limits: Limits) -> ProposalConfig | None:
    """What a runtime's proposal graph is made for: the options that a user hasn't changed.

    None where there is no such graph: TensorRT-RTX takes no plugins, on a CPU the host's lookup is faster, and a
    directory may leave no room for drafts.
    """
    if runtime != TENSORRT or not limits.max_draft_tokens:
        return None
    options, most = SpeculationConfig(), limits.max_draft_tokens
    return ProposalConfig(
        max_len=limits.max_seq_len,
        eagle_nodes=most,
        # All branches stay whole where they are asked for by themselves.
        size=most * options.ngram_branches,
        ngram_min=options.ngram_min,
        ngram_max=options.ngram_max,
        # `auto` takes as many as there is room for; for others they are cut.
        ngram_tokens=most,
        ngram_branches=options.ngram_branches,
        latest=options.ngram_occurrence == "latest",
    )


def proposal_part(config: ProposalConfig, limits: Limits) -> Part:
    """The graph, for batches up to the directory's."""
    return Part(proposal_spec(config), batch_profiles(limits.max_batch_size), partial(proposal_graph, config))


def register_plugins() -> None:
    """Make the plugins known to TensorRT, whose parser then takes them for the graph's nodes; idempotent.

    Raises:
        DependencyError: TensorRT is missing or too old for them, or triton, which compiles their kernels, is missing.
    """
    if find_spec("triton") is None:
        raise DependencyError("triton", "the plugins of the runtime tensorrt", "kernels")
    from trtspec.plugins import tensorrt_ops

    try:
        tensorrt_ops.register()
    except ImportError as error:
        raise DependencyError("tensorrt", f"the runtime tensorrt ({error})", "tensorrt") from error
