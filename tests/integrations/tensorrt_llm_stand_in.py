"""What TensorRT-LLM documents of user-provided drafters, and no more: modules, a base class, requests, a batch.

`decode` stands for the executor: it asks for drafts, pads them as TensorRT-LLM does for its CUDA graphs, and accepts
the prefix that a toy target agrees with.
"""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

Target = Callable[[list[int]], int]
"""The token that a toy target puts behind a sequence."""


class Drafter(ABC):
    """The base class, with the constructor and the attributes that drafters rely on."""

    def __init__(
        self,
        max_draft_len: int | None = None,
        max_total_draft_tokens: int | None = None,
        max_concurrency: int | None = None,
        draft_len_schedule: dict[int, int] | None = None,
    ) -> None:
        self.max_draft_len = max_draft_len
        self.max_total_draft_tokens = max_total_draft_tokens
        self.padded_len = max_total_draft_tokens
        self.max_concurrency = max_concurrency
        self.draft_len_schedule = draft_len_schedule

    @abstractmethod
    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None: ...


class OldDrafter:
    """The base class as it was in TensorRT-LLM 1.0."""

    def __init__(self, max_concurrency: int | None = None) -> None:
        self.max_concurrency = max_concurrency


@dataclass
class UserProvidedDecodingConfig:
    """Takes a drafter and how much room its drafts need."""

    max_draft_len: int
    drafter: Any
    resource_manager: Any = None


@dataclass
class Request:
    """A request of one beam."""

    tokens: list[int]
    py_max_new_tokens: int
    py_draft_tokens: list[int] = field(default_factory=list)
    py_orig_prompt_len: int = 0

    def __post_init__(self) -> None:
        self.py_orig_prompt_len = len(self.tokens)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.tokens

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        return self.py_orig_prompt_len + self.py_max_new_tokens - len(self.tokens)


@dataclass
class ScheduledRequests:
    """One step's requests: those whose prompt runs, and those that decode."""

    generation_requests: list[Request]
    context_requests: list[Request] = field(default_factory=list)


def install(monkeypatch: pytest.MonkeyPatch, drafter: type = Drafter) -> None:
    """Make the modules importable for one test, with an `NgramDrafter` of their own."""
    from trtspec.integrations import tensorrt_llm

    contents: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {},
        "tensorrt_llm.llmapi": {"UserProvidedDecodingConfig": UserProvidedDecodingConfig},
        "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.speculative": {},
        "tensorrt_llm._torch.speculative.drafter": {"Drafter": drafter},
    }
    for name, members in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    # Set and deleted again, so that monkeypatch also takes away what the test leaves there.
    monkeypatch.setitem(vars(tensorrt_llm), "NgramDrafter", None)
    monkeypatch.delitem(vars(tensorrt_llm), "NgramDrafter")


def decode(drafter: Any, requests: list[Request], target: Target) -> int:
    """Decode all requests to their ends and return the number of steps."""
    steps = 0
    while active := [request for request in requests if request.room > 0]:
        steps += 1
        drafter.prepare_draft_tokens(ScheduledRequests(active))
        for request in active:
            drafts = request.py_draft_tokens
            assert isinstance(drafts, list)
            assert len(drafts) <= drafter.padded_len
            drafts.extend([0] * (drafter.padded_len - len(drafts)))
            _verify(request, drafts, target)
    return steps


def _verify(request: Request, drafts: list[int], target: Target) -> None:
    for draft in [*drafts, None]:
        if request.room == 0:
            return
        token = target(request.tokens)
        request.tokens.append(token)
        if token != draft:
            return
