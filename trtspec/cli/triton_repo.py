"""`trtspec triton-repo`."""

from __future__ import annotations

from pathlib import Path

import click

from trtspec.cli.options import DirectoryPath
from trtspec.config import MAX_QUEUED, RUNTIMES
from trtspec.engine_dir import EngineDir


@click.command("triton-repo")
@click.argument("directory", metavar="DIR", type=DirectoryPath())
@click.option(
    "--output",
    required=True,
    metavar="MODEL_REPO",
    type=DirectoryPath(),
    help="The model repository: made, or added to.",
)
@click.option("--name", default="trtspec", show_default=True, help="The model's name, and its folder in MODEL_REPO.")
@click.option(
    "--instances", type=int, default=1, show_default=True, help="Processes that serve it, on the CPU or on each GPU."
)
@click.option(
    "--runtime",
    type=click.Choice(RUNTIMES),
    help="Runtime.  [default: the first DIR was built for: tensorrt, tensorrt-rtx, onnxruntime]",
)
@click.option("--threads", type=int, help="CPU threads of an instance.  [default: one per core]")
@click.option(
    "--max-queued",
    type=int,
    default=MAX_QUEUED,
    show_default=True,
    help="Requests that may wait for a slot in an instance; more are refused.",
)
@click.option(
    "--chat/--raw",
    "chat",
    default=None,
    help="Put text_input into the chat template or not.  [default: chat if there is one]",
)
@click.option(
    "--python-env",
    type=DirectoryPath(),
    help="Virtual environment, with trtspec in it, that serves the model.  [default: that of the server's PATH]",
)
@click.option("--force", is_flag=True, help="Replace the model if MODEL_REPO holds one of this name.")
def triton_repo(
    directory: Path,
    output: Path,
    name: str,
    instances: int,
    runtime: str | None,
    threads: int | None,
    max_queued: int,
    chat: bool | None,
    python_env: Path | None,
    force: bool,
) -> None:
    """Write a model for Triton Inference Server that serves the engine directory DIR."""
    from trtspec.serving.model_repository import write_model

    model = write_model(
        EngineDir.load(directory),
        output,
        name=name,
        instances=instances,
        runtime=runtime,
        threads=threads,
        max_queued=max_queued,
        chat="auto" if chat is None else "chat" if chat else "raw",
        python_env=python_env,
        force=force,
    )
    click.echo(model)
