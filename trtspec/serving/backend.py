"""The model of Triton Inference Server's Python backend: glue between its requests and a worker.

One thread, the worker's, sends answers and asks whether clients have gone: when several threads did both at once,
tritonserver 2.51 crashed. Refusals are sent by the thread that calls `execute`, which does nothing else.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

# The server's stub process provides it.
import triton_python_backend_utils as pb_utils

from trtspec.completion import StreamEvent
from trtspec.config import SpeculationConfig
from trtspec.errors import (
    ConfigError,
    PromptError,
    RequestError,
    TrtspecError,
    UnavailableError,
    UserError,
)
from trtspec.serving.metrics import Metrics
from trtspec.serving.model_repository import ServingOptions
from trtspec.serving.request import Request, check_names, explain, output_arrays, parse_request
from trtspec.serving.worker import Worker
from trtspec.session import Session

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.01
"""How long an answer to "has the client gone?" holds: each question is a message to the server's process."""
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_SERVER_PARAMETERS = frozenset(
    ("id", "timeout", "priority", "binary_data_output", "sequence_id", "sequence_start", "sequence_end")
)


class TritonPythonModel:
    """One instance of the model: a process with a session of its own."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the engine directory; the server shows what is raised here as the model's state.

        Args:
            args: strings; `model_config` is config.pbtxt as JSON.

        Raises:
            TritonModelException: a parameter is wrong, or the engine directory can't be served here.
        """
        _log_to_stderr()
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        try:
            _check_numpy()
            options = ServingOptions.from_parameters(parameters)
            device = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
            self._chat, self._defaults = False, SpeculationConfig()
            self._metrics = Metrics(pb_utils)
            self._worker = Worker(
                functools.partial(self._open, options, device), max_queued=options.max_queued, observer=self._metrics
            )
        except TrtspecError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        logger.info("serving %s with %s", options.engine_dir, options.runtime)

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the worker, which answers them; those that are wrong are answered here."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                parsed = self._parse(request)
                self._worker.submit(parsed, _Client(sender, parsed))
            except TrtspecError as error:
                _send_error(sender, str(error), _code(error))
            except Exception as error:
                logger.exception("a request could not be read")
                message = f"this is a bug in trtspec: {type(error).__name__}: {error}"
                _send_error(sender, message, pb_utils.TritonError.INTERNAL)

    def finalize(self) -> None:
        """End the worker; the server has waited for the requests under way before, within its own time limit."""
        self._worker.close()
        self._metrics.close()

    def _open(self, options: ServingOptions, device: int | None) -> Session:
        """Open the session, in the worker's thread: the current GPU is a thread's own."""
        if device is not None:
            torch.cuda.set_device(device)
        session = Session.open(options.engine_dir, runtime=options.runtime, threads=options.threads)
        has_template = session.tokenizer.has_chat_template
        if options.chat == "chat" and not has_template:
            session.close()
            raise ConfigError("parameter chat is 'chat' and the tokenizer has no chat template; use 'raw' or 'auto'")
        self._chat = has_template and options.chat != "raw"
        self._defaults = session.default_speculation
        return session

    def _parse(self, request: Any) -> Request:
        """The request.

        Raises:
            RequestError: it is wrong.
        """
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        # What the HTTP endpoints get besides the model's inputs, misspelt ones too, arrives as a parameter.
        parameters = json.loads(request.parameters() or "{}")
        check_names(name for name in parameters if name not in _SERVER_PARAMETERS and not name.startswith("triton_"))
        microseconds = request.timeout() or parameters.get("timeout", 0)
        if isinstance(microseconds, bool) or not isinstance(microseconds, int) or microseconds < 0:
            raise RequestError(f"timeout is {microseconds!r}; give microseconds, an integer, or 0 for no limit")
        timeout = microseconds / 1e6 if microseconds else None
        return parse_request(inputs, chat=self._chat, timeout=timeout, defaults=self._defaults)


class _Client:
    """A Listener that answers through the server."""

    def __init__(self, sender: Any, request: Request) -> None:
        self._sender = sender
        self._request = request
        self._asked = time.monotonic()

    def send(self, event: StreamEvent) -> None:
        """Send a response; the one with a finish reason is the last."""
        tensors = [pb_utils.Tensor(name, array) for name, array in output_arrays(event).items()]
        try:
            self._sender.send(
                pb_utils.InferenceResponse(output_tensors=tensors), flags=0 if event.finish_reason is None else _FINAL
            )
        except Exception:
            # The server holds the request, and the model when it is unloaded, until the last response.
            self._sender.send(flags=_FINAL)
            raise

    def fail(self, error: TrtspecError) -> None:
        """Send an error as the last response."""
        _send_error(self._sender, explain(error, self._request), _code(error))

    def gone(self) -> bool:
        """Whether the client has cancelled the request or closed its connection; if so, the request is closed."""
        now = time.monotonic()
        if now < self._asked + POLL_SECONDS:
            return False
        self._asked = now
        if not self._sender.is_cancelled():
            return False
        _send_error(self._sender, "the request was cancelled by its client", pb_utils.TritonError.CANCELLED)
        return True


def _send_error(sender: Any, message: str, code: Any) -> None:
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=_FINAL)


def _code(error: TrtspecError) -> Any:
    """The server's code for an error."""
    if isinstance(error, UnavailableError):
        code = pb_utils.TritonError.UNAVAILABLE
    elif isinstance(error, ConfigError | PromptError | RequestError):
        code = pb_utils.TritonError.INVALID_ARG
    elif isinstance(error, UserError):
        code = pb_utils.TritonError.UNSUPPORTED
    else:
        code = pb_utils.TritonError.INTERNAL
    return code


def _check_numpy() -> None:
    """Raise UserError where the stub was built for NumPy 1 and finds NumPy 2: it then misreads every array."""
    expected = [1, 2, 3]
    tensor = pb_utils.Tensor.from_dlpack("check", torch.tensor(expected, dtype=torch.int32))
    if tensor.as_numpy().tolist() != expected:
        raise UserError(
            f"this server's Python backend can't read arrays of NumPy {np.__version__}: it was built for NumPy 1; "
            "install numpy<2 in its Python environment, or use a server of version 2.52 (24.11) or later"
        )


def _log_to_stderr() -> None:
    """Warnings of all, and what trtspec says, to where the server logs."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("trtspec").setLevel(logging.INFO)
