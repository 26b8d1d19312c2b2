"""A model repository of Triton Inference Server around an engine directory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.config import MAX_QUEUED, RUNTIMES
from trtspec.engine_dir import EngineDir
from trtspec.errors import ConfigError
from trtspec.serving.request import INPUTS, OUTPUTS, Field
from trtspec.staging import check_output, staged_directory

CHAT_MODES = ("auto", "chat", "raw")
"""How `text_input` is taken: through the chat template if there is one, always, or never."""
_PYTHON_ENV = "EXECUTION_ENV_PATH"
"""The Python backend's own parameter."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_MODEL = '''"""Written by `trtspec triton-repo`."""

from trtspec.serving.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class ServingOptions:
    """What a served model's configuration holds, apart from its instances."""

    engine_dir: Path
    """Absolute."""
    runtime: str
    """One of RUNTIMES."""
    threads: int | None = None
    """CPU threads of an instance; None: one per core."""
    max_queued: int = MAX_QUEUED
    """Requests that may wait for a slot in an instance."""
    chat: str = "auto"
    """One of CHAT_MODES."""
    python_env: Path | None = None
    """Virtual environment of an instance's Python; None: the server's own search, by PATH."""

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise ConfigError(f"parameter runtime is {self.runtime!r}; choose one of: {', '.join(RUNTIMES)}")
        if self.chat not in CHAT_MODES:
            raise ConfigError(f"parameter chat is {self.chat!r}; choose one of: {', '.join(CHAT_MODES)}")
        for name, value in (("threads", self.threads), ("max_queued", self.max_queued)):
            if value is not None and value < 1:
                raise ConfigError(f"parameter {name} is {value}; give at least 1")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> ServingOptions:
        """From the parameters of config.pbtxt.

        Raises:
            ConfigError: one is missing, or has a value that can't be used.
        """
        for name in ("engine_dir", "runtime"):
            if not parameters.get(name):
                raise ConfigError(f"config.pbtxt has no parameter {name}; write it again with trtspec triton-repo")
        threads = _integer(parameters, "threads")
        queued = _integer(parameters, "max_queued")
        return cls(
            Path(parameters["engine_dir"]),
            parameters["runtime"],
            threads,
            MAX_QUEUED if queued is None else queued,
            parameters.get("chat", "auto"),
            Path(parameters[_PYTHON_ENV]) if _PYTHON_ENV in parameters else None,
        )

    def to_parameters(self) -> dict[str, str]:
        """The parameters of config.pbtxt."""
        return {
            "engine_dir": str(self.engine_dir),
            "runtime": self.runtime,
            **({} if self.threads is None else {"threads": str(self.threads)}),
            "max_queued": str(self.max_queued),
            "chat": self.chat,
            **({} if self.python_env is None else {_PYTHON_ENV: str(self.python_env)}),
        }


def write_model(
    engine_dir: EngineDir,
    output: Path,
    *,
    name: str = "trtspec",
    instances: int = 1,
    runtime: str | None = None,
    threads: int | None = None,
    max_queued: int = MAX_QUEUED,
    chat: str = "auto",
    python_env: Path | None = None,
    force: bool = False,
) -> Path:
    """Add a model to the model repository `output`, which is made where it doesn't exist.

    Args:
        runtime: None: the only one of the directory, or the first of RUNTIMES' compiled ones in it.
        instances: processes that serve it, on the CPU or on each GPU, each with the whole model in memory.
        python_env: the virtual environment in which they run, with trtspec in it.

    Returns:
        The model's directory, `output/name`; it appears complete or not at all.

    Raises:
        UserError: a value can't be used, or `output/name` exists.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name!r} is no model name; use letters, digits, '_', '-' and '.', a letter or digit first, "
            "128 at most"
        )
    if instances < 1:
        raise ConfigError(f"--instances is {instances}; give at least 1")
    if python_env is not None and not (python_env / "bin" / "activate").is_file():
        raise ConfigError(f"--python-env {python_env} is no virtual environment: bin/activate is not there")
    path = _absolute(engine_dir.path)
    options = ServingOptions(
        path,
        choose_served_runtime(engine_dir, runtime),
        threads,
        max_queued,
        chat,
        None if python_env is None else _absolute(python_env),
    )
    model = output / name
    check_output(model, force=force, source=path, what="engine directory", marker="config.pbtxt")
    with staged_directory(model, force=force) as staging:
        (staging / "config.pbtxt").write_text(config_text(name, options, instances), encoding="utf-8")
        (staging / "1").mkdir()
        (staging / "1" / "model.py").write_text(_MODEL, encoding="utf-8")
    return model


def choose_served_runtime(engine_dir: EngineDir, runtime: str | None) -> str:
    """The runtime asked for, or the first that the directory was built for, compiled ones first.

    Whether it can be used is seen where the server runs, which may be another machine.

    Raises:
        ConfigError: the directory was not built for it.
    """
    built = [name for name in ("tensorrt", "tensorrt-rtx", "onnxruntime") if name in engine_dir.runtimes]
    if runtime is None:
        return built[0]
    if runtime not in built:
        raise ConfigError(
            f"{engine_dir.path} was built for {', '.join(built)}, not for {runtime}; build it with --runtime {runtime}"
        )
    return runtime


def config_text(name: str, options: ServingOptions, instances: int) -> str:
    """The model's config.pbtxt."""
    kind = "KIND_CPU" if options.runtime == "onnxruntime" else "KIND_GPU"
    lines = [
        "# Written by `trtspec triton-repo`.",
        f"name: {_quoted(name)}",
        'backend: "python"',
        "# Sequences are batched between decode steps, not by the server.",
        "max_batch_size: 0",
        "model_transaction_policy { decoupled: true }",
        *(_tensor("input", field, " optional: true") for field in INPUTS),
        *(_tensor("output", field) for field in OUTPUTS),
        f"instance_group [ {{ count: {instances} kind: {kind} }} ]",
        *(
            f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
            for key, value in options.to_parameters().items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _absolute(path: Path) -> Path:
    absolute = path.resolve()
    try:
        str(absolute).encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"the path {str(absolute)!r} is not UTF-8; move or rename the directory") from None
    return absolute


def _tensor(kind: str, field: Field, extra: str = "") -> str:
    return f"{kind} [ {{ name: {_quoted(field.name)} data_type: TYPE_{field.dtype} dims: [ {field.size} ]{extra} }} ]"


def _quoted(text: str) -> str:
    """A string of protobuf's text format."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(f"\\{ord(char):03o}" if ord(char) < 32 else char for char in escaped) + '"'


def _integer(parameters: Mapping[str, Any], name: str) -> int | None:
    text = parameters.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"parameter {name} is {text!r}; give an integer") from None
