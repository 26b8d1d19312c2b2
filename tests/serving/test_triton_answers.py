"""What clients of a real server get: the tokens of a session, in whole characters, counted; or an error by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import serve
from test_request import FIELD, PATTERNS, WORDS, elements, tensor, text
from triton_clients import assert_same, grpc_infer, ids_of
from triton_server import TritonServer

from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.session import Session

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]
WORDS_PROMPT = "w5 w6 w7 w8 w9 w5 w6"
METHODS = ("none", "ngram", "eagle", "ngram-eagle")


@pytest.fixture(scope="module")
def triton(server: TritonServer, tiny_dir: Path, head_dir: Path) -> TritonServer:
    """A server with the models `text` (real tokenizer, chat template, no head) and `heads`."""
    serve(server, tiny_dir, "text")
    serve(server, head_dir, "heads")
    return server


@pytest.fixture(scope="module")
def text_session(tiny_dir: Path) -> Iterator[Session]:
    with Session.open(tiny_dir, threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def head_session(head_dir: Path) -> Iterator[Session]:
    with Session.open(head_dir, threads=1) as session:
        yield session


def test_one_response_or_a_stream_over_http(triton: TritonServer, text_session: Session) -> None:
    sampling = SamplingParams(max_new_tokens=60, temperature=1.3, seed=5, ignore_eos=True)
    [expected] = text_session.generate([[{"role": "user", "content": "Grüße an 😀"}]], sampling)
    fields = {"text_input": "Grüße an 😀", "max_tokens": 60, "temperature": 1.3, "seed": 5, "ignore_eos": True}
    assert_same([triton.generate("text", **fields)], expected)
    streamed = triton.stream("text", **fields)
    assert len(streamed) > 20
    assert_same(streamed, expected)


def test_one_response_or_a_stream_over_grpc(triton: TritonServer, text_session: Session) -> None:
    sampling = SamplingParams(max_new_tokens=40, temperature=0.7, top_p=0.9, top_k=50, seed=2**64 - 1)
    [expected] = text_session.generate([[{"role": "user", "content": "Hello"}]], sampling)
    fields = {"text_input": "Hello", "max_tokens": 40, "temperature": 0.7, "top_p": 0.9, "top_k": 50}
    fields |= {"seed": 2**64 - 1}
    [whole] = grpc_infer(triton, "text", **fields)
    assert_same([whole], expected)
    streamed = grpc_infer(triton, "text", stream=True, **fields)
    assert len(streamed) > 10
    assert_same(streamed, expected)


def test_every_chunk_holds_whole_characters(triton: TritonServer, text_session: Session) -> None:
    """Random byte-level tokens: characters begin in one and end in another, or never."""
    for seed in range(3):
        sampling = SamplingParams(max_new_tokens=60, temperature=3.0, seed=seed, ignore_eos=True)
        [expected] = text_session.generate([[{"role": "user", "content": "a"}]], sampling)
        streamed = triton.stream("text", text_input="a", max_tokens=60, temperature=3.0, seed=seed, ignore_eos=True)
        found = ""
        for response in streamed:
            found += response["text_output"]
            assert expected.text.startswith(found)
        assert found == expected.text


def test_token_ids_and_stop_words(triton: TritonServer, head_session: Session) -> None:
    ids = [5, 6, 7, 8, 9]
    [plain] = head_session.generate([ids], SamplingParams(max_new_tokens=30, ignore_eos=True))
    words = plain.text.split()
    stop = (f"{words[7]} {words[8]}", words[20])
    [expected] = head_session.generate([ids], SamplingParams(max_new_tokens=30, ignore_eos=True, stop=stop))
    assert expected.finish_reason == "stop"
    fields = {"input_ids": ids, "max_tokens": 30, "ignore_eos": True, "stop_words": list(stop)}
    answer = triton.generate("heads", **fields)
    assert (ids_of(answer), answer["text_output"], answer["finish_reason"]) == (
        expected.token_ids,
        expected.text,
        "stop",
    )


def test_sixteen_clients_get_what_each_gets_alone(triton: TritonServer, head_session: Session) -> None:
    cases = []
    for number in range(16):
        sampled = number % 3 != 0
        fields: dict[str, Any] = {
            "input_ids": [3 + (number * 7 + at * (number % 5 + 1)) % 60 for at in range(4 + number)],
            "max_tokens": 20 + 3 * number % 40,
            "method": METHODS[number % 4],
            "merge": ("auto", "exclusive", "union")[number % 3],
            "ignore_eos": True,
            **({"temperature": 0.9, "seed": number, "min_p": 0.02} if sampled else {}),
            **({"repetition_penalty": 1.2} if number % 5 == 0 else {}),
        }
        settings = {name: value for name, value in fields.items() if name not in ("input_ids", "method", "merge")}
        settings["max_new_tokens"] = settings.pop("max_tokens")
        speculation = SpeculationConfig(method=fields["method"], merge=fields["merge"])
        [expected] = head_session.generate([fields["input_ids"]], SamplingParams(**settings), speculation)
        cases.append((fields, expected))
    found: list[list[dict[str, Any]] | BaseException] = [[] for _ in cases]

    def ask(number: int) -> None:
        fields = cases[number][0]
        try:
            if number % 2:
                found[number] = triton.stream("heads", **fields)
            elif number % 4:
                found[number] = [triton.generate("heads", **fields)]
            else:
                arrays = {**fields, "input_ids": tensor("input_ids", *fields["input_ids"])}
                found[number] = grpc_infer(triton, "heads", stream=True, **arrays)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (fields, expected), responses in zip(cases, found, strict=True):
        assert isinstance(responses, list), responses
        assert [token for response in responses for token in ids_of(response)] == expected.token_ids, fields
        assert "".join(response["text_output"] for response in responses) == expected.text
        assert responses[-1]["finish_reason"] == expected.finish_reason


def test_metrics_are_the_sums_of_what_clients_were_told(triton: TritonServer, head_session: Session) -> None:
    before = triton.metrics()
    told: dict[str, float] = {"draft": 0, "accepted": 0, "ngram draft": 0, "eagle draft": 0, "emitted": 0, "steps": 0}
    for number, method in enumerate(("none", "ngram", "eagle", "eagle", "ngram")):
        fields = {"text_input": WORDS_PROMPT, "max_tokens": 30 + number, "method": method, "ignore_eos": True}
        responses = triton.stream("heads", **fields) if number % 2 else [triton.generate("heads", **fields)]
        drafted = sum(response["num_draft_tokens"] for response in responses)
        told["draft"] += drafted
        told["accepted"] += sum(response["num_accepted_tokens"] for response in responses)
        if method != "none":
            told[f"{method} draft"] += drafted
        told["emitted"] += sum(len(ids_of(response)) for response in responses) - 1
        sampling = SamplingParams(max_new_tokens=30 + number, ignore_eos=True)
        [expected] = head_session.generate([WORDS_PROMPT], sampling, SpeculationConfig(method=method))
        told["steps"] += expected.stats.steps
        assert_same(responses, expected)
    after = triton.metrics()
    counted = {series: value - before.get(series, 0) for series, value in after.items()}
    assert told["accepted"] > 0
    assert counted["trtspec_decode_steps_total"] == told["steps"]
    assert counted["trtspec_emitted_tokens_total"] == told["emitted"]
    assert counted['trtspec_draft_tokens_total{source="ngram"}'] == told["ngram draft"]
    assert counted['trtspec_draft_tokens_total{source="eagle"}'] == told["eagle draft"]
    accepted = sum(counted[f'trtspec_accepted_tokens_total{{source="{source}"}}'] for source in ("ngram", "eagle"))
    positions = [value for series, value in counted.items() if "per_position" in series]
    assert accepted == sum(positions) == told["accepted"]
    assert 'trtspec_accepted_tokens_per_position_total{position="0"}' in counted
    assert (after["trtspec_active_sequences"], after["trtspec_queued_requests"]) == (0, 0)


def test_instances_share_the_counters(triton: TritonServer, tiny_dir: Path) -> None:
    serve(triton, tiny_dir, "pair", instances=2)
    assert len(triton.stubs("pair")) == 2
    before = triton.metrics()
    with ThreadPoolExecutor(6) as clients:
        fields = {"max_tokens": 40, "ignore_eos": True}
        answers = list(clients.map(lambda number: triton.stream("pair", text_input=f"Hi {number}", **fields), range(6)))
    after = triton.metrics()
    drafted = sum(response["num_draft_tokens"] for responses in answers for response in responses)
    accepted = sum(response["num_accepted_tokens"] for responses in answers for response in responses)
    for series, value in {
        "trtspec_emitted_tokens_total": 6 * 39,
        "trtspec_decode_steps_total": 6 * 39 - accepted,
        'trtspec_draft_tokens_total{source="ngram"}': drafted,
        'trtspec_accepted_tokens_total{source="ngram"}': accepted,
        "trtspec_active_sequences": 0,
        "trtspec_queued_requests": 0,
    }.items():
        assert after[series] - before[series] == value, series
    triton.unload("pair")
    assert triton.metrics() == after


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "text_input and input_ids are both missing"),
        ({"text_input": "w5", "input_ids": [5]}, "text_input and input_ids are both there"),
        ({"text_input": ""}, "text_input is empty"),
        ({"text_input": "w5 " * 200}, "text_input: the prompt has 200 tokens and the engine directory holds 96"),
        ({"input_ids": [5, 64]}, "input_ids: token ids must lie in 0..63"),
        ({"input_ids": [-5]}, "input_ids holds -5"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"text_input": "w5", "max_tokens": 0}, "max_tokens is 0"),
        ({"text_input": "w5", "temperature": -1.0}, "temperature is -1.0"),
        ({"text_input": "w5", "temperature": 1e99}, "temperature is inf"),
        ({"text_input": "w5", "top_k": -1}, "top_k is -1"),
        ({"text_input": "w5", "top_p": 2.0}, "top_p is 2.0"),
        ({"text_input": "w5", "min_p": -0.5}, "min_p is -0.5"),
        ({"text_input": "w5", "repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"text_input": "w5", "stop_words": ["a", ""]}, "stop_words holds an empty text"),
        ({"text_input": "w5", "method": "medusa"}, "method 'medusa' is unknown"),
        ({"text_input": "w5", "merge": "sum"}, "merge 'sum' is unknown"),
        ({"text_input": "w5", "max_token": 5}, "max_token is no field of a request"),
        ({"text_input": "w5", "timeout": -1}, "timeout is -1; give microseconds"),
        ({"text_input": "w5", "timeout": "soon"}, "timeout is 'soon'; give microseconds"),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_the_field(
    triton: TritonServer, fields: dict[str, Any], words: str
) -> None:
    assert triton.refused("heads", **fields).startswith(words)
    [response] = triton.stream("heads", **fields)
    assert response["error"].startswith(words)


def test_text_that_is_not_utf8(triton: TritonServer) -> None:
    status, answer = triton.request("POST", "/v2/models/text/generate", b'{"text_input": "ab\xff"}')
    assert (status, json.loads(answer)["error"]) == (400, "text_input is not UTF-8 (byte 2); convert it")


def test_errors_have_codes(triton: TritonServer) -> None:
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException, match="max_tokens is 0; give an integer of at least 1"):
        grpc_infer(triton, "heads", text_input="w5", max_tokens=0)
    with pytest.raises(InferenceServerException, match="method eagle needs a draft head"):
        grpc_infer(triton, "text", text_input="w5", method="eagle")


def test_a_request_that_takes_longer_than_it_may(triton: TritonServer) -> None:
    message = triton.refused("text", text_input="a", max_tokens=400, ignore_eos=True, timeout=5000)
    assert message.startswith("the answer was not complete within 0.005 s")


def test_a_hundred_malformed_requests_harm_nobody(triton: TritonServer, head_session: Session) -> None:
    """Tensors of the right type, often with wrong values, and some of the wrong type or shape."""
    from tritonclient.utils import InferenceServerException

    rng = np.random.default_rng(11)
    refused = 0
    for _ in range(100):
        fields: dict[str, np.ndarray] = {}
        for name in rng.permutation(list(FIELD))[: rng.integers(1, 6)]:
            dtype = FIELD[name].dtype
            kind = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}.get(dtype)
            if kind is None or rng.random() < 0.1:
                fields[name] = text(WORDS[rng.integers(len(WORDS))]) if dtype != "BOOL" else np.array([True])
            else:
                shape = (1,) if rng.random() < 0.9 else (2,)
                fields[name] = elements(kind, shape, PATTERNS[rng.integers(len(PATTERNS))])
        try:
            grpc_infer(triton, "heads", **fields)
        except InferenceServerException as error:
            refused += 1
            assert any(name in str(error) for name in (*FIELD, "token ids")), (fields, error)
    assert refused > 60
    assert triton.request("GET", "/v2/health/ready")[0] == 200
    [expected] = head_session.generate([WORDS_PROMPT], SamplingParams(max_new_tokens=20), SpeculationConfig("ngram"))
    assert_same([triton.generate("heads", text_input=WORDS_PROMPT, max_tokens=20, method="ngram")], expected)
