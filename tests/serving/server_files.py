"""The files of a real Triton Inference Server, as `build_scripts/triton_server.py` prepares them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "build_scripts" / "triton_server.py"


def prepare_server(directory: Path) -> Any:
    """A server's parts, some of them made in `directory`; 75 MB are downloaded once, with pip."""
    if sys.version_info >= (3, 13):
        pytest.skip("this server's Python backend needs NumPy 1, which has no wheels for Python 3.13")
    name = "triton_server_script"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPT)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].prepare_server(directory / "server-files")
