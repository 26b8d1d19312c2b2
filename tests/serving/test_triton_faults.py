"""A real server when things go wrong: clients that vanish, full queues, a stop, spoilt files; and what is left over."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import serve, write
from triton_clients import grpc_stream
from triton_server import EXIT_SECONDS, TritonServer, rss_of, wait_for

from trtspec.config import SamplingParams
from trtspec.session import Session

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]
LONG = {"text_input": "Tell a story", "max_tokens": 4000, "ignore_eos": True, "method": "none"}
SHORT = {"text_input": "Tell a story", "max_tokens": 12, "ignore_eos": True, "method": "none"}


@pytest.fixture(scope="module")
def triton(server: TritonServer, long_dir: Path) -> TritonServer:
    """A server with the model `narrow`: one slot, and one request may wait."""
    serve(server, long_dir, "narrow", max_queued=1)
    return server


@pytest.fixture(scope="module")
def session(long_dir: Path) -> Iterator[Session]:
    with Session.open(long_dir, threads=1) as opened:
        yield opened


@pytest.fixture(autouse=True)
def idle(triton: TritonServer, session: Session) -> Iterator[None]:
    """Behind every test the shared server is healthy and free, and answers as before."""
    yield
    wait_for(lambda: is_free(triton), 20)
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    [expected] = session.generate([[{"role": "user", "content": "Tell a story"}]], sampling)
    assert triton.generate("narrow", **SHORT)["text_output"] == expected.text
    assert triton.request("GET", "/v2/models/narrow/ready")[0] == 200


def is_free(triton: TritonServer) -> bool:
    metrics = triton.metrics()
    return (metrics["trtspec_active_sequences"], metrics["trtspec_queued_requests"]) == (0, 0)


def steps(triton: TritonServer) -> float:
    return triton.metrics()["trtspec_decode_steps_total"]


def test_a_client_that_vanishes_frees_its_slot(triton: TritonServer) -> None:
    before = steps(triton)
    with triton.streaming("narrow", stream=True, **LONG) as responses:
        for _ in range(3):
            assert not next(responses)["finish_reason"]
        assert triton.metrics()["trtspec_active_sequences"] == 1
    wait_for(lambda: is_free(triton), 20)
    assert steps(triton) - before < 2000


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_cancellation_over_grpc(triton: TritonServer, streams: bool) -> None:
    before = steps(triton)
    with grpc_stream(triton, "narrow", stream=streams, **LONG) as stream:
        wait_for(lambda: triton.metrics()["trtspec_active_sequences"] == 1, 20)
        stream.client.stop_stream(cancel_requests=True)
        wait_for(lambda: is_free(triton), 20)
    assert steps(triton) - before < 2000


def test_a_full_queue_is_an_error_at_once(triton: TritonServer) -> None:
    with triton.streaming("narrow", stream=True, **LONG) as first:
        next(first)
        second = threading.Thread(target=triton.stream, args=("narrow",), kwargs=SHORT)
        second.start()
        wait_for(lambda: triton.metrics()["trtspec_queued_requests"] == 1, 20)
        began = time.monotonic()
        message = triton.refused("narrow", **SHORT)
        assert message.startswith("1 requests wait already; try again later"), message
        assert time.monotonic() - began < 1
        assert not next(first)["finish_reason"]
    second.join(20)
    assert not second.is_alive()


def test_one_that_waits_and_vanishes_leaves_the_queue(triton: TritonServer) -> None:
    with triton.streaming("narrow", stream=True, **LONG) as first:
        next(first)
        with grpc_stream(triton, "narrow", stream=True, **LONG) as second:
            wait_for(lambda: triton.metrics()["trtspec_queued_requests"] == 1, 20)
            second.client.stop_stream(cancel_requests=True)
        wait_for(lambda: triton.metrics()["trtspec_queued_requests"] == 0, 20)
        assert triton.metrics()["trtspec_active_sequences"] == 1
        assert not next(first)["finish_reason"]


def test_unloading_lets_a_request_end_and_loading_serves_again(triton: TritonServer, session: Session) -> None:
    fields = {**SHORT, "max_tokens": 200}
    with triton.streaming("narrow", stream=True, **fields) as responses:
        found = [next(responses)]
        assert triton.request("POST", "/v2/repository/models/narrow/unload", {})[0] == 200
        found += responses
    sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
    [expected] = session.generate([[{"role": "user", "content": "Tell a story"}]], sampling)
    assert "".join(response["text_output"] for response in found) == expected.text
    wait_for(lambda: triton.state("narrow") == "UNAVAILABLE", 30)
    assert triton.stubs("narrow") == []
    assert "narrow" in triton.refused("narrow", **SHORT)
    triton.load("narrow")
    assert len(triton.stubs("narrow")) == 1


def spoil(directory: Path) -> None:
    """Change one byte of an engine directory's weights."""
    [weights, *_] = sorted((directory / "weights").rglob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_spoilt_engine_directory_is_the_models_state(
    triton: TritonServer, tiny_dir: Path, tmp_path: Path, damage: str
) -> None:
    engine_dir = Path(shutil.copytree(tiny_dir, tmp_path / "engine"))
    write(triton, engine_dir, damage)
    if damage == "changed":
        spoil(engine_dir)
    else:
        shutil.rmtree(engine_dir)
    status, answer = triton.request("POST", f"/v2/repository/models/{damage}/load", {}, timeout=120)
    assert status == 400
    words = "was changed after the build (its hash differs)" if damage == "changed" else str(engine_dir)
    assert words in answer
    entry = triton.index()[damage]
    assert entry["state"] == "UNAVAILABLE"
    assert words in entry["reason"]
    assert triton.stubs(damage) == []


def test_nothing_is_left_behind_by_five_hundred_requests(triton: TritonServer) -> None:
    [stub] = triton.stubs("narrow")

    def ask(count: int) -> None:
        for number in range(count):
            kind = number % 10
            if kind == 0:
                triton.refused("narrow", text_input="a", max_tokens=0)
            elif kind == 1:
                with triton.streaming("narrow", stream=True, **LONG) as responses:
                    next(responses)
                wait_for(lambda: is_free(triton), 20)
            elif kind % 2:
                assert triton.generate("narrow", text_input=f"Number {number}", max_tokens=4)["text_output"]
            else:
                assert triton.stream("narrow", text_input=f"Number {number}", max_tokens=4, temperature=1.0)

    ask(100)
    before = rss_of(stub)
    ask(500)
    assert is_free(triton)
    assert rss_of(stub) < 1.05 * before


def test_a_stopped_server_ends_requests_with_an_error_and_exits(
    triton: TritonServer, long_dir: Path, tmp_path: Path
) -> None:
    from tritonclient.utils import InferenceServerException

    other = TritonServer(tmp_path, tmp_path / "models", "--disable-auto-complete-config")
    ended: dict[str, Any] = {}
    try:
        serve(other, long_dir, "narrow")
        # Stopped in the middle of a pass, a process takes a moment longer.
        fields = {**LONG, "temperature": 1.0}

        def whole() -> None:
            try:
                ended["whole"] = other.request("POST", "/v2/models/narrow/generate", fields)
            except (OSError, http.client.HTTPException) as error:
                ended["whole"] = error

        thread = threading.Thread(target=whole)
        with (
            other.streaming("narrow", stream=True, **fields) as responses,
            grpc_stream(other, "narrow", stream=True, **fields) as waiting,
        ):
            next(responses)
            thread.start()
            wait_for(lambda: other.metrics()["trtspec_queued_requests"] == 2, 20)
            assert other.stop() < EXIT_SECONDS + 5
            found = []
            with contextlib.suppress(OSError, http.client.HTTPException):
                found += responses
            assert not any(response.get("finish_reason") for response in found)
            with pytest.raises(InferenceServerException):
                waiting.next()
        thread.join(20)
        assert isinstance(ended["whole"], Exception), ended
        wait_for(lambda: other.stubs("narrow") == [], 10)
    finally:
        other.kill()
    assert other.process.returncode is not None
    assert other.process.returncode != -signal.SIGKILL
