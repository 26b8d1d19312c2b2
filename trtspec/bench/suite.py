"""Several prompt sets and batch sizes measured with the same methods, and what the figures depend on."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch

from trtspec import __version__
from trtspec.bench.runner import Comparison, Contender, compare
from trtspec.config import SamplingParams
from trtspec.decode.cost_store import processor
from trtspec.engine.onnxruntime_engine import set_threads
from trtspec.session import Session


@dataclass(frozen=True)
class PromptSet:
    """Tokenized prompts under the name that the user gave them."""

    name: str
    prompts: list[tuple[str, list[int]]]
    """(id, token ids)"""


@dataclass(frozen=True)
class Suite:
    """One comparison for each prompt set and batch size."""

    comparisons: list[Comparison]
    settings: Mapping[str, Any]
    """What all of them share."""

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `trtspec bench --json`: a single comparison's own, or all of them under `runs`."""
        runs = [comparison.to_json() for comparison in self.comparisons]
        if len(runs) == 1:
            return runs[0]
        return {"settings": dict(self.settings), "lossless": all(run["lossless"] for run in runs), "runs": runs}


def run_suite(
    session: Session,
    contenders: Seq[Contender],
    prompt_sets: Seq[PromptSet],
    sampling: SamplingParams,
    *,
    batch_sizes: Seq[int],
    repeats: int,
    warmup: int,
    settings: Mapping[str, Any],
    progress: Callable[[int, int], None],
) -> Suite:
    """Compare the contenders on every prompt set with every batch size.

    Args:
        contenders: the first is the baseline.
        progress: called with groups done and all groups, of the whole suite.
    """
    sizes = [-(-len(each.prompts) // batch) for each in prompt_sets for batch in batch_sizes]
    comparisons: list[Comparison] = []
    for prompt_set in prompt_sets:
        for batch in batch_sizes:
            before = sum(sizes[: len(comparisons)])

            def report(done: int, _: int, before: int = before) -> None:
                progress(before + done, sum(sizes))

            comparisons.append(
                compare(
                    session,
                    contenders,
                    prompt_set.prompts,
                    sampling,
                    batch_size=batch,
                    repeats=repeats,
                    warmup=warmup,
                    settings={"dataset": prompt_set.name, **settings},
                    progress=report,
                )
            )
    own = ("dataset", "batch_size")
    shared = {name: value for name, value in comparisons[0].settings.items() if name not in own}
    varied = {"datasets": [each.name for each in prompt_sets], "batch_sizes": list(batch_sizes)}
    return Suite(comparisons, {**varied, **shared})


def environment(session: Session) -> dict[str, Any]:
    """The machine and the software that figures of this session come from, and when."""
    on_cpu = session.runtime == "onnxruntime"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "trtspec_version": __version__,
        "engine_dir": str(session.engine_dir.path),
        "target": session.engine_dir.target.name,
        "draft_head": session.engine_dir.draft_head.name if session.engine_dir.draft_head else None,
        "runtime": session.runtime,
        "runtime_version": _version(session.runtime),
        "dtype": session.engine_dir.dtype,
        "max_batch_size": session.limits.max_batch_size,
        "max_draft_tokens": session.limits.max_draft_tokens,
        "system": platform.platform(),
        "cpu": processor(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "threads": set_threads(None) if on_cpu else None,
        "gpu": None if on_cpu else torch.cuda.get_device_name(),
    }


def _version(runtime: str) -> str | None:
    """The installed package's; None where the runtime came in another way than as a package of its name."""
    try:
        return metadata.version(runtime)
    except metadata.PackageNotFoundError:
        return None
