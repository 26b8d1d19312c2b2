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

_KEPT_NAMES = ("config.json", ".git")
_KEPT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx")
"""What tells that a directory holds somebody's model or work."""


@contextlib.contextmanager
def staged_directory(output: Path, *, force: bool, option: str = "--output") -> Iterator[Path]:
    """A new directory that becomes `output` if the block ends without an exception, and vanishes otherwise.

    What a killed build left beside `output` is removed by the next one.

    Args:
        option: how messages call `output`.

    Raises:
        UserError: `output` exists and is not empty and `force` is not given; it can't be made; the disk is full.
    """
    check_output(output, force=force, option=option)
    # A symbolic link stays and its target is replaced: the two may lie on different file systems.
    place = output.resolve()
    staging = place.parent / f".{place.name}.building-{os.getpid()}"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(place.parent, place.name)
        staging.mkdir()
    except OSError as error:
        raise UserError(f"{option} {output} cannot be made ({error}); choose another directory") from None
    try:
        yield staging
        _replace(staging, place, force, option)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left on the disk of {output}; free some or choose another {option}") from None
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_output(
    output: Path,
    *,
    force: bool,
    source: Path | None = None,
    what: str = "target",
    option: str = "--output",
    marker: str | None = None,
) -> None:
    """Raise UserError where `output` must not be written; `source`, what is built from, must survive.

    Args:
        what: how the message calls `source`.
        option: how it calls `output`.
        marker: a file that directories of this kind hold: `force` replaces no other, and none may lie in `source`.
    """
    resolved = output.resolve()
    if source is not None and marker is not None and source.resolve() in resolved.parents:
        raise UserError(f"{option} {output} lies in the {what} {source}; choose another directory")
    if source is not None and resolved in (source.resolve(), *source.resolve().parents):
        raise UserError(f"{option} {output} is or holds the {what} {source}; choose another directory")
    if not resolved.exists():
        return
    if not resolved.is_dir():
        raise UserError(f"{option} {output} is a file; choose a directory")
    if any(resolved.iterdir()) and not force:
        raise UserError(f"{option} {output} exists and is not empty; choose another directory or add --force")
    if marker is not None and any(resolved.iterdir()) and not (resolved / marker).is_file():
        raise UserError(
            f"{option} {output} holds no {marker}, so it is nothing that --force may replace; choose another directory"
        )
    here, home = Path.cwd(), Path.home().resolve()
    if resolved in (here, home, *here.parents, *home.parents):
        raise UserError(f"{option} {output} is or holds the current or the home directory; choose a new directory")
    if resolved.is_mount():
        raise UserError(f"{option} {output} is a mount point, which cannot be replaced; choose a directory below it")


def check_foreign(output: Path, *, force: bool, kind: str) -> None:
    """Raise UserError where `output` holds what trtspec has not made, and what `force` must not delete.

    Args:
        kind: of directory that `output` is not.
    """
    entries = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    below = output.rglob("*") if entries else iter(())
    model = next((path for path in below if path.name in _KEPT_NAMES or path.suffix.lower() in _KEPT_SUFFIXES), None)
    if model is not None:
        raise UserError(
            f"--output {output} is no {kind} and holds {model.relative_to(output)}, which --force does not "
            "delete; choose another directory"
        )
    if entries and not force:
        raise UserError(
            f"--output {output} exists and is not empty, and is no {kind}; choose another directory (--force would "
            f"delete what is in it: {entries[0]}{', ...' if len(entries) > 1 else ''})"
        )


def _replace(staging: Path, output: Path, force: bool, option: str) -> None:
    if not force or not output.exists():
        try:
            staging.rename(output)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise UserError(
                f"{option} {output} was made by another build meanwhile; choose another directory or add --force"
            ) from None
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
        # In a container every build may have the same process id: what bears this one's was left by an earlier one.
        if match and (int(match[1]) == os.getpid() or not _alive(int(match[1]))):
            shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def check_file(output: Path, *, force: bool) -> None:
    """Raise UserError where the file `output` must not be written, or can't be for a reason known beforehand."""
    place = output.resolve()
    if place.is_dir():
        raise UserError(f"--output {output} is a directory; give the name of a file")
    if not place.parent.is_dir():
        raise UserError(f"--output {output}: there is no directory {place.parent}; make it")
    if place.exists() and not force:
        raise UserError(f"--output {output} exists; choose another file or add --force")


def write_file(output: Path, text: str, *, force: bool) -> None:
    """Write a text file that appears complete or not at all.

    Raises:
        UserError: it exists and `force` is not given, or can't be written.
    """
    check_file(output, force=force)
    # A symbolic link stays and its target is replaced.
    place = output.resolve()
    staging = place.parent / f".{place.name}.writing-{os.getpid()}"
    try:
        staging.write_text(text, encoding="utf-8")
        staging.replace(place)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror}); choose another file") from None
    finally:
        staging.unlink(missing_ok=True)
