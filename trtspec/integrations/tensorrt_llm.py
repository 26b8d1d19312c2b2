"""The n-gram lookup as a user-provided drafter of TensorRT-LLM's PyTorch backend.

Written against the interface that TensorRT-LLM 1.4.0rc4 documents (`UserProvidedDecodingConfig` and its base class
`Drafter`) and tested with a stand-in for it. **It has not been run with TensorRT-LLM itself.**

    from trtspec.integrations.tensorrt_llm import ngram_decoding
    llm = LLM(model, speculative_config=ngram_decoding(), disable_overlap_scheduler=True)

The overlap scheduler must be off: with it a step is prepared before the tokens of the one before are known.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import numpy as np

from trtspec.config import SpeculationConfig
from trtspec.draft.ngram import find_match
from trtspec.errors import ConfigError, DependencyError

PURPOSE = "the drafter for TensorRT-LLM"


def ngram_decoding(speculation: SpeculationConfig | None = None, *, max_concurrency: int | None = None) -> Any:
    """The `speculative_config` of a TensorRT-LLM `LLM` that drafts by trtspec's lookup.

    Args:
        speculation: the lookup's options; see `NgramDrafting`.
        max_concurrency: sequences of a batch up to which is drafted; None: always.

    Returns:
        A `tensorrt_llm.llmapi.UserProvidedDecodingConfig`.

    Raises:
        ConfigError: an option has no equivalent there; TensorRT-LLM's base class is another one than expected.
        DependencyError: TensorRT-LLM is not installed.
    """
    drafter = _drafter_class()(speculation, max_concurrency=max_concurrency)
    try:
        from tensorrt_llm.llmapi import UserProvidedDecodingConfig
    except ImportError as error:
        raise _missing(error) from None
    return UserProvidedDecodingConfig(max_draft_len=drafter.max_draft_len, drafter=drafter)


class NgramDrafting:
    """What `NgramDrafter` adds to TensorRT-LLM's `Drafter`: lookups by the rules of trtspec.draft.ngram.

    Uses ngram_min, ngram_max, ngram_tokens and ngram_occurrence; drafts are single paths, so ngram_branches must be 1.
    Each request's own prompt and output are searched. A request without a match gets an empty draft. TensorRT-LLM
    itself pads drafts for its CUDA graphs.
    """

    _needs_padding_kv_extension = True
    # ^ For drafters whose sampler counts padding as draft tokens, as that of user-provided ones does.
    max_draft_len: int

    def __init__(self, speculation: SpeculationConfig | None = None, *, max_concurrency: int | None = None) -> None:
        """See `ngram_decoding`.

        Raises:
            ConfigError: another method than n-gram lookup, or several branches.
        """
        options = speculation or SpeculationConfig(method="ngram")
        if options.method not in (None, "ngram"):
            raise ConfigError(f"method is {options.method!r}; the drafter for TensorRT-LLM is ngram only")
        if options.ngram_branches != 1:
            raise ConfigError(f"ngram_branches is {options.ngram_branches}; TensorRT-LLM takes one path: give 1")
        self.speculation = options
        initialise: Any = super().__init__
        initialise(
            max_draft_len=options.ngram_tokens,
            max_total_draft_tokens=options.ngram_tokens,
            max_concurrency=max_concurrency,
        )

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        """Set `py_draft_tokens` of every request that decodes: a list of at most max_draft_len token ids.

        Args:
            scheduled_requests: TensorRT-LLM's `ScheduledRequests` of this step.
            resource_manager: not used; the lookup keeps no state.
        """
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens = self._draft(request)

    def _draft(self, request: Any) -> list[int]:
        history = np.asarray(request.get_tokens(0), dtype=np.int32)
        # The target's own token follows the draft and must fit, too.
        room = request.py_orig_prompt_len + request.py_max_new_tokens - len(history) - 1
        # max_draft_len is read in every step: TensorRT-LLM lowers it where the user schedules draft lengths.
        match = find_match(
            history,
            ngram_min=self.speculation.ngram_min,
            ngram_max=self.speculation.ngram_max,
            num_tokens=min(self.max_draft_len, room),
            occurrence=self.speculation.ngram_occurrence,
        )
        return [] if match is None else [int(token) for token in match.continuation]


def __getattr__(name: str) -> Any:
    """`NgramDrafter`, made on first use: its base class is TensorRT-LLM's."""
    if name == "NgramDrafter":
        return _drafter_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _drafter_class() -> Any:
    """The class `NgramDrafter`.

    It is kept in the module because TensorRT-LLM's worker processes unpickle drafters by module and name.

    Raises:
        ConfigError: TensorRT-LLM's `Drafter` has another constructor than the one written for.
        DependencyError: TensorRT-LLM is not installed.
    """
    known = globals().get("NgramDrafter")
    if known is not None:
        return known
    try:
        from tensorrt_llm._torch.speculative.drafter import Drafter
    except ImportError as error:
        raise _missing(error) from None
    if "max_total_draft_tokens" not in inspect.signature(Drafter.__init__).parameters:
        raise ConfigError(
            "the installed TensorRT-LLM has a Drafter without max_total_draft_tokens, which the drafter is not written "
            "for; install version 1.4 or use --method ngram of trtspec export tensorrt-llm"
        )
    names = {"__module__": __name__, "__doc__": "trtspec's n-gram lookup; see NgramDrafting."}
    made = types.new_class("NgramDrafter", (NgramDrafting, Drafter), exec_body=lambda body: body.update(names))
    globals()["NgramDrafter"] = made
    return made


def _missing(error: ImportError) -> Exception:
    """What to raise where TensorRT-LLM can't be imported."""
    if isinstance(error, ModuleNotFoundError) and error.name == "tensorrt_llm":
        return DependencyError("tensorrt-llm", PURPOSE, "tensorrt-llm")
    return ConfigError(f"TensorRT-LLM is installed but {PURPOSE} can't use it ({error}); it is written for version 1.4")
