"""`trtspec inspect`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from trtspec.cli.options import parse_pairs
from trtspec.engine_dir import MANIFEST, DraftHeadRecord, EngineDir, RuntimeRecord
from trtspec.errors import CheckpointError


@click.command()
@click.argument("path")
@click.option("--target", help="PATH is an EAGLE draft head for this target: show how it is wired.")
@click.option("--eagle-option", "options", multiple=True, metavar="KEY=VALUE", help="A wiring decision; repeatable.")
@click.option("--verify", is_flag=True, help="Hash every file of an engine directory, however large.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(path: str, target: str | None, options: tuple[str, ...], verify: bool, as_json: bool) -> None:
    """Describe PATH: an engine directory, a target (directory, hub id, .gguf file, demo), or an EAGLE draft head."""
    if options and target is None:
        raise click.UsageError("--eagle-option is for draft heads; add --target TARGET")
    if target is not None:
        description = describe_draft_head(path, target, parse_pairs(options))
    elif (Path(path) / MANIFEST).exists():
        engine_dir = EngineDir.load(path)
        engine_dir.verify(whole=verify)
        description = describe_engine_dir(engine_dir)
    else:
        description = describe_checkpoint(path)
    if as_json:
        click.echo(json.dumps(description, ensure_ascii=False))
    else:
        click.echo("\n".join(_lines(description)))


def describe_engine_dir(engine_dir: EngineDir) -> dict[str, Any]:
    """Parts, sizes, limits, and which runtimes can be used on this machine."""
    from trtspec.engine.loading import runtime_problem

    problems = {name: runtime_problem(name) for name in engine_dir.runtimes}
    config = engine_dir.target.config
    return {
        "kind": "engine directory",
        "target": {
            "name": engine_dir.target.name,
            "origin": engine_dir.target.origin,
            "architecture": config["architecture"],
        },
        "built_by": f"trtspec {engine_dir.trtspec_version}",
        "dtype": engine_dir.dtype,
        "limits": engine_dir.limits.to_json(),
        "methods": list(engine_dir.methods),
        "draft_head": _describe_head_record(engine_dir.draft_head) if engine_dir.draft_head else None,
        "defaults": engine_dir.defaults.to_json() if engine_dir.defaults else None,
        "runtimes": {
            name: {
                "graphs": dict(record.graphs),
                **_compiled_for(name, record),
                "usable_here": problems[name] is None,
                **({"problem": problems[name]} if problems[name] else {}),
            }
            for name, record in engine_dir.runtimes.items()
        },
        "parts": {
            "embedding": engine_dir.embedding.location,
            "lm_head": engine_dir.lm_head.location
            + (" (the embedding table)" if engine_dir.lm_head == engine_dir.embedding else ""),
        },
        "file_bytes": {name: record.size for name, record in engine_dir.files.items()},
        "total_bytes": sum(record.size for record in engine_dir.files.values()),
    }


def _compiled_for(runtime: str, record: RuntimeRecord) -> dict[str, Any]:
    """The GPUs that TensorRT-RTX compiled for; without a choice of the user's they are the compiler's."""
    if record.compute_capabilities:
        return {"compute_capabilities": list(record.compute_capabilities)}
    return {"compute_capabilities": "80 and newer"} if runtime == "tensorrt-rtx" else {}


def _describe_head_record(record: DraftHeadRecord) -> dict[str, Any]:
    """A draft head that was built in: where it came from, its LM head, its wiring."""
    files = {"embedding": record.embedding, "lm_head": record.lm_head_weight, "token_ids": record.token_ids}
    return {
        "name": record.name,
        "origin": record.origin,
        "lm_head": record.lm_head,
        "config": {key: value for key, value in record.config.items() if key != "token_ids"},
        "decisions": dict(record.decisions),
        "parts": {name: ref.location for name, ref in files.items() if ref is not None},
    }


def describe_draft_head(path: str, target: str, options: dict[str, str]) -> dict[str, Any]:
    """A head's canonical wiring for a target: every decision with its origin, and the problems found."""
    from trtspec.checkpoint.draft_head import describe, open_draft_head
    from trtspec.checkpoint.source import check_weights, open_checkpoint
    from trtspec.checkpoint.target import EMBEDDING, LM_HEAD, TargetConfig

    checkpoint = open_checkpoint(target)
    config = TargetConfig.from_hf(checkpoint.hf_config, checkpoint.generation_config)
    check_weights(config, checkpoint.tensors)
    tables = checkpoint.tensors.load
    head = open_draft_head(
        path, config, options, partial(tables, EMBEDDING), partial(tables, EMBEDDING if config.tied else LM_HEAD)
    )
    return {**describe(head), "target": checkpoint.name}


def describe_checkpoint(path: str) -> dict[str, Any]:
    """Whether a checkpoint can be built as a target, and what it is."""
    from trtspec.checkpoint.draft_head import is_draft_head
    from trtspec.checkpoint.source import check_weights, open_checkpoint
    from trtspec.checkpoint.target import TargetConfig

    checkpoint = open_checkpoint(path)
    if is_draft_head(checkpoint.hf_config, checkpoint.tensors.tensors):
        raise CheckpointError(f"{path} is an EAGLE draft head; add --target TARGET to see how it is wired")
    config = TargetConfig.from_hf(checkpoint.hf_config, checkpoint.generation_config)
    warnings = check_weights(config, checkpoint.tensors)
    dtypes: dict[str, int] = {}
    for name in config.weight_shapes():
        dtype = checkpoint.tensors.tensors[name].dtype
        dtypes[dtype] = dtypes.get(dtype, 0) + 1
    return {
        "kind": "target checkpoint",
        "name": checkpoint.name,
        "origin": checkpoint.origin,
        "config": config.to_json(),
        "tensors": len(checkpoint.tensors.tensors),
        "dtypes": dtypes,
        "warnings": warnings,
    }


def _lines(value: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, item in value.items():
        if isinstance(item, dict) and item:
            lines += [f"{indent}{name}:", *_lines(item, indent + "  ")]
        else:
            text = "none" if item is None or item == [] else item
            text = ", ".join(map(str, text)) if isinstance(text, list) else text
            lines.append(f"{indent}{name}: {text}")
    return lines
