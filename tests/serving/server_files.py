"""The files of a real Triton Inference Server, from the package nvidia-pytriton, and a Python environment for it.

The package pins NumPy 1, which its server needs, so it is kept apart from the environment that the tests run in.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from trtspec.checkpoint.demo import cache_directory

REQUIREMENTS = ("nvidia-pytriton==0.7.0", "numpy==1.26.4")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class ServerFiles:
    """Where a server's parts are."""

    binary: Path
    libraries: list[Path]
    """For LD_LIBRARY_PATH of the server."""
    backends: Path
    """For --backend-directory."""
    python_env: Path
    """Virtual environment for models: that of the tests, with NumPy 1."""


def prepare_server(directory: Path) -> ServerFiles:
    """A server's parts, some of them made in `directory`; 75 MB are downloaded once, with pip."""
    if sys.version_info >= (3, 13):
        pytest.skip("this server's Python backend needs NumPy 1, which has no wheels for Python 3.13")
    packages = _packages()
    server = packages / "pytriton" / "tritonserver"
    libraries = [packages / "nvidia_pytriton.libs"]
    # The stub is linked with libpython, which a Python of its own keeps in a place of its own.
    own_libraries = sysconfig.get_config_var("LIBDIR")
    if own_libraries and any(Path(own_libraries).glob(f"libpython{PYTHON}.so*")):
        libraries.append(Path(own_libraries))
    return ServerFiles(
        server / "bin" / "tritonserver",
        libraries,
        _backends(server, directory / "backends"),
        _environment(packages, directory / "python"),
    )


def _packages() -> Path:
    """The directory with the packages in REQUIREMENTS, in the cache."""
    place = cache_directory() / f"tritonserver-{REQUIREMENTS[0].rpartition('=')[2]}-python{PYTHON}"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tritonserver-", dir=place.parent) as scratch:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run(
                [*command, "--only-binary=:all:", "--target", f"{scratch}/packages", *REQUIREMENTS], check=True
            )
            try:
                Path(scratch, "packages").rename(place)
            except OSError:
                # Another process was faster.
                assert (place / "pytriton").is_dir()
    return place


def _backends(server: Path, directory: Path) -> Path:
    """The Python backend with the stub of this Python."""
    backend = directory / "python"
    shutil.copytree(server / "backends" / "python", backend)
    stub = backend / "triton_python_backend_stub"
    shutil.copy(server / "python_backend_stubs" / PYTHON / stub.name, stub)
    stub.chmod(0o755)
    return directory


def _environment(packages: Path, directory: Path) -> Path:
    """A virtual environment that has these packages, and behind them those of this Python."""
    venv.create(directory, symlinks=True)
    [own] = directory.glob("lib/python*/site-packages")
    lines = [str(packages), *(f"import site; site.addsitedir({path!r})" for path in _site_packages())]
    (own / "tests.pth").write_text("\n".join(lines) + "\n")
    return directory


def _site_packages() -> list[str]:
    return [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]
