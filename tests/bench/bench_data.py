"""JSON objects of `trtspec bench` with made-up figures, by the classes that make the real ones."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

from trtspec.bench.runner import Comparison, Difference, MethodResult, Output
from trtspec.bench.suite import Suite
from trtspec.decode.stats import STAGES, SourceCounts, Stats

METHODS = ("none", "ngram", "eagle", "ngram-eagle:union", "ngram-eagle")
SOURCES = {"ngram": ("ngram",), "eagle": ("eagle",), "ngram-eagle": ("ngram", "eagle")}
ENVIRONMENT = {
    "date": "2026-11-30T12:00:00+00:00",
    "trtspec_version": "0.1.0",
    "engine_dir": "engines/tiny",
    "target": "tiny & <small>",
    "draft_head": "tiny head",
    "runtime": "onnxruntime",
    "runtime_version": "1.30.0",
    "dtype": "float32",
    "max_batch_size": 8,
    "max_draft_tokens": 32,
    "system": "Linux",
    "cpu": "a processor, 2 cores",
    "usable_cores": 2,
    "threads": 2,
    "gpu": None,
}


def bench_data(
    datasets: Seq[str] = ("edit", "news/chat.jsonl"),
    batches: Seq[int] = (1, 4),
    methods: Seq[str] = METHODS,
    sweep: Seq[int] | None = (1, 3, 8),
    repeats: int = 3,
    differences: Seq[Difference] = (),
    hf: bool = True,
) -> dict[str, Any]:
    """What `trtspec bench --json` would write; no two figures are alike."""
    made = random.Random(7)
    swept = [f"{stem}@{length}" for stem in ("ngram", "eagle") if stem in methods for length in sweep or ()]
    names = [*methods, *swept, *(["hf", "hf-lookup-10"] if hf else [])]
    shared = {"sweep_tokens": list(sweep) if sweep else None, "ngram_tokens": 10, "temperature": 0.0, **ENVIRONMENT}
    shared.update(repeats=repeats, warmup=1, max_new_tokens=64)
    comparisons = [
        Comparison(
            [_result(made, name, repeats) for name in names],
            list(differences),
            20,
            {"dataset": dataset, **shared, "batch_size": batch},
        )
        for dataset in datasets
        for batch in batches
    ]
    return Suite(comparisons, {"datasets": list(datasets), "batch_sizes": list(batches), **shared}).to_json()


def _result(made: random.Random, name: str, repeats: int) -> MethodResult:
    """Two groups of prompts."""
    result = MethodResult(name)
    speed = 40 * (1 + 0.3 * METHODS.index(name) if name in METHODS else made.uniform(0.8, 2))
    for _ in range(2):
        stats = Stats() if name.startswith("hf") else _stats(made, name.partition("@")[0].partition(":")[0])
        seconds = [120 / speed * made.uniform(0.9, 1.1) for _ in range(repeats)]
        result.add_group([Output([[1] * 60, [2] * 60], each, stats) for each in seconds])
    return result


def _stats(made: random.Random, method: str) -> Stats:
    steps = made.randint(40, 60)
    stats = Stats(steps=steps, emitted_tokens=steps, longest_paths=2 * steps)
    stats.stage_seconds = {stage: made.uniform(0.01, 0.3) for stage in STAGES}
    if method == "none":
        return stats
    at = [made.randint(26 - 6 * n, 30 - 6 * n) for n in range(4)]
    stats.drafts, stats.accepted_at, stats.accepted_tokens = 38, at, sum(at)
    stats.emitted_tokens += sum(at)
    stats.draft_tokens, stats.matched_tokens = 200, sum(at) + made.randint(5, 20)
    for source in SOURCES[method]:
        own = [made.randint(2 + n, count) for n, count in zip((4, 2, 1, 0), at, strict=True)]
        stats.by_source[source] = SourceCounts(made.randint(31, 37), made.randint(90, 160), sum(own), own)
    return stats
