"""Where n-grams are looked up: by an engine, by kernels, or on the host."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from trtspec.config import Limits
from trtspec.draft.device import DeviceHistory, DeviceLookup
from trtspec.draft.lookup import Lookup
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.proposal_lookup import ProposalLookup
from trtspec.engine.base import Engine
from trtspec.graph.proposal import ProposalConfig
from trtspec.plugins.kernels import launch

logger = logging.getLogger(__name__)


def choose_lookup(device: torch.device, limits: Limits, proposal: tuple[Engine, ProposalConfig] | None) -> Lookup:
    """The lookup of a session.

    On a CPU the host's, which takes 10 to 20 microseconds; on a GPU the kernels, and before them the proposal engine
    where there is one. Kernels need triton; without it the host's takes their place, which is logged.

    Args:
        device: where the target runs.
        proposal: the engine of the proposal graph, and what it was built for.
    """
    if device.type != "cuda":
        return NgramDrafter()
    history = DeviceHistory(limits.max_batch_size, limits.max_seq_len, device)
    kernels: Lookup = NgramDrafter()
    if find_spec("triton") is not None:
        kernels = DeviceLookup(history, limits.max_draft_tokens, launch)
    else:
        logger.warning(
            "n-grams are looked up on the host, because the package triton is not installed; "
            "for the GPU's kernels: pip install 'trtspec[kernels]'"
        )
    return kernels if proposal is None else ProposalLookup(*proposal, history, kernels)
