"""The two TensorRT packages: which module is imported, its logger, and whether a GPU is here to run it."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import sys
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from trtspec.errors import ConfigError, DependencyError, EngineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RuntimePackage:
    """How a runtime is imported and installed."""

    modules: tuple[str, ...]
    package: str
    extra: str


RUNTIMES = {
    "tensorrt": RuntimePackage(("tensorrt",), "tensorrt", "tensorrt"),
    "tensorrt-rtx": RuntimePackage(("tensorrt_rtx", "tensorrt_rtx_bindings"), "tensorrt-rtx", "tensorrt-rtx"),
}


def load_tensorrt(runtime: str) -> ModuleType:
    """The runtime's Python module.

    Raises:
        ConfigError: no such runtime.
        DependencyError: its package is not installed.
        EngineError: the package is installed and cannot be loaded.
    """
    if runtime not in RUNTIMES:
        raise ConfigError(f"runtime {runtime!r} is not one of {', '.join(RUNTIMES)}")
    package = RUNTIMES[runtime]
    for module in package.modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise EngineError(f"{module} is installed and cannot be loaded: {error}") from error
        # The wheels load shared libraries while they are imported, and wrap failures in types of their own.
        except Exception as error:
            raise EngineError(f"{module} is installed and cannot be loaded: {error}") from error
    raise DependencyError(package.package, f"the runtime {runtime}", package.extra)


@functools.cache
def tensorrt_logger(runtime: str) -> Any:
    """The runtime's one logger: it ignores every logger after the first of a process.

    The result has `take_errors() -> list[str]`, the error lines since the last call, and `stopping`, an event: while it
    is set, errors are the consequence of stopping the compiler and not worth more than a debug line.
    """
    trt = load_tensorrt(runtime)
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.WARNING,
        trt.ILogger.INFO: logging.INFO,
        trt.ILogger.VERBOSE: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: list[str] = []
            self.stopping = threading.Event()

        def log(self, severity: Any, msg: str) -> None:
            level = levels[severity]
            if level == logging.ERROR:
                self._errors.append(" ".join(msg.split()))
            # A reminder about every int64 input; the engine checks the dtypes that it binds.
            expected = msg.rstrip().endswith("has Int64 binding.") or self.stopping.is_set()
            logger.log(logging.DEBUG if expected else level, "%s: %s", runtime, msg)

        def take_errors(self) -> list[str]:
            errors, self._errors = self._errors, []
            return errors

    return Logger()


def cuda_problem() -> str | None:
    """Why no CUDA device can be used here, or None."""
    driver = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(driver)
    except OSError:
        return f"no NVIDIA driver: {driver} is not on this machine"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return None
