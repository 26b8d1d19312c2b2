"""Train an EAGLE-1 draft head for a target: collect its answers, then fit the head to them.

    trtspec build demo --output demo-plain --no-eagle --max-batch-size 16
    python build_scripts/train_eagle.py collect demo-plain --output data --generated-prompts 20000
    python build_scripts/train_eagle.py train demo-plain --data data --run run --output head

Both steps go on where they were interrupted when the same command is given again.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import click
import torch
from tqdm import tqdm

from trtspec.checkpoint.target import TargetConfig
from trtspec.cli.main import main as run_command
from trtspec.cli.options import DirectoryPath
from trtspec.cli.run import read_prompts
from trtspec.engine_dir import EngineDir
from trtspec.errors import ConfigError
from trtspec.session import Session
from trtspec.staging import check_output
from trtspec.train.collect import collect_answers, collect_texts
from trtspec.train.copying import blended, with_copying
from trtspec.train.export import export_head, load_head
from trtspec.train.fit import TrainConfig, Trainer
from trtspec.train.head import EagleHead
from trtspec.train.prompts import generate_prompts
from trtspec.train.store import TrainingData, shard_files
from trtspec.train.tables import head_sizes, target_tables, token_ranking

DEFAULTS = TrainConfig()
COUNT = click.IntRange(min=1)


@click.group(help=__doc__)
def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")


@main.command()
@click.argument("engine_dir", type=DirectoryPath())
@click.option("--output", required=True, type=DirectoryPath(), help="Directory for the shards.")
@click.option("--generated-prompts", type=COUNT, help="Answer this many prompts of trtspec's own making.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Answer the prompts of a file, as `trtspec run`.")
@click.option("--texts", type=click.Path(path_type=Path), help="Take given conversations (.jsonl) as they are.")
@click.option("--max-new-tokens", type=COUNT, default=160, show_default=True, help="Tokens of an answer at most.")
@click.option("--seed", default=0, show_default=True, help="Of the generated prompts.")
def collect(
    engine_dir: Path,
    output: Path,
    generated_prompts: int | None,
    prompt_file: Path | None,
    texts: Path | None,
    max_new_tokens: int,
    seed: int,
) -> None:
    """Store token ids and the target's hidden states of answers or given texts."""
    if sum(source is not None for source in (generated_prompts, prompt_file, texts)) != 1:
        raise click.UsageError("give one of --generated-prompts, --prompt-file and --texts")
    with Session.open(engine_dir) as session, tqdm(disable=None, unit="sequence") as bar:
        if texts is not None:
            collect_texts(session, texts, output, progress=lambda done, total: _advance(bar, done, total))
            return
        if prompt_file is not None:
            prompts = [_chat(prompt) if isinstance(prompt, str) else prompt for prompt in read_prompts(prompt_file)]
        else:
            prompts = [_chat(prompt.text) for prompt in generate_prompts(generated_prompts or 0, seed)]
        collect_answers(
            session,
            prompts,
            output,
            max_new_tokens=max_new_tokens,
            progress=lambda done, total: _advance(bar, done, total),
        )


