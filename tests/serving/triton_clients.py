"""Clients of a real server over gRPC, and what they read in its responses."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from test_request import tensor
from triton_server import TritonServer

from trtspec.completion import Completion


def ids_of(response: Mapping[str, Any]) -> list[int]:
    """The HTTP endpoint writes a single element without brackets."""
    ids = response["output_ids"]
    return list(ids) if isinstance(ids, list) else [ids]


def assert_same(responses: list[dict[str, Any]], expected: Completion) -> None:
    """Responses of one request that together say what a completion says."""
    assert [token for response in responses for token in ids_of(response)] == expected.token_ids
    assert "".join(response["text_output"] for response in responses) == expected.text
    reasons = [response["finish_reason"] for response in responses]
    assert reasons == [""] * (len(responses) - 1) + [expected.finish_reason]
    assert sum(response["num_draft_tokens"] for response in responses) == expected.stats.draft_tokens
    assert sum(response["num_accepted_tokens"] for response in responses) == expected.stats.accepted_tokens


class GrpcStream:
    """A request over a gRPC stream."""

    def __init__(self, client: Any, model: str, fields: Mapping[str, Any]) -> None:
        self.client = client
        self._answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: self._answers.put((result, error)))
        client.async_stream_infer(model, _inputs(fields), enable_empty_final_response=True)

    def next(self) -> dict[str, Any] | None:
        """The next response; None where the request ended without another.

        Raises:
            InferenceServerException: the request has failed.
        """
        result, error = self._answers.get(timeout=60)
        if error is not None:
            raise error
        message = result.get_response()
        if not message.outputs:
            return None
        response = {output.name: result.as_numpy(output.name).tolist() for output in message.outputs}
        for name in ("text_output", "finish_reason"):
            [response[name]] = [value.decode() for value in response[name]]
        for name in ("num_draft_tokens", "num_accepted_tokens"):
            [response[name]] = response[name]
        return response


@contextlib.contextmanager
def grpc_stream(triton: TritonServer, model: str, **fields: Any) -> Iterator[GrpcStream]:
    """A request over gRPC, with values or arrays by name."""
    import tritonclient.grpc as grpc

    with grpc.InferenceServerClient(f"127.0.0.1:{triton.grpc_port}") as client:
        yield GrpcStream(client, model, fields)


def grpc_infer(triton: TritonServer, model: str, **fields: Any) -> list[dict[str, Any]]:
    """All responses of one request over gRPC.

    Raises:
        InferenceServerException: the request was refused.
    """
    with grpc_stream(triton, model, **fields) as stream:
        responses = []
        while (response := stream.next()) is not None:
            responses.append(response)
            if response["finish_reason"]:
                break
    return responses


def _inputs(fields: Mapping[str, Any]) -> list[Any]:
    """Tensors: of the field's type from values, or arrays as they are."""
    import tritonclient.grpc as grpc
    from tritonclient.utils import np_to_triton_dtype

    inputs = []
    for name, value in fields.items():
        array = value if isinstance(value, np.ndarray) else tensor(name, value)
        each = grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        inputs.append(each.set_data_from_numpy(array))
    return inputs
