"""Arrays to requests: every field's meaning, and a message that names the field for everything that is wrong."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.completion import StreamEvent
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.errors import ConfigError, PromptError, RequestError
from trtspec.serving.request import INPUTS, OUTPUTS, explain, output_arrays, parse_request

DTYPES = {"STRING": np.object_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
FIELD = {field.name: field for field in INPUTS}


def text(*values: str | bytes) -> np.ndarray:
    """A string tensor as the server hands it over."""
    return np.array([value.encode() if isinstance(value, str) else value for value in values], dtype=np.object_)


def tensor(name: str, *values: Any) -> np.ndarray:
    """A tensor of the type that a field has."""
    field = FIELD[name]
    return text(*values) if field.dtype == "STRING" else np.array(values, dtype=DTYPES[field.dtype])


def parse(chat: bool = False, **fields: Any) -> Any:
    """A request with a prompt and these fields, single values or arrays."""
    inputs = {"text_input": text("Hi")} | {
        name: value if isinstance(value, np.ndarray) else tensor(name, value) for name, value in fields.items()
    }
    return parse_request(inputs, chat=chat)


def refused(**fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    return str(caught.value)


def test_what_is_left_out_has_the_defaults_of_the_command_line() -> None:
    request = parse()
    assert request.prompt == "Hi"
    assert (request.sampling, request.speculation) == (SamplingParams(), SpeculationConfig())
    assert (request.stream, request.timeout) == (False, None)


def test_every_field_arrives() -> None:
    request = parse(
        max_tokens=7,
        temperature=0.7,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=2**64 - 1,
        stop_words=text("\n\n", "Ende"),
        method="ngram-eagle",
        merge="union",
        stream=True,
        ignore_eos=True,
    )
    assert request.sampling == SamplingParams(
        max_new_tokens=7,
        temperature=0.7,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=2**64 - 1,
        stop=("\n\n", "Ende"),
        ignore_eos=True,
    )
    assert request.speculation == SpeculationConfig(method="ngram-eagle", merge="union")
    assert request.stream is True


def test_the_table_sets_fields_that_exist() -> None:
    for field in INPUTS:
        if field.setting:
            assert hasattr(SamplingParams(), field.setting) or hasattr(SpeculationConfig(), field.setting)


def test_text_is_a_message_for_the_chat_template_or_raw() -> None:
    assert parse(chat=True).prompt == [{"role": "user", "content": "Hi"}]
    assert parse(chat=False).prompt == "Hi"


@pytest.mark.parametrize("chat", [False, True])
def test_token_ids_are_taken_as_they_are(chat: bool) -> None:
    assert parse_request({"input_ids": tensor("input_ids", 5, 6, 7)}, chat=chat).prompt == [5, 6, 7]


def test_no_stop_words() -> None:
    assert parse(stop_words=text()).sampling.stop == ()


@pytest.mark.parametrize("name", FIELD)
def test_wrong_type(name: str) -> None:
    message = refused(**{name: np.array([1 + 2j])})
    assert message.startswith(f"{name} has elements of type complex128; give "), message


@pytest.mark.parametrize("name", FIELD)
@pytest.mark.parametrize("shape", [(), (1, 1), (2,), (0,)])
def test_wrong_shape(name: str, shape: tuple[int, ...]) -> None:
    values = np.full(shape, b"none" if FIELD[name].dtype == "STRING" else 1, dtype=DTYPES[FIELD[name].dtype])
    if FIELD[name].size < 0 and values.ndim == 1:
        return
    message = refused(**{name: values})
    assert message.startswith(f"{name} has the shape {list(shape)}; give "), message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_tokens", 0, "max_tokens is 0; give an integer of at least 1"),
        ("max_tokens", -(2**31), "max_tokens is -2147483648; give"),
        ("temperature", -0.5, "temperature is -0.5; give a number from 0 to"),
        ("temperature", float("nan"), "temperature is nan; give a number"),
        ("temperature", float("inf"), "temperature is inf; give a number"),
        ("temperature", 1e-7, "temperature is 1e-07; give 0, which is greedy, or at least 1e-06"),
        ("top_k", -1, "top_k is -1; give an integer of at least 0"),
        ("top_p", 0.0, "top_p is 0.0; give a number above 0"),
        ("top_p", 1.5, "top_p is 1.5; give a number from 0 to 1"),
        ("top_p", float("nan"), "top_p is nan"),
        ("min_p", -1.0, "min_p is -1.0; give a number from 0 to 1"),
        ("repetition_penalty", 0.0, "repetition_penalty is 0.0; give a number from"),
        ("repetition_penalty", float("nan"), "repetition_penalty is nan"),
        ("method", "fly", "method 'fly' is unknown; choose one of: none, ngram, eagle, ngram-eagle"),
        ("method", "", "method '' is unknown"),
        ("merge", "both", "merge 'both' is unknown; choose one of: auto, exclusive, union"),
        ("method", b"\xff", "method is not UTF-8 (byte 0); convert it"),
        ("stop_words", "", "stop_words holds an empty text"),
        ("stop_words", b"a\xed\xa0\x80", "stop_words is not UTF-8 (byte 1)"),
        ("text_input", b"ab\xc3", "text_input is not UTF-8 (byte 2)"),
        ("text_input", "", "text_input is empty; give"),
        ("text_input", " \n", "text_input is empty; give"),
    ],
)
def test_wrong_value(name: str, value: Any, words: str) -> None:
    assert refused(**{name: value}).startswith(words)


def test_exactly_one_prompt() -> None:
    with pytest.raises(RequestError, match=r"^text_input and input_ids are both missing; give"):
        parse_request({}, chat=True)
    assert refused(input_ids=5) == "text_input and input_ids are both there; give one of them"


@pytest.mark.parametrize(("ids", "words"), [((), "input_ids is empty"), ((4, -1), "input_ids holds -1")])
def test_wrong_token_ids(ids: tuple[int, ...], words: str) -> None:
    with pytest.raises(RequestError, match=f"^{words}"):
        parse_request({"input_ids": tensor("input_ids", *ids)}, chat=False)


def test_unknown_field() -> None:
    with pytest.raises(RequestError, match=r"^max_token is no field of a request; the fields are: text_input, .*max_"):
        parse_request({"text_input": text("Hi"), "max_token": np.array([4], np.int32)}, chat=False)


def test_text_that_is_no_bytes() -> None:
    assert refused(text_input=np.array(["Hi"], dtype=np.object_)) == "text_input holds a str; give text (BYTES, UTF-8)"


@given(st.floats(width=32, min_value=2.0**-19, max_value=1e6))
def test_a_number_is_the_shortest_decimal_of_its_float32(number: float) -> None:
    found = parse(temperature=number).sampling.temperature
    assert np.float32(found) == np.float32(number)
    assert repr(found) == repr(float(str(np.float32(number))))


def test_errors_about_prompts_name_the_field() -> None:
    error = PromptError("too long")
    assert explain(error, parse()) == "text_input: too long"
    assert explain(error, parse(chat=True)) == "text_input: too long"
    assert explain(error, parse_request({"input_ids": tensor("input_ids", 1)}, chat=True)) == "input_ids: too long"
    assert explain(ConfigError("method x"), parse()) == "method x"


def test_responses() -> None:
    arrays = output_arrays(StreamEvent(0, "für", [5, 6], None, 4, 1))
    assert [(name, array.shape, array.dtype) for name, array in arrays.items()] == [
        ("text_output", (1,), np.object_),
        ("output_ids", (2,), np.int32),
        ("finish_reason", (1,), np.object_),
        ("num_draft_tokens", (1,), np.int32),
        ("num_accepted_tokens", (1,), np.int32),
    ]
    assert [array.tolist() for array in arrays.values()] == [["für".encode()], [5, 6], [b""], [4], [1]]
    last = output_arrays(StreamEvent(0, "", [], "stop"))
    assert [array.tolist() for array in last.values()] == [[b""], [], [b"stop"], [0], [0]]
    assert list(last) == [field.name for field in OUTPUTS]


NUMBERS = (np.int32, np.int64, np.uint64, np.float32, np.float64, np.uint8, np.float16)
SHAPES = ((), (0,), (1,), (2,), (1, 1), (3, 2))
WORDS = (b"", b"none", b"ngram", b"auto", b"\xff", b"Hi", "😀".encode(), b"\0", b" ", b"a\xf0\x9f")
PATTERNS = (
    *(bytes(8), b"\1" + bytes(7), b"\xff" * 8, bytes(3) + b"\x80" + bytes(4)),
    *(struct.pack("<f", value) * 2 for value in (0.5, 1.0, -1.0, 2.0, 1e30, float("nan"), float("inf"), 1e-8)),
)
"""Bytes that are edges as integers or as floats."""
STRANGE = (np.array(b"x", dtype=np.object_), np.array([None]), np.array([1, "a"], dtype=np.object_))


def elements(kind: Any, shape: tuple[int, ...], pattern: bytes) -> np.ndarray:
    """An array of this type and shape with these bytes."""
    return np.frombuffer(pattern * 8, dtype=np.uint8).view(kind)[: int(np.prod(shape))].reshape(shape)


def random_tensor(rng: random.Random, name: str) -> np.ndarray:
    """Mostly of the field's type and shape, with a value that is often wrong."""
    field = FIELD.get(name)
    kind = rng.randrange(12)
    if kind == 0 or field is None:
        return elements(rng.choice(NUMBERS), rng.choice(SHAPES), rng.choice(PATTERNS))
    if kind == 1:
        return text(*rng.choices(WORDS, k=rng.randrange(4)))
    if kind == 2:
        return rng.choice(STRANGE)
    if field.dtype == "STRING":
        return text(rng.choice(WORDS))
    if field.dtype == "BOOL":
        return tensor(name, rng.random() < 0.5)
    return elements(DTYPES[field.dtype], (1,), rng.choice(PATTERNS))


def test_random_requests_are_read_or_refused_by_name() -> None:
    rng = random.Random(7)
    read = refused = 0
    for _ in range(3000):
        names = rng.sample([*FIELD, "max_token"], k=rng.choice((0, 1, 2, 3, 6, 15)))
        try:
            request = parse_request({name: random_tensor(rng, name) for name in names}, chat=rng.random() < 0.5)
        except RequestError as error:
            assert str(error).startswith((*FIELD, "max_token ")), error
            assert "\n" not in str(error)
            refused += 1
        else:
            assert request.sampling.max_new_tokens >= 1
            assert request.prompt
            read += 1
    assert refused > 1000
    assert read > 50


def test_defaults_of_the_directory_hold_where_the_request_says_nothing() -> None:
    tuned = SpeculationConfig(method="ngram", ngram_tokens=4)
    text = {"text_input": np.array([b"hello"], dtype=np.object_)}
    assert parse_request(text, chat=False, defaults=tuned).speculation == tuned
    asked = {**text, "method": np.array([b"none"], dtype=np.object_)}
    found = parse_request(asked, chat=False, defaults=tuned).speculation
    assert (found.method, found.ngram_tokens) == ("none", 4)