@main.command()
@click.argument("engine_dir", type=DirectoryPath())
@click.option(
    "--data", required=True, multiple=True, type=DirectoryPath(), help="Shards that `collect` wrote; can be repeated."
)
@click.option("--run", "run_directory", required=True, type=DirectoryPath(), help="Checkpoint and log.")
@click.option("--output", required=True, type=DirectoryPath(), help="The head's directory.")
@click.option("--epochs", type=COUNT, default=DEFAULTS.epochs, show_default=True, help="Times that all data is seen.")
@click.option(
    "--loss-vocab", type=COUNT, default=8192, show_default=True, help="Most frequent tokens that the loss looks at."
)
@click.option("--intermediate-size", type=COUNT, help="Width of the head's MLP.  [default: the target's]")
@click.option(
    "--rope-theta", type=float, help="Base of the head's rotary embedding.  [default: that of --start-from, or 10000]"
)
@click.option("--start-from", type=DirectoryPath(), help="A head to go on from, in place of one that knows nothing.")
@click.option(
    "--copy-groups",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="KV heads to add to --start-from, which are taught to copy from the text before.",
)
@click.option(
    "--blend",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="How far to move from --start-from to the trained head; less forgets less.",
)
@click.option("--learning-rate-scale", default=1.0, show_default=True, help="Less than 1 to go on from a good head.")
@click.option(
    "--held-out", type=COUNT, default=DEFAULTS.held_out, show_default=True, help="Sequences kept for measuring."
)
@click.option(
    "--read-prompts", "read_from", type=COUNT, help="Learn from prompts of at least this many tokens as from answers."
)
@click.option(
    "--unrolled", type=COUNT, default=DEFAULTS.unrolled, show_default=True, help="Draft steps that are trained."
)
@click.option("--seed", default=DEFAULTS.seed, show_default=True)
@click.option("--precision", type=click.Choice(["bfloat16", "float32"]), default=DEFAULTS.precision, show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
def train(
    engine_dir: Path,
    data: tuple[Path, ...],
    run_directory: Path,
    output: Path,
    epochs: int,
    loss_vocab: int,
    intermediate_size: int | None,
    rope_theta: float | None,
    start_from: Path | None,
    copy_groups: int,
    blend: float,
    learning_rate_scale: float,
    held_out: int,
    read_from: int | None,
    unrolled: int,
    seed: int,
    precision: str,
    device: str,
) -> None:
    """Fit a head to collected data and write it in the official format."""
    check_output(output, force=False)
    if output.resolve() == run_directory.resolve() or run_directory.resolve() in output.resolve().parents:
        raise ConfigError(f"--output {output} lies in --run {run_directory}; choose another directory")
    target = EngineDir.load(engine_dir)
    config = dataclasses.replace(
        DEFAULTS,
        epochs=epochs,
        unrolled=unrolled,
        seed=seed,
        precision=precision,
        held_out=held_out,
        read_prompts=read_from,
        learning_rate=DEFAULTS.learning_rate * learning_rate_scale,
        matrix_learning_rate=DEFAULTS.matrix_learning_rate * learning_rate_scale,
    )
    examples = TrainingData([file for directory in data for file in shard_files(directory)])
    given: EagleHead | None = None
    earlier: tuple[int, ...] = ()
    if start_from is not None:
        if intermediate_size:
            raise click.UsageError("--intermediate-size is that of --start-from; leave it out")
        given, earlier = load_head(start_from, TargetConfig.from_json(target.target.config), rope_theta)
    elif copy_groups or blend < 1:
        raise click.UsageError("--copy-groups and --blend need a head to --start-from")
    tables = target_tables(target, examples, loss_vocab, _device(device), earlier)
    start = given
    if given is not None and copy_groups:
        start = with_copying(given, copy_groups, examples, tables.embedding, seed)
    sizes = head_sizes(target, intermediate_size, rope_theta or 10000.0) if start is None else start.sizes
    trainer = Trainer(sizes, config, examples, tables, run_directory, start)
    _run(trainer)
    if given is not None and blend < 1:
        trainer.head = blended(given, trainer.head, blend)
    vocab_size, positions = target.target.config["vocab_size"], target.target.config["max_position_embeddings"]
    ranking = token_ranking(examples, target, earlier)
    export_head(trainer.head, output, vocab_size=vocab_size, max_positions=positions, ranking=ranking)
    accepted = trainer.acceptance()
    click.echo(f"{output}: held-out acceptance by position {', '.join(f'{value:.3f}' for value in accepted)}")


def _run(trainer: Trainer) -> None:
    """Train to the end, behind a progress bar."""
    with tqdm(total=trainer.total_passes, initial=trainer.done, disable=None, unit="pass") as bar:

        def show(done: int, total: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            _advance(bar, done, total)

        trainer.run(show)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _advance(bar: tqdm, done: int, total: int) -> None:  # type: ignore[type-arg]
    bar.total = total
    bar.update(done - bar.n)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name} can't be used ({str(error).splitlines()[0]}); choose cpu") from None
    return device


if __name__ == "__main__":
    run_command(main, "train_eagle.py")
