"""Staged directories: complete or not at all, and nothing of others is touched."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtspec.errors import UserError
from trtspec.staging import check_output, staged_directory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, which isn't the current one."""
    path = tmp_path / "home" / "user"
    path.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(path))
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that nothing else uses."""
    path = tmp_path / "place"
    path.mkdir()
    return path


@pytest.fixture
def dead_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def live_pid() -> Iterator[int]:
    """The id of a process that runs."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n")


def names(directory: Path) -> list[str]:
    """What lies in a directory."""
    return sorted(entry.name for entry in directory.iterdir())


def fill(directory: Path, text: str) -> None:
    """Write one file."""
    (directory / "content").write_text(text)


def content(directory: Path) -> str:
    """The one file, where it is the only one."""
    assert names(directory) == ["content"]
    return (directory / "content").read_text()


def old_output(place: Path) -> Path:
    """A non-empty output."""
    output = place / "out"
    output.mkdir()
    (output / "old").write_text("old")
    return output


def test_appears_at_the_end(place: Path) -> None:
    output = place / "out"
    with staged_directory(output, force=False) as staging:
        fill(staging, "new")
        assert not output.exists()
        assert staging.parent == place
    assert content(output) == "new"
    assert names(place) == ["out"]


def test_relative_output_and_its_parents(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with staged_directory(Path("a/b/out"), force=False) as staging:
        fill(staging, "new")
    assert content(place / "a" / "b" / "out") == "new"


def test_empty_directory_is_filled(place: Path) -> None:
    (place / "out").mkdir()
    with staged_directory(place / "out", force=False) as staging:
        fill(staging, "new")
    assert content(place / "out") == "new"
    assert names(place) == ["out"]


def test_not_empty_is_refused(place: Path) -> None:
    output = old_output(place)
    with (
        pytest.raises(UserError, match=r"out exists and is not empty; choose another directory or add --force"),
        staged_directory(output, force=False),
    ):
        pytest.fail("the block ran")
    assert names(output) == ["old"]
    assert names(place) == ["out"]


def test_force_replaces_at_the_end(place: Path) -> None:
    output = old_output(place)
    with staged_directory(output, force=True) as staging:
        fill(staging, "new")
        assert names(output) == ["old"]
    assert content(output) == "new"
    assert names(place) == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_file_is_refused(place: Path, force: bool) -> None:
    file = place / "out"
    file.write_text("mine")
    with pytest.raises(UserError, match=r"out is a file; choose a directory"):
        check_output(file, force=force)
    with (
        pytest.raises(UserError, match=r"cannot be made.*choose another directory"),
        staged_directory(file / "below", force=force),
    ):
        pytest.fail("the block ran")
    assert file.read_text() == "mine"


@pytest.mark.parametrize("force", [False, True])
def test_current_and_home_directory_are_refused(
    home: Path, place: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    empty = place / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    link = place / "link"
    link.symlink_to(empty)
    for output in (Path(), Path(), empty, link, empty / "sub" / "..", home):
        with pytest.raises(UserError, match="is or holds the current or the home directory"):
            check_output(output, force=force)
    assert names(place) == ["empty", "link"]


def test_what_holds_current_and_home_directory_is_refused(
    home: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "below").mkdir()
    monkeypatch.chdir(place / "below")
    for output in (place, Path(".."), home.parent, Path("/")):
        with (
            pytest.raises(UserError, match="is or holds the current or the home directory"),
            staged_directory(output, force=True),
        ):
            pytest.fail("the block ran")
    assert names(place) == ["below"]


def test_home_behind_a_symbolic_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "home").symlink_to(real)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(UserError, match="is or holds the current or the home directory"):
        check_output(real, force=True)


def test_mount_point_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "volume").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == place / "volume")
    with pytest.raises(UserError, match="volume is a mount point, which cannot be replaced; choose a directory below"):
        check_output(place / "volume", force=False)
    check_output(place / "volume" / "engine", force=False)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("existing", [False, True])
def test_symbolic_link_stays_and_its_target_is_filled(place: Path, existing: bool, force: bool) -> None:
    (place / "disk").mkdir()
    target, link = place / "disk" / "engine", place / "link"
    if existing:
        target.mkdir()
    link.symlink_to(target)
    with staged_directory(link, force=force) as staging:
        assert staging.parent == target.parent
        fill(staging, "new")
    assert link.is_symlink()
    assert content(target) == "new"
    assert (names(place), names(place / "disk")) == (["disk", "link"], ["engine"])


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("force", [False, True])
def test_exception_leaves_nothing(place: Path, force: bool, kind: type[BaseException]) -> None:
    output = old_output(place) if force else place / "out"
    before = names(place)
    with pytest.raises(kind, match="halfway"), staged_directory(output, force=force) as staging:
        fill(staging, "half")
        (staging / "deep" / "er").mkdir(parents=True)
        raise kind("halfway")
    assert names(place) == before
    if force:
        assert names(output) == ["old"]


def test_failed_replacement_puts_the_old_one_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = old_output(place)
    rename = Path.rename

    def fail(source: Path, target: Path) -> Path:
        if "building" in source.name:
            raise PermissionError(errno.EACCES, "not now")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError), staged_directory(output, force=True) as staging:
        fill(staging, "new")
    assert names(output) == ["old"]
    assert names(place) == ["out"]


