"""The demo target with its head in a real server: what a session says, to several clients at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from triton_clients import grpc_infer, ids_of
from triton_server import TritonServer

from trtspec.cli.main import cli
from trtspec.completion import Completion
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.session import Session

pytestmark = pytest.mark.slow
CODE = "def area(width, height):\n    result = width * height\n    return result\n"
CASES: list[dict[str, Any]] = [
    {"text_input": f"Rename `result` to `product` and write the function again.\n{CODE}", "method": "ngram-eagle"},
    {"text_input": "Why does bread rise?", "method": "eagle"},
    {"text_input": "Schreibe einen Satz über Köln.", "method": "ngram"},
    {"text_input": "Write one line about the sea, with an emoji.", "temperature": 0.8, "top_p": 0.9, "seed": 4},
]
LENGTH = 40


def alone(session: Session, case: dict[str, Any]) -> Completion:
    """What one request gets from a session of its own."""
    sampling = {name: case[name] for name in ("temperature", "top_p", "seed") if name in case}
    [completion] = session.generate(
        [[{"role": "user", "content": case["text_input"]}]],
        SamplingParams(max_new_tokens=LENGTH, **sampling),
        SpeculationConfig(method=case.get("method")),
    )
    return completion


def test_four_clients_get_what_each_gets_alone(server: TritonServer, demo_dir: Path) -> None:
    options = ["--output", server.repository, "--name", "demo", "--python-env", server.files.python_env]
    written = CliRunner().invoke(cli, ["triton-repo", str(demo_dir), *map(str, options)])
    assert written.exit_code == 0, written.output
    assert written.stdout == f"{server.repository / 'demo'}\n"
    with Session.open(demo_dir) as session:
        expected = [alone(session, case) for case in CASES]
    server.load("demo")
    before = server.metrics()

    def ask(number: int) -> list[dict[str, Any]]:
        fields = {**CASES[number], "max_tokens": LENGTH}
        if number % 2:
            return server.stream("demo", **fields)
        return grpc_infer(server, "demo", stream=True, **fields)

    with ThreadPoolExecutor(len(CASES)) as clients:
        answers = list(clients.map(ask, range(len(CASES))))
    after = server.metrics()
    for responses, completion in zip(answers, expected, strict=True):
        assert [token for response in responses for token in ids_of(response)] == completion.token_ids
        assert "".join(response["text_output"] for response in responses) == completion.text
        assert responses[-1]["finish_reason"] == completion.finish_reason
    counted = {series: value - before.get(series, 0) for series, value in after.items()}
    accepted = sum(response["num_accepted_tokens"] for responses in answers for response in responses)
    assert accepted > 10
    assert sum(value for series, value in counted.items() if "per_position" in series) == accepted
    emitted = sum(len(ids_of(response)) for responses in answers for response in responses) - len(CASES)
    assert counted["trtspec_emitted_tokens_total"] == emitted
    assert counted["trtspec_decode_steps_total"] == emitted - accepted
