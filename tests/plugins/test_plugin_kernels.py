"""The kernels in triton's interpreter, which needs no GPU, and what a missing triton leads to."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

KERNELS = Path(__file__).with_name("interpreted_kernels.py")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run(*arguments: str, **environment: str) -> str:
    """Run Python in a process of its own, to success; returns what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ngram_draft", "merge_drafts", "accept", "kv_commit", "outputs_are_made_where_none_are_given"]
)
def test_interpreted_kernel_is_the_reference(name: str) -> None:
    options = ["-o", "addopts=", "--noconftest", "-p", "no:cacheprovider"]
    assert "1 passed" in run("-m", "pytest", *options, f"{KERNELS}::test_{name}", TRITON_INTERPRET="1")


IMPORTS = """
import sys
import torch
import trtspec.plugins
from trtspec.plugins import checks, compile, definition, reference
from trtspec.plugins.kernels import launch
assert "triton" not in sys.modules
"""
CALL = """
sys.modules["triton"] = None
numbers = torch.ones(1, 4, dtype=torch.int32)
try:
    launch.ngram_draft(numbers, numbers[0, :1], ngram_min=1, ngram_max=2, num_tokens=3)
except ImportError as error:
    print(error)
try:
    compile.compile_accept(90, nodes=3)
except ImportError as error:
    print(error)
"""


def test_triton_is_imported_by_the_first_kernel_only_and_named_where_it_is_missing() -> None:
    printed = run("-c", IMPORTS + CALL)
    assert printed.count("pip install 'trtspec[kernels]'") == 2