@pytest.mark.parametrize("kind", ["building", "replaced"])
def test_leftovers_of_dead_processes_are_removed(place: Path, dead_pid: int, kind: str) -> None:
    fill_leftover(place / f".out.{kind}-{dead_pid}")
    with staged_directory(place / "out", force=False) as staging:
        assert names(place) == [staging.name]
    assert names(place) == ["out"]


def test_leftover_with_the_own_process_id_is_removed(place: Path) -> None:
    """In a container each build may be process 1."""
    fill_leftover(place / f".out.building-{os.getpid()}")
    with staged_directory(place / "out", force=False) as staging:
        assert names(staging) == []
        fill(staging, "new")
    assert content(place / "out") == "new"


def test_leftovers_of_others_are_kept(place: Path, dead_pid: int, live_pid: int) -> None:
    kept = [
        f".out.building-{live_pid}",
        f".out.replaced-{live_pid}",
        f".other.building-{dead_pid}",
        f".outer.building-{dead_pid}",
        f".out.building-{dead_pid}.zip",
        f"out.building-{dead_pid}",
        f".oxt.building-{dead_pid}",
        ".out.building-",
        ".out.building-x1",
    ]
    for name in kept:
        fill_leftover(place / name)
    with staged_directory(place / "out", force=False):
        pass
    assert names(place) == sorted([*kept, "out"])


def test_name_with_special_characters(place: Path, dead_pid: int) -> None:
    """The name is no pattern."""
    fill_leftover(place / f".o+t(.building-{dead_pid}")
    fill_leftover(place / f".oot(.building-{dead_pid}")
    with staged_directory(place / "o+t(", force=False):
        pass
    assert names(place) == [f".oot(.building-{dead_pid}", "o+t("]


def test_leftover_that_vanishes_meanwhile(place: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another build removes it, or puts it in its place, between our look and our removal."""
    leftover = place / f".out.building-{dead_pid}"
    fill_leftover(leftover)
    rmtree = shutil.rmtree

    def vanish(path: Path, ignore_errors: bool = False) -> None:
        if path == leftover:
            rmtree(path)
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", vanish)
    with staged_directory(place / "out", force=False):
        pass
    assert names(place) == ["out"]


def fill_leftover(path: Path) -> None:
    """A half-built directory."""
    path.mkdir()
    fill(path, "half")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk(place: Path, code: int) -> None:
    with (
        pytest.raises(UserError, match=r"no space left on the disk of .*out; free some or choose another --output"),
        staged_directory(place / "out", force=False) as staging,
    ):
        fill(staging, "half")
        raise OSError(code, os.strerror(code))
    assert names(place) == []


def test_other_failures_of_the_machine_stay_what_they_are(place: Path) -> None:
    with pytest.raises(OSError, match="Input/output error") as raised, staged_directory(place / "out", force=False):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert raised.value.errno == errno.EIO
    assert names(place) == []


@pytest.mark.parametrize("force", [False, True])
def test_second_builder_overtakes_the_first(place: Path, live_pid: int, force: bool) -> None:
    output = place / "out"

    def both() -> None:
        with staged_directory(output, force=force) as first:
            fill(first, "first")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "getpid", lambda: live_pid)
                with staged_directory(output, force=force) as second:
                    assert first != second
                    fill(second, "second")
            assert content(output) == "second"

    if force:
        both()
        assert content(output) == "first"
    else:
        with pytest.raises(UserError, match="was made by another build meanwhile"):
            both()
        assert content(output) == "second"
    assert names(place) == ["out"]


BUILDER = """
import sys, time
from pathlib import Path
from trtspec.errors import UserError
from trtspec.staging import staged_directory
input()
try:
    with staged_directory(Path(sys.argv[1]), force=False) as staging:
        for number in range(50):
            (staging / str(number)).write_text(sys.argv[2])
            time.sleep(0.002)
except UserError as error:
    sys.exit(str(error))
"""


def test_concurrent_processes(place: Path) -> None:
    output = place / "out"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(output), str(number)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    errors = [process.communicate()[1] for process in processes]
    winners = [number for number, process in enumerate(processes) if process.returncode == 0]
    assert len(winners) == 1, errors
    assert all("was made by another build" in error for n, error in enumerate(errors) if n not in winners), errors
    assert names(place) == ["out"]
    assert len(names(output)) == 50
    assert {(output / name).read_text() for name in names(output)} == {str(winners[0])}


def test_force_replaces_only_what_is_of_the_kind(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    weights = engine / "weights"
    weights.mkdir(parents=True)
    (weights / "model.safetensors").touch()
    with pytest.raises(UserError, match="lies in the engine directory"):
        check_output(weights, force=True, source=engine, what="engine directory", marker="config.pbtxt")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").touch()
    with pytest.raises(UserError, match=r"holds no config\.pbtxt"):
        check_output(precious, force=True, source=engine, marker="config.pbtxt")
    (precious / "config.pbtxt").touch()
    check_output(precious, force=True, source=engine, marker="config.pbtxt")
