"""Measured pass times, kept in the engine directory for the sessions to come."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trtspec.draft.costs import PassCosts
from trtspec.engine.onnxruntime_engine import set_threads

COSTS_FILE = "costs.json"
"""In the engine directory, beside engine.json, which doesn't list it: it may be deleted at any time."""


class Costs(NamedTuple):
    """Of the target's passes and the draft head's."""

    verify: PassCosts
    head: PassCosts | None


def machine_key(runtime: str, device: torch.device) -> str:
    """What measurements hold for."""
    if device.type == "cuda":
        return f"{runtime}, {torch.cuda.get_device_name(device)}"
    return f"{runtime}, {processor()}, {set_threads(None)} threads"


def processor() -> str:
    """The CPU's name and its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def load_costs(directory: Path, key: str) -> Costs | None:
    """What was measured on such a machine, or None; a file that makes no sense counts as none and is written anew."""
    try:
        entry = json.loads((directory / COSTS_FILE).read_text(encoding="utf-8"))[key]
        head = entry["head"]
        return Costs(PassCosts.from_json(entry["verify"]), None if head is None else PassCosts.from_json(head))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def store_costs(directory: Path, key: str, costs: Costs) -> bool:
    """Keep measurements beside those of other machines, in one rename; false where nothing may be written."""
    file, scratch = directory / COSTS_FILE, directory / f"{COSTS_FILE}.{os.getpid()}"
    entry = {"verify": costs.verify.to_json(), "head": costs.head.to_json() if costs.head else None}
    try:
        scratch.write_text(json.dumps({**_entries(file), key: entry}, indent=1) + "\n", encoding="utf-8")
        scratch.replace(file)
        return True
    except OSError:
        # A read-only directory, or a full disk: the next session measures again.
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        return False


def _entries(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
