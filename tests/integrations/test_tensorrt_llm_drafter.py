"""The drafter for TensorRT-LLM against a stand-in for what TensorRT-LLM documents of drafters."""

from __future__ import annotations

import importlib.util
import pickle
import sys

import numpy as np
import pytest
from tensorrt_llm_stand_in import Drafter, OldDrafter, Request, ScheduledRequests, decode, install

from trtspec.config import SpeculationConfig
from trtspec.draft.ngram import find_match
from trtspec.errors import ConfigError, DependencyError
from trtspec.integrations import tensorrt_llm


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in in TensorRT-LLM's place."""
    install(monkeypatch)


def drafts_of(tokens: list[int], max_new_tokens: int = 50, **options: object) -> list[int]:
    """What is drafted behind a prompt."""
    request = Request(tokens, max_new_tokens)
    drafter = tensorrt_llm.NgramDrafter(SpeculationConfig(**options))  # type: ignore[arg-type]
    drafter.prepare_draft_tokens(ScheduledRequests([request]))
    return request.py_draft_tokens


@pytest.mark.usefixtures("installed")
def test_the_configuration_has_room_for_the_drafts() -> None:
    config = tensorrt_llm.ngram_decoding(SpeculationConfig(ngram_tokens=7), max_concurrency=4)
    assert (config.max_draft_len, config.resource_manager) == (7, None)
    drafter = config.drafter
    assert isinstance(drafter, Drafter)
    assert isinstance(drafter, tensorrt_llm.NgramDrafting)
    assert (drafter.max_draft_len, drafter.max_total_draft_tokens, drafter.max_concurrency) == (7, 7, 4)
    assert tensorrt_llm.ngram_decoding().max_draft_len == SpeculationConfig().ngram_tokens


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ngram_min": 2, "ngram_max": 2, "ngram_tokens": 2}, [1, 9]),
        ({"ngram_min": 2, "ngram_max": 2, "ngram_tokens": 2, "ngram_occurrence": "latest"}, [2, 9]),
        ({"ngram_min": 2, "ngram_max": 3, "ngram_tokens": 1}, [2]),
        ({"ngram_min": 4, "ngram_max": 5}, []),
    ],
)
def test_rules_of_the_lookup(options: dict[str, object], expected: list[int]) -> None:
    tokens = [7, 8, 1, 9, 7, 8, 2, 9, 7, 8]
    assert drafts_of(tokens, **options) == expected
    assert tokens == [7, 8, 1, 9, 7, 8, 2, 9, 7, 8]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("max_new_tokens", "expected"), [(1, []), (2, [3]), (4, [3, 1, 2]), (9, [3, 1, 2])])
def test_the_target_s_own_token_must_fit_behind_the_draft(max_new_tokens: int, expected: list[int]) -> None:
    assert drafts_of([1, 2, 3, 1, 2], max_new_tokens) == expected


@pytest.mark.usefixtures("installed")
def test_drafts_equal_the_session_s_lookup() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        tokens = random.integers(0, 4, random.integers(1, 40)).tolist()
        match = find_match(np.array(tokens, dtype=np.int32), ngram_min=2, ngram_max=5, num_tokens=10)
        found = drafts_of(tokens)
        assert found == ([] if match is None else match.continuation.tolist())
        assert all(type(token) is int for token in found)


@pytest.mark.usefixtures("installed")
def test_only_requests_that_decode_get_drafts() -> None:
    waiting, decoding = Request([1, 2, 1, 2], 9), Request([1, 2, 1, 2], 9)
    tensorrt_llm.NgramDrafter().prepare_draft_tokens(
        ScheduledRequests([decoding], [waiting]), resource_manager=object()
    )
    assert (waiting.py_draft_tokens, decoding.py_draft_tokens) == ([], [1, 2])


@pytest.mark.usefixtures("installed")
def test_a_draft_length_lowered_by_the_schedule_is_followed() -> None:
    request, drafter = Request([1, 2, 3, 4, 5, 1, 2], 20), tensorrt_llm.NgramDrafter()
    drafter.max_draft_len = 2
    drafter.prepare_draft_tokens(ScheduledRequests([request]))
    assert request.py_draft_tokens == [3, 4]
    drafter.max_draft_len = 0
    drafter.prepare_draft_tokens(ScheduledRequests([request]))
    assert request.py_draft_tokens == []


@pytest.mark.usefixtures("installed")
def test_decoding_gives_the_target_s_tokens_in_fewer_steps() -> None:
    def target(tokens: list[int]) -> int:
        return (tokens[-1] * 5 + 3) % 23 if len(tokens) % 40 else 1

    prompts = [[4, 9, 4], [0], [7, 7, 7, 7]]
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(120):
            tokens.append(target(tokens))
        expected.append(tokens)
    requests = [Request(list(prompt), 120) for prompt in prompts]
    steps = decode(tensorrt_llm.NgramDrafter(), requests, target)
    assert [request.tokens for request in requests] == expected
    assert steps < 70


@pytest.mark.usefixtures("installed")
def test_worker_processes_can_unpickle_it() -> None:
    drafter = tensorrt_llm.NgramDrafter(SpeculationConfig(ngram_tokens=3, ngram_occurrence="latest"))
    again = pickle.loads(pickle.dumps(drafter))
    assert type(again) is tensorrt_llm.NgramDrafter
    assert (again.max_draft_len, again.speculation) == (3, drafter.speculation)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        (SpeculationConfig(method="ngram-eagle"), "ngram only"),
        (SpeculationConfig(ngram_branches=2), "ngram_branches is 2"),
    ],
)
def test_what_has_no_equivalent_is_refused(speculation: SpeculationConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tensorrt_llm.ngram_decoding(speculation)


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_llm") is not None, reason="TensorRT-LLM is installed here")
def test_without_tensorrt_llm() -> None:
    with pytest.raises(DependencyError, match=r"pip install 'trtspec\[tensorrt-llm\]'"):
        tensorrt_llm.ngram_decoding()
    with pytest.raises(AttributeError, match="Nothing"):
        _ = tensorrt_llm.Nothing


def test_an_installation_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.delattr(sys.modules["tensorrt_llm._torch.speculative.drafter"], "Drafter")
    with pytest.raises(ConfigError, match="is installed but"):
        tensorrt_llm.ngram_decoding()


def test_an_older_tensorrt_llm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, OldDrafter)
    with pytest.raises(ConfigError, match="max_total_draft_tokens"):
        tensorrt_llm.ngram_decoding()
