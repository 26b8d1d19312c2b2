"""Speculative decoding with n-gram lookup and EAGLE draft heads, lossless, on ONNX Runtime and TensorRT engines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trtspec.completion import Completion, StreamEvent
    from trtspec.config import Limits, SamplingParams, SpeculationConfig
    from trtspec.engine_build import build
    from trtspec.engine_dir import EngineDir
    from trtspec.errors import TrtspecError, UserError
    from trtspec.session import Session

_MODULES = {
    "Completion": "completion",
    "EngineDir": "engine_dir",
    "Limits": "config",
    "SamplingParams": "config",
    "Session": "session",
    "SpeculationConfig": "config",
    "StreamEvent": "completion",
    "TrtspecError": "errors",
    "UserError": "errors",
    "build": "engine_build",
}

__all__ = [
    "Completion",
    "EngineDir",
    "Limits",
    "SamplingParams",
    "Session",
    "SpeculationConfig",
    "StreamEvent",
    "TrtspecError",
    "UserError",
    "build",
]


def __getattr__(name: str) -> Any:
    """Import on first use: torch and the runtimes take seconds that `trtspec --help` need not wait for."""
    if name not in _MODULES:
        raise AttributeError(f"module 'trtspec' has no attribute {name!r}")
    return getattr(import_module(f"trtspec.{_MODULES[name]}"), name)
