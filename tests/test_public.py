"""The public surface: the names that trtspec exports, and that importing it is cheap."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

import trtspec

PUBLIC = [
    "Completion",
    "EngineDir",
    "Limits",
    "SamplingParams",
    "Session",
    "SpeculationConfig",
    "StreamEvent",
    "TrtspecError",
    "UserError",
    "build",
]
# Each takes a second or more, or pulls in one that does.
SLOW = ["onnx_ir", "onnxruntime", "torch", "transformers"]


def slow_modules_of(script: str) -> list[str]:
    """Which of SLOW a fresh interpreter has loaded after a script."""
    report = f"\nimport json, sys\nprint('\\n' + json.dumps([name for name in {SLOW} if name in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", script + report], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    loaded: list[str] = json.loads(result.stdout.splitlines()[-1])
    return loaded


def test_exported_names() -> None:
    assert trtspec.__all__ == PUBLIC
    assert all(getattr(trtspec, name).__name__ == name for name in PUBLIC)


def test_star_import_gives_exactly_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from trtspec import *", names)
    assert sorted(names.keys() - {"__builtins__"}) == PUBLIC


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'trtspec' has no attribute 'Sesion'"):
        _ = trtspec.Sesion


def test_version_is_the_distributions() -> None:
    assert trtspec.__version__ == importlib.metadata.version("trtspec")


def test_import_loads_nothing_slow() -> None:
    assert slow_modules_of("import trtspec") == []


def test_use_of_a_configuration_class_loads_nothing_slow() -> None:
    assert slow_modules_of("import trtspec\ntrtspec.SamplingParams(), trtspec.SpeculationConfig()") == []


def test_slow_modules_are_noticed() -> None:
    assert "torch" in slow_modules_of("import trtspec\ntrtspec.Session")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["build", "--help"], ["run", "--help"]])
def test_help_loads_nothing_slow(arguments: list[str]) -> None:
    script = (
        f"import runpy, sys\nsys.argv = ['trtspec', *{arguments}]\n"
        "try:\n    runpy.run_module('trtspec', run_name='__main__')\n"
        "except SystemExit as error:\n    assert not error.code, error.code"
    )
    assert slow_modules_of(script) == []
