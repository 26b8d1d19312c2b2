"""Run Triton Inference Server without a container: the one of the package nvidia-pytriton, over a model repository.

    trtspec triton-repo DIR --output models
    python build_scripts/triton_server.py models

The first run downloads 75 MB. That server is of version 2.51 and needs NumPy 1 in its models' environment, so its parts
are kept apart from the environment that runs this script, in trtspec's cache directory. Options behind `--` go to
tritonserver; see its --help. Linux on x86_64, Python 3.10 to 3.12.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import click

from trtspec.checkpoint.demo import cache_directory
from trtspec.cli.main import main as run_command
from trtspec.cli.options import DirectoryPath
from trtspec.errors import EngineError, UserError

REQUIREMENTS = ("nvidia-pytriton==0.7.0", "numpy==1.26.4")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PATHS = "trtspec-server.pth"
EXIT_SECONDS = 5
"""How long requests under way may go on when the server is stopped."""


@dataclass(frozen=True)
class ServerFiles:
    """Where a server's parts are."""

    binary: Path
    libraries: list[Path]
    """For LD_LIBRARY_PATH of the server."""
    backends: Path
    """For --backend-directory."""
    python_env: Path
    """Virtual environment for models: the one that runs this, with NumPy 1 in front."""

    def environment(self) -> dict[str, str]:
        """This process's environment, changed so that the server finds its libraries and models their Python."""
        path = os.pathsep.join([str(self.python_env / "bin"), os.environ.get("PATH", os.defpath)])
        return {**os.environ, "PATH": path, "LD_LIBRARY_PATH": os.pathsep.join(map(str, self.libraries))}


def prepare_server(directory: Path) -> ServerFiles:
    """A server's parts, some of them in `directory`, made where it is missing; 75 MB are downloaded once, with pip.

    Raises:
        UserError: this Python has no NumPy 1.
        EngineError: pip failed.
    """
    if sys.version_info >= (3, 13):
        raise UserError(
            f"this server needs NumPy 1, which has no wheels for Python {PYTHON}; use 3.10 to 3.12, or a container"
        )
    packages = _packages()
    server = packages / "pytriton" / "tritonserver"
    libraries = [packages / "nvidia_pytriton.libs"]
    # The stub is linked with libpython, which a Python of its own keeps in a place of its own.
    own_libraries = sysconfig.get_config_var("LIBDIR")
    if own_libraries and any(Path(own_libraries).glob(f"libpython{PYTHON}.so*")):
        libraries.append(Path(own_libraries))
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tritonserver-", dir=directory.parent) as scratch:
            _copy_backend(server, Path(scratch, "made", "backends"))
            _settle(Path(scratch, "made"), directory)
    # Not moved to its place: its scripts hold their paths.
    _make_environment(packages, directory / "python")
    return ServerFiles(server / "bin" / "tritonserver", libraries, directory / "backends", directory / "python")


def _packages() -> Path:
    """The directory with the packages in REQUIREMENTS, in the cache."""
    place = cache_directory() / f"tritonserver-{REQUIREMENTS[0].rpartition('=')[2]}-python{PYTHON}"
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tritonserver-", dir=place.parent) as scratch:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        packages = Path(scratch, "packages")
        try:
            subprocess.run([*command, "--only-binary=:all:", "--target", str(packages), *REQUIREMENTS], check=True)
        except subprocess.CalledProcessError as error:
            what = " and ".join(REQUIREMENTS)
            raise EngineError(f"pip could not install {what} (exit code {error.returncode})") from None
        _settle(packages, place)
    return place


def _settle(made: Path, place: Path) -> None:
    """Move a directory to its place, unless another process was faster."""
    try:
        made.rename(place)
    except OSError:
        if not place.is_dir():
            raise


def _copy_backend(server: Path, directory: Path) -> None:
    """The Python backend with the stub of this Python."""
    backend = directory / "python"
    shutil.copytree(server / "backends" / "python", backend)
    stub = backend / "triton_python_backend_stub"
    shutil.copy(server / "python_backend_stubs" / PYTHON / stub.name, stub)
    stub.chmod(0o755)


def _make_environment(packages: Path, directory: Path) -> None:
    """A virtual environment that has these packages, and behind them those of this Python; made if it isn't there."""
    if [*directory.glob(f"lib/python*/site-packages/{PATHS}")]:
        return
    venv.create(directory, symlinks=True)
    [own] = directory.glob("lib/python*/site-packages")
    lines = [str(packages), *(f"import site; site.addsitedir({path!r})" for path in _site_packages())]
    (own / PATHS).write_text("\n".join(lines) + "\n")


def _site_packages() -> list[str]:
    return [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]


@click.command(help=__doc__)
@click.argument("model_repository", type=DirectoryPath())
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all.")
@click.option("--http-port", default=8000, show_default=True)
@click.option("--grpc-port", default=8001, show_default=True)
@click.option("--metrics-port", default=8002, show_default=True)
@click.argument("flags", nargs=-1)
def main(
    model_repository: Path, host: str, http_port: int, grpc_port: int, metrics_port: int, flags: tuple[str, ...]
) -> None:
    if not model_repository.is_dir():
        raise UserError(f"there is no model repository {model_repository}; write one with trtspec triton-repo")
    key = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    files = prepare_server(cache_directory() / f"tritonserver-environment-{key}")
    command = [
        str(files.binary),
        f"--model-repository={model_repository}",
        f"--backend-directory={files.backends}",
        "--disable-auto-complete-config",
        "--allow-gpu-metrics=false",
        f"--exit-timeout-secs={EXIT_SECONDS}",
        *(f"--{kind}-address={host}" for kind in ("http", "grpc", "metrics")),
        *(f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"),
        *flags,
    ]
    _supervise(command, files.environment())


def _supervise(command: list[str], environment: dict[str, str]) -> None:
    """Run the server until it ends or this process is told to end; no process of a model outlives it.

    A server that is stopped with requests under way may leave them behind.

    Raises:
        EngineError: the server ended by itself.
    """
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    stopped = False
    try:
        while (code := _wait(process)) is None:
            stopped = True
            process.send_signal(signal.SIGTERM)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if code and not stopped:
        raise EngineError(f"tritonserver ended with code {code}; what it printed says why")


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code, or None where SIGTERM or Ctrl-C came first."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        return None


if __name__ == "__main__":
    run_command(main, "triton_server.py")
