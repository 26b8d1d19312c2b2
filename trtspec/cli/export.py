"""`trtspec export`: configurations for other runtimes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtspec.cli.options import drafting_options, is_engine_directory, parse_pairs
from trtspec.config import HEAD_METHODS, METHODS, SpeculationConfig
from trtspec.engine_dir import EngineDir
from trtspec.errors import CheckpointError, ConfigError
from trtspec.staging import check_file, write_file

if TYPE_CHECKING:
    from trtspec.checkpoint.draft_head import DraftHead
    from trtspec.integrations.tensorrt_llm_config import ExportedHead


_OF_DEMO = "of the demo target"


@click.group()
def export() -> None:
    """Write configurations for other runtimes."""


@export.command("tensorrt-llm")
@click.argument("source", metavar="DIR|TARGET")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="The YAML file to write.")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    help="Drafting method.  [default: what DIR was tuned to; ngram-eagle with an EAGLE-3 head, else ngram]",
)
@click.option(
    "--eagle",
    metavar="HEAD",
    help="EAGLE-3 draft head: a directory or a hub id, written as it is.  [default: the one DIR was built with]",
)
@click.option(
    "--eagle-option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="A wiring decision for --eagle that the head's files don't settle; repeatable.",
)
@drafting_options
@click.option("--force", is_flag=True, help="Replace an existing file.")
def tensorrt_llm(
    source: str,
    output: Path,
    method: str | None,
    eagle: str | None,
    options: tuple[str, ...],
    speculation: SpeculationConfig,
    force: bool,
) -> None:
    """Write the speculative part of a TensorRT-LLM configuration for an engine directory DIR or a TARGET.

    What TensorRT-LLM has no equivalent for is told on stderr and in the file's comments.
    """
    from trtspec.integrations.tensorrt_llm_config import export as make_export

    check_file(output, force=force)
    _check_options(method, eagle, options)
    head, origin, pairs = None, source, parse_pairs(options)
    if is_engine_directory(source):
        engine_dir = EngineDir.load(source)
        origin = engine_dir.target.origin
        if method is None and eagle is None and engine_dir.defaults:
            method = _tuned_method(engine_dir)
        if _needs_head(method):
            head = _head_of_directory(engine_dir, eagle, pairs)
    else:
        _check_target(source)
        if _needs_head(method):
            head = _head_of_target(source, eagle, pairs)
    made = make_export(dataclasses.replace(speculation, method=method), head)
    if _is_gguf(origin):
        line = f"{origin} is a GGUF file: TensorRT-LLM loads Hugging Face checkpoints; serve the one it was made from"
        made = dataclasses.replace(made, missing=(*made.missing, line))
    write_file(output, made.to_yaml(), force=force)
    click.echo(f"{output}: {made.summary}")
    for line in made.missing:
        click.echo(f"no equivalent: {line}", err=True)


def _needs_head(method: str | None) -> bool:
    return method is None or method in HEAD_METHODS


def _tuned_method(engine_dir: EngineDir) -> str | None:
    """The method that a directory was tuned to; None where that needs a head that TensorRT-LLM can't take."""
    from trtspec.checkpoint.draft_head.config import EAGLE3

    method, head = engine_dir.default_speculation.method, engine_dir.draft_head
    usable = head is not None and head.config["kind"] == EAGLE3
    return None if method in HEAD_METHODS and not usable else method


def _check_options(method: str | None, eagle: str | None, options: tuple[str, ...]) -> None:
    if eagle == "":
        raise ConfigError("--eagle is empty; give a draft head's directory or a hub id")
    if eagle is not None and method is not None and method not in HEAD_METHODS:
        raise ConfigError(f"--method {method} uses no draft head; leave --eagle out")
    if options and eagle is None:
        raise ConfigError("--eagle-option is for --eagle HEAD; add it")


def _head_of_directory(engine_dir: EngineDir, eagle: str | None, options: dict[str, str]) -> ExportedHead | None:
    """The head named by --eagle, else the one that the directory was built with.

    Raises:
        ConfigError: it is not where it was when the directory was built.
    """
    from trtspec.checkpoint.draft_head import DraftHeadConfig, open_draft_head
    from trtspec.checkpoint.draft_head.config import EAGLE3
    from trtspec.checkpoint.hub import is_hub_id
    from trtspec.checkpoint.source import DEMO
    from trtspec.checkpoint.target import TargetConfig
    from trtspec.integrations.tensorrt_llm_config import ExportedHead

    if eagle is not None:
        return _exported(eagle, open_draft_head(eagle, TargetConfig.from_json(engine_dir.target.config), options))
    record = engine_dir.draft_head
    if record is None:
        return None
    config = DraftHeadConfig.from_json(record.config)
    # A directory keeps a head's weights in its own form, which TensorRT-LLM does not read.
    if config.kind == EAGLE3 and not Path(record.origin).is_dir() and not is_hub_id(record.origin):
        raise ConfigError(
            f"the draft head of {engine_dir.path} was built from {record.origin}, which is no longer there; name the "
            "head with --eagle HEAD, or use --method ngram"
        )
    return ExportedHead(_OF_DEMO if record.origin == DEMO else record.origin, config, record.decisions, record.lm_head)


def _head_of_target(target: str, eagle: str | None, options: dict[str, str]) -> ExportedHead | None:
    """The head named by --eagle, read for this target, or the demo target's own."""
    from trtspec.checkpoint.draft_head import open_draft_head
    from trtspec.checkpoint.source import DEMO, open_checkpoint
    from trtspec.checkpoint.target import TargetConfig
    from trtspec.integrations.tensorrt_llm_config import ExportedHead

    if eagle is None:
        # The head that comes with trtspec is an EAGLE-1 head.
        return ExportedHead(_OF_DEMO, None) if target == DEMO else None
    checkpoint = open_checkpoint(target)
    config = TargetConfig.from_hf(checkpoint.hf_config, checkpoint.generation_config)
    # Whether the head's copies of the target's tables equal them makes no difference here, so they are not loaded.
    return _exported(eagle, open_draft_head(eagle, config, options))


def _exported(model: str, head: DraftHead) -> ExportedHead:
    from trtspec.integrations.tensorrt_llm_config import ExportedHead

    return ExportedHead(model, head.config, {decision.name: decision.to_json() for decision in head.decisions})


def _check_target(target: str) -> None:
    """Raise CheckpointError where there can be no such target. Its weights are not needed, nor fetched from the hub."""
    from trtspec.checkpoint.hub import is_hub_id
    from trtspec.checkpoint.source import DEMO

    path = Path(target).expanduser()
    is_file = path.is_file() and path.suffix == ".gguf"
    if target == DEMO or is_file or (path / "config.json").is_file() or (not path.exists() and is_hub_id(target)):
        return
    raise CheckpointError(
        f"{target or 'the empty name'} is neither an engine directory nor a target; give a directory that holds "
        "engine.json or config.json, a .gguf file, a hub id owner/name, or demo"
    )


def _is_gguf(origin: str) -> bool:
    from trtspec.checkpoint.source import DEMO

    return origin == DEMO or origin.endswith(".gguf")
