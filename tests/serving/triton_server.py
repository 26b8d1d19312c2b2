"""A real Triton Inference Server, and what tests ask of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server_files import prepare_server

START_SECONDS = 60
EXIT_SECONDS = 4


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class TritonServer:
    """A running server. Models are loaded when asked for; everything listens on the loopback interface only."""

    def __init__(self, directory: Path, repository: Path, *flags: str) -> None:
        """Start it and wait until it answers.

        Args:
            directory: for its own parts and its log.
        """
        self.files = prepare_server(directory)
        self.repository = repository
        repository.mkdir(parents=True, exist_ok=True)
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.log = directory / "server.log"
        command = [
            str(self.files.binary),
            f"--model-repository={repository}",
            f"--backend-directory={self.files.backends}",
            "--model-control-mode=explicit",
            "--allow-gpu-metrics=false",
            *("--http-address=127.0.0.1", f"--http-port={self.http_port}"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={self.grpc_port}"),
            *("--metrics-address=127.0.0.1", f"--metrics-port={self.metrics_port}"),
            f"--exit-timeout-secs={EXIT_SECONDS}",
            *flags,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, self.files.libraries))},
                start_new_session=True,
            )
        try:
            wait_for(self._answers, START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log_tail()
        try:
            return self.request("GET", "/v2/health/ready")[0] == 200
        except OSError:
            return False

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def request(self, method: str, path: str, body: Any = None, timeout: float = 60) -> tuple[int, str]:
        """Status and text of an HTTP answer; `body` is sent as it is, or as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def generate(self, model: str, **fields: Any) -> dict[str, Any]:
        """The one response of the generate endpoint."""
        status, text = self.request("POST", f"/v2/models/{model}/generate", fields)
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        return answer

    def refused(self, model: str, **fields: Any) -> str:
        """The error of the generate endpoint."""
        status, text = self.request("POST", f"/v2/models/{model}/generate", fields)
        assert status >= 400, text
        return str(json.loads(text)["error"])

    @contextlib.contextmanager
    def streaming(self, model: str, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The responses of the generate_stream endpoint, as they come; leaving closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(fields).encode())
            response = connection.getresponse()
            lines = iter(response.readline, b"")
            yield (json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: "))

    def stream(self, model: str, **fields: Any) -> list[dict[str, Any]]:
        """All responses of the generate_stream endpoint."""
        with self.streaming(model, stream=True, **fields) as responses:
            return list(responses)

    def load(self, model: str) -> None:
        status, text = self.request("POST", f"/v2/repository/models/{model}/load", {}, timeout=300)
        assert status == 200, text

    def unload(self, model: str) -> None:
        """Unload a model and wait for the end of its processes."""
        assert self.request("POST", f"/v2/repository/models/{model}/unload", {})[0] == 200
        wait_for(lambda: self.state(model) == "UNAVAILABLE", 30)

    def index(self) -> dict[str, dict[str, str]]:
        """State and reason of all models, by name."""
        status, text = self.request("POST", "/v2/repository/index", {})
        assert status == 200, text
        return {entry["name"]: entry for entry in json.loads(text)}

    def state(self, model: str) -> str | None:
        return self.index()[model].get("state")

    def metrics(self) -> dict[str, float]:
        """The metrics of trtspec: values by name and labels as the endpoint writes them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("trtspec_"))
        return {series: float(value) for series, value in pairs}

    def stubs(self, model: str) -> list[int]:
        """Process ids of a model's instances."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                arguments = (process / "cmdline").read_bytes().split(b"\0")
                is_stub = (
                    arguments[0].endswith(b"triton_python_backend_stub") and str(self.process.pid).encode() in arguments
                )
                if is_stub and arguments[1].startswith(f"{self.repository / model}/".encode()):
                    found.append(int(process.name))
        return found

    def stop(self) -> float:
        """Ask it to end; returns how many seconds that took."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        return time.monotonic() - began

    def kill(self) -> None:
        """End what is left of it, stubs too: they are in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def rss_of(pid: int) -> int:
    """Resident memory of a process, bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def wait_for(condition: Any, seconds: float) -> None:
    """Until the condition holds; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
