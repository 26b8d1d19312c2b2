"""Calling the trtspec command from tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Result:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        """Stdout as one JSON value a line."""
        return [json.loads(line) for line in self.out.splitlines()]


class Invoke(Protocol):
    """The `trtspec` fixture: runs the command in this process."""

    def __call__(self, *args: object, stdin: bytes = b"") -> Result: ...


def run_process(*args: object, stdin: bytes = b"") -> Result:
    """`python -m trtspec` in a process of its own, both streams piped."""
    result = subprocess.run(
        [sys.executable, "-m", "trtspec", *map(str, args)],
        input=stdin,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        check=False,
    )
    return Result(result.returncode, result.stdout.decode(), result.stderr.decode())


def assert_refused(result: Result, *words: str) -> None:
    """Exit code 2, and nothing but one line `error: …` that holds the words."""
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("error: "), result.err
    assert result.err.count("\n") == 1, result.err
    assert result.err.endswith("\n")
    for word in words:
        assert word in result.err


def assert_done(result: Result) -> None:
    """Exit code 0 and nothing on stderr."""
    assert (result.code, result.err) == (0, ""), result


def names(directory: Path) -> list[str]:
    """What lies in a directory, hidden entries too."""
    return sorted(entry.name for entry in directory.iterdir())


def edit_json(file: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    data = json.loads(file.read_text(encoding="utf-8"))
    data = {key: value for key, value in {**data, **fields}.items() if value is not None}
    file.write_text(json.dumps(data), encoding="utf-8")


class Builder:
    """Builds the spoilt checkpoint, which must be refused without a trace."""

    def __init__(self, trtspec: Invoke, hf_copy: Path) -> None:
        self.hf = hf_copy
        self._trtspec = trtspec
        self._place = hf_copy.parent
        self.output = self._place / "out"

    def build(self, *args: object, target: object = None) -> Result:
        """Build into `output`."""
        return self._trtspec("build", self.hf if target is None else target, "--output", self.output, *args)

    def refused(self, *words: str, args: tuple[object, ...] = (), target: object = None) -> None:
        """A build is refused with these words and leaves nothing."""
        before = names(self._place)
        assert_refused(self.build(*args, target=target), *words)
        assert names(self._place) == before
        assert not self.output.exists()
