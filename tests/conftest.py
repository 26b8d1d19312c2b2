"""What many tests share: engine directories, each built at most once per run and only when a test asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores: engines' threads of several processes that spin for each other's cores take minutes
    # for seconds. Before torch is imported, which fixes its number of threads, and for the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tiny_targets import save_tiny_llama

import trtspec
from trtspec.checkpoint.source import open_checkpoint
from trtspec.engine.onnxruntime_engine import set_threads


@pytest.fixture(scope="session")
def demo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine directory of the demo target (SmolLM2-135M-Instruct, float32, onnxruntime), 2048 tokens a sequence."""
    output = tmp_path_factory.mktemp("demo") / "engine_dir"
    trtspec.build("demo", output, max_seq_len=2048)
    return output


@pytest.fixture(scope="session")
def tiny_hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face directory of a random two-layer Llama with the demo target's tokenizer; nothing may be written."""
    directory = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    save_tiny_llama(directory)
    open_checkpoint("demo").save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_dir(tiny_hf_dir: Path) -> Path:
    """Engine directory of `tiny_hf_dir` (float32, onnxruntime), 512 tokens a sequence."""
    output = tiny_hf_dir.parent / "engine_dir"
    trtspec.build(tiny_hf_dir, output)
    return output


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """For tests with tiny matrices in torch: other threads would be waited for while ONNX Runtime's threads spin."""
    set_threads(None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
