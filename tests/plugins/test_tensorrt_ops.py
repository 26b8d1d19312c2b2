"""The TensorRT plugins, as far as that is possible without TensorRT's libraries.

TensorRT's Python bindings load over TensorRT-RTX's libraries, which have the same interfaces for what is needed here.
That is done in a process of its own, where the cases of `tensorrt_ops_cases.py` run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from trtspec.plugins import tensorrt_ops

FOLDER = Path(__file__).parent
LIBRARIES = {
    "libnvinfer.so.11": "libtensorrt_rtx.so.1",
    "libnvonnxparser.so.11": "libtensorrt_onnxparser_rtx.so.1",
}
STUB = "_Bool initLibNvInferPlugins(void *logger, const char *name_space) { return 1; }\n"


def missing() -> str | None:
    """Why TensorRT's bindings can't be loaded here."""
    if not sys.platform.startswith("linux"):
        return "the stand-ins for TensorRT's libraries are Linux libraries"
    for module, package in (("tensorrt_bindings", "tensorrt-cu13-bindings"), ("tensorrt_rtx_libs", "tensorrt-rtx")):
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed"
    if importlib.util.find_spec("tensorrt_libs"):
        return "TensorRT itself is installed: its bindings load its own libraries"
    return None if shutil.which("cc") else "there is no C compiler"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables under which `import tensorrt` works."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("libraries")
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    assert spec is not None and spec.submodule_search_locations
    libraries = Path(spec.submodule_search_locations[0])
    for name, stand_in in LIBRARIES.items():
        (directory / name).symlink_to(libraries / stand_in)
    source = directory / "stub.c"
    source.write_text(STUB)
    command = ["cc", "-shared", "-fPIC", str(source), "-o", str(directory / "libnvinfer_plugin.so.11")]
    subprocess.run(command, check=True)
    paths = [str(FOLDER / "tensorrt_stand_in"), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = [str(directory), str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LD_LIBRARY_PATH": os.pathsep.join(found)}


@pytest.mark.parametrize(
    ("cases", "interpret"), [("not just_in_time", "0"), ("just_in_time", "1")], ids=["compiled", "interpreted"]
)
def test_plugins_on_the_bindings(environment: dict[str, str], cases: str, interpret: str) -> None:
    file = str(FOLDER / "tensorrt_ops_cases.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file, "-k", cases]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**environment, "TRITON_INTERPRET": interpret}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_missing_tensorrt_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ImportError, match=r"plugins need TensorRT: install it with pip install 'trtspec\[tensorrt\]'"):
        tensorrt_ops.register()


@pytest.mark.parametrize("has_plugins", [False, True])
def test_tensorrt_that_is_too_old(monkeypatch: pytest.MonkeyPatch, has_plugins: bool) -> None:
    module = types.ModuleType("tensorrt")
    module.__version__ = "10.3.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    if has_plugins:
        # As it was before plugins could be compiled ahead of time.
        monkeypatch.setitem(sys.modules, "tensorrt.plugin", types.ModuleType("tensorrt.plugin"))
    with pytest.raises(ImportError, match=r"tensorrt 10.3.0 has no plugins that are compiled ahead of time: .* -U"):
        tensorrt_ops.register()
