"""Requests to a server, as named arrays: the table of their fields, and arrays to requests and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trtspec.config import MERGES, METHODS, SamplingParams, SpeculationConfig
from trtspec.errors import ConfigError, PromptError, RequestError
from trtspec.prompt import Prompt

if TYPE_CHECKING:
    from trtspec.completion import StreamEvent

_DTYPES: dict[str, Any] = {
    "STRING": np.object_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
}
"""Data types by Triton Inference Server's name, and how its Python backend holds them: strings as objects, `bytes`."""


@dataclass(frozen=True)
class Field:
    """A tensor of a request or a response."""

    name: str
    dtype: str
    """A key of _DTYPES."""
    size: int = 1
    """Elements of its one dimension; -1: any number."""
    setting: str | None = None
    """The field of SamplingParams or SpeculationConfig that it sets."""


INPUTS = (
    Field("text_input", "STRING"),
    Field("input_ids", "INT32", -1),
    Field("max_tokens", "INT32", setting="max_new_tokens"),
    Field("temperature", "FP32", setting="temperature"),
    Field("top_k", "INT32", setting="top_k"),
    Field("top_p", "FP32", setting="top_p"),
    Field("min_p", "FP32", setting="min_p"),
    Field("repetition_penalty", "FP32", setting="repetition_penalty"),
    Field("seed", "UINT64", setting="seed"),
    Field("stop_words", "STRING", -1, setting="stop"),
    Field("method", "STRING", setting="method"),
    Field("merge", "STRING", setting="merge"),
    Field("stream", "BOOL"),
    Field("ignore_eos", "BOOL", setting="ignore_eos"),
)
"""What a request may hold; it needs one of the first two."""
OUTPUTS = (
    Field("text_output", "STRING"),
    Field("output_ids", "INT32", -1),
    Field("finish_reason", "STRING"),
    Field("num_draft_tokens", "INT32"),
    Field("num_accepted_tokens", "INT32"),
)
"""What every response holds."""
_INPUT = {field.name: field for field in INPUTS}
_OF_SPECULATION = ("method", "merge")
_CHOICES = {"method": METHODS, "merge": MERGES}
_LEAST = {"max_tokens": 1, "top_k": 0}


@dataclass(frozen=True)
class Request:
    """What a client asks for."""

    prompt: Prompt
    sampling: SamplingParams
    speculation: SpeculationConfig
    stream: bool
    """False: one event at the end."""
    timeout: float | None = None
    """Seconds from submission within which the answer must be complete."""


def parse_request(
    inputs: Mapping[str, np.ndarray],
    *,
    chat: bool,
    timeout: float | None = None,
    defaults: SpeculationConfig = SpeculationConfig(),  # noqa: B008 - it is frozen
) -> Request:
    """The request that arrays stand for.

    Args:
        inputs: arrays by the names of INPUTS, each `[1]` or `[any]`, dtypes as in _DTYPES; what is left out has the
            default of SamplingParams.
        defaults: how drafts are made where the request doesn't say.
        chat: `text_input` is a user's message for the chat template; otherwise it is taken as it is.

    Raises:
        RequestError: a field is unknown, has the wrong type, shape or value, or there is not exactly one prompt. The
            message names it.
    """
    check_names(inputs)
    values = {name: _value(_INPUT[name], array) for name, array in inputs.items()}
    prompt = _prompt(values, chat)
    settings = {field.setting: values[field.name] for field in INPUTS if field.setting and field.name in values}
    speculation = {name: settings.pop(name) for name in _OF_SPECULATION if name in settings}
    try:
        return Request(
            prompt,
            SamplingParams(**settings),
            dataclasses.replace(defaults, **speculation),
            values.get("stream", False),
            timeout,
        )
    except ConfigError as error:
        # All that SamplingParams calls otherwise than the fields is checked before.
        raise RequestError(str(error)) from None


def check_names(names: Iterable[str]) -> None:
    """Raise RequestError where a name is not among INPUTS."""
    for name in names:
        if name not in _INPUT:
            raise RequestError(f"{name} is no field of a request; the fields are: {', '.join(_INPUT)}")


def explain(error: Exception, request: Request) -> str:
    """What to tell the client: an error about a prompt names the field that holds it."""
    if not isinstance(error, PromptError):
        return str(error)
    is_ids = not isinstance(request.prompt, str) and not isinstance(request.prompt[0], Mapping)
    return f"{'input_ids' if is_ids else 'text_input'}: {error}"


def output_arrays(event: StreamEvent) -> dict[str, np.ndarray]:
    """A response: OUTPUTS by name, each `[1]` or, for `output_ids`, `[new tokens]`.

    Text, ids and counts are what came since the response before, so their sums over a request are its totals.
    """
    values: dict[str, Any] = {
        "text_output": [event.text.encode()],
        "output_ids": event.token_ids,
        "finish_reason": [(event.finish_reason or "").encode()],
        "num_draft_tokens": [event.draft_tokens],
        "num_accepted_tokens": [event.accepted_tokens],
    }
    return {field.name: np.array(values[field.name], dtype=_DTYPES[field.dtype]) for field in OUTPUTS}


def _value(field: Field, array: np.ndarray) -> Any:
    """A field's value as a Python object, checked for itself."""
    if array.dtype != _DTYPES[field.dtype]:
        expected = "text (BYTES)" if field.dtype == "STRING" else field.dtype
        raise RequestError(f"{field.name} has elements of type {array.dtype}; give {expected}")
    if array.ndim != 1 or (field.size > 0 and array.shape[0] != field.size):
        expected = "one element, shape [1]" if field.size > 0 else "one dimension, shape [number of elements]"
        raise RequestError(f"{field.name} has the shape {list(array.shape)}; give {expected}")
    if field.dtype == "STRING":
        texts = [_text(field, element) for element in array]
        return texts[0] if field.size > 0 else tuple(texts)
    if field.size < 0:
        return array.tolist()
    if field.dtype == "FP32":
        # The shortest decimal fraction that is this float32: a client's 0.7 is the 0.7 of the command line.
        return float(str(array[0]))
    value = array.tolist()[0]
    least = _LEAST.get(field.name)
    if least is not None and value < least:
        raise RequestError(f"{field.name} is {value}; give an integer of at least {least}")
    return value


def _text(field: Field, element: Any) -> str:
    if not isinstance(element, bytes):
        raise RequestError(f"{field.name} holds a {type(element).__name__}; give text (BYTES, UTF-8)")
    try:
        text = element.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{field.name} is not UTF-8 (byte {error.start}); convert it") from None
    if field.name == "stop_words" and not text:
        raise RequestError("stop_words holds an empty text; give texts of at least one character, or leave it out")
    if field.name in _CHOICES and text not in _CHOICES[field.name]:
        raise RequestError(f"{field.name} {text!r} is unknown; choose one of: {', '.join(_CHOICES[field.name])}")
    return text


def _prompt(values: Mapping[str, Any], chat: bool) -> Prompt:
    text, ids = values.get("text_input"), values.get("input_ids")
    if text is not None and ids is not None:
        raise RequestError("text_input and input_ids are both there; give one of them")
    if ids is not None:
        if not ids:
            raise RequestError("input_ids is empty; give at least one token id")
        if min(ids) < 0:
            raise RequestError(f"input_ids holds {min(ids)}; token ids are not negative")
        return list(ids)
    if text is None:
        raise RequestError("text_input and input_ids are both missing; give one of them")
    if not text.strip():
        raise RequestError("text_input is empty; give a text, or token ids as input_ids")
    return [{"role": "user", "content": text}] if chat else str(text)
