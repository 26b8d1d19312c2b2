"""Engine directories that are served, and servers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint.heads import make_e1
from head_targets import save_head_target
from triton_server import TritonServer

import trtspec
from trtspec.engine_dir import EngineDir
from trtspec.serving.model_repository import write_model


@pytest.fixture(scope="session")
def head_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine directory of a random target of 64 words with an EAGLE head: 4 slots of 96 tokens."""
    directory = tmp_path_factory.mktemp("served-head")
    save_head_target(directory / "target")
    make_e1(directory / "head")
    output = directory / "engine"
    trtspec.build(
        directory / "target",
        output,
        eagle=directory / "head",
        max_seq_len=96,
        max_batch_size=4,
        max_draft_tokens=16,
    )
    return output


@pytest.fixture(scope="session")
def long_dir(tiny_hf_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine directory of the tiny target with one slot of 4096 tokens: a request can take long, and others wait."""
    directory = tmp_path_factory.mktemp("served-long")
    shutil.copytree(tiny_hf_dir, directory / "target")
    config = directory / "target" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 4096}))
    trtspec.build(directory / "target", directory / "engine", max_batch_size=1)
    return directory / "engine"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server without models."""
    directory = tmp_path_factory.mktemp("server")
    # The models are configured completely: asking their code for more would import it all a second time.
    running = TritonServer(directory, directory / "models", "--disable-auto-complete-config")
    yield running
    running.kill()


def serve(server: TritonServer, engine_dir: Path, name: str, **options: Any) -> None:
    """Write a model of an engine directory into the server's repository and load it."""
    write(server, engine_dir, name, **options)
    server.load(name)


def write(server: TritonServer, engine_dir: Path, name: str, **options: Any) -> None:
    """The first half of `serve`."""
    options = {"threads": 1, "python_env": server.files.python_env, **options}
    write_model(EngineDir.load(engine_dir), server.repository, name=name, **options)
