"""Atomic directories: built beside their place under a temporary name, renamed when complete."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from trtspec.errors import UserError


@contextlib.contextmanager
def staged_directory(output: Path, *, force: bool) -> Iterator[Path]:
    """A new directory that becomes `output` if the block ends without an exception, and vanishes otherwise.

    What a killed build left beside `output` is removed by the next one.

    Raises:
        UserError: `output` exists and is not empty and `force` is not given; the disk is full.
    """
    check_output(output, force=force)
    parent = output.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(parent, output.name)
    staging = parent / f".{output.name}.building-{os.getpid()}"
    staging.mkdir()
    try:
        yield staging
        _replace(staging, output.absolute())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left on the disk of {output}; free some or choose another --output") from None
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_output(output: Path, *, force: bool) -> None:
    """Raise UserError where `output` must not be written."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output {output} is a file; choose a directory")
    if any(output.iterdir()) and not force:
        raise UserError(f"--output {output} exists and is not empty; choose another directory or add --force")
    here, home, resolved = Path.cwd(), Path.home(), output.resolve()
    if resolved in (here, home, *here.parents, *home.parents):
        raise UserError(f"--output {output} is or holds the current or the home directory; choose a new directory")


def _replace(staging: Path, output: Path) -> None:
    if not output.exists():
        staging.rename(output)
        return
    old = output.parent / f".{output.name}.replaced-{os.getpid()}"
    output.rename(old)
    try:
        staging.rename(output)
    except BaseException:
        old.rename(output)
        raise
    shutil.rmtree(old)


def _remove_leftovers(parent: Path, name: str) -> None:
    pattern = re.compile(re.escape(f".{name}.") + r"(?:building|replaced)-(\d+)")
    for entry in parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match and not _alive(int(match[1])):
            shutil.rmtree(entry)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
