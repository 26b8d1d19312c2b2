"""Running the command in this process, and directories to spoil."""

from __future__ import annotations

import io
import logging
import shutil
import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("invocation")

from invocation import Builder, Invoke, Result  # noqa: E402

from trtspec.cli.main import _run, cli  # noqa: E402


@pytest.fixture
def trtspec(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """The command, as `python -m trtspec` runs it, except that nothing handles SIGTERM."""

    def invoke(*args: object, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["trtspec", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capfd.readouterr()
        # pytest's own handlers keep basicConfig from adding one.
        handler = logging.StreamHandler(sys.stderr)
        logging.getLogger().addHandler(handler)
        try:
            code = _run(cli, "trtspec")
        finally:
            logging.getLogger().removeHandler(handler)
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return invoke


@pytest.fixture
def hf_copy(tiny_hf_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Hugging Face directory."""
    return Path(shutil.copytree(tiny_hf_dir, tmp_path / "hf"))


@pytest.fixture
def engine_copy(tiny_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny engine directory, sharing no file with it."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "engine"))


@pytest.fixture
def builder(trtspec: Invoke, hf_copy: Path) -> Builder:
    """A builder of a copy that may be spoilt."""
    return Builder(trtspec, hf_copy)
