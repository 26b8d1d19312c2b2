"""`trtspec run`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.options import SAMPLING, DirectoryPath, drafting_options, engine_options, sampling_options
from trtspec.config import MAX_LOGPROBS, METHODS, SamplingParams, SpeculationConfig
from trtspec.errors import PromptError

if TYPE_CHECKING:
    from trtspec.completion import Completion
    from trtspec.session import Session


@click.command()
@click.argument("directory", metavar="DIR", type=DirectoryPath())
@click.option("--prompt", "prompts", multiple=True, help="Text to answer or continue; repeatable: a batch.")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    help=".txt as one prompt, or .jsonl with `prompt` or `messages` a line.",
)
@click.option("--chat/--raw", default=None, help="Use the chat template or not.  [default: chat if there is one]")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    help="Drafting method.  [default: as DIR was tuned, else ngram-eagle where it has a draft head, else ngram]",
)
@drafting_options
@click.option(
    "--max-new-tokens", default=SAMPLING.max_new_tokens, show_default=True, help="Tokens to generate at most."
)
@sampling_options
@click.option("--stop", multiple=True, help="Text that ends the output; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token.")
@click.option(
    "--logprobs",
    type=click.IntRange(0, MAX_LOGPROBS),
    help="With --json: log-probabilities of each token and of so many of the likeliest in its place.  [default: none]",
)
@engine_options
@click.option("--stream/--no-stream", default=None, help="Show text as it grows.  [default: for a single prompt]")
@click.option("--stats", is_flag=True, help="Print the table of metrics to stderr.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, one per prompt, in order.")
def run(
    directory: Path,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    chat: bool | None,
    method: str | None,
    speculation: SpeculationConfig,
    max_new_tokens: int,
    sampling: SamplingParams,
    stop: tuple[str, ...],
    ignore_eos: bool,
    logprobs: int | None,
    runtime: str | None,
    threads: int | None,
    stream: bool | None,
    stats: bool,
    as_json: bool,
) -> None:
    """Generate text with the engine directory DIR; without a prompt option the prompt is read from stdin.

    Drafting options that are left out are those that `trtspec tune` found for DIR, where it has been tuned.
    """
    sampling = dataclasses.replace(
        sampling, max_new_tokens=max_new_tokens, stop=stop, ignore_eos=ignore_eos, logprobs=logprobs
    )
    speculation = dataclasses.replace(speculation, method=method)
    if prompts and prompt_file:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    raw_prompts: list[Any] = read_prompts(prompt_file) if prompt_file else list(prompts) or [_read_stdin()]
    _check_not_blank(raw_prompts)

    from trtspec.session import Session

    with Session.open(directory, runtime=runtime, threads=threads) as session:
        # All are checked before the first is answered.
        inputs = [session.encode(_as_input(prompt, chat, session)) for prompt in raw_prompts]
        if as_json or stream is False or (stream is None and len(inputs) > 1):
            completions = session.generate(inputs, sampling, speculation)
            _print_completions(completions, as_json)
        else:
            completions = _stream(session, inputs, sampling, speculation)
    if stats:
        print_stats(completions)


def read_prompts(path: Path) -> list[Any]:
    """Prompts of a .jsonl file (`prompt` or `messages` a line), or a text file as one prompt.

    Raises:
        PromptError: the file is missing, empty or malformed; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"--prompt-file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"--prompt-file {path} is not UTF-8 (byte {error.start}); convert it") from None
    if path.suffix != ".jsonl":
        return [text]
    prompts = [_read_line(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not prompts:
        raise PromptError(f"--prompt-file {path} holds no prompt")
    return prompts


def print_stats(completions: list[Completion]) -> None:
    """The metrics of each completion, a column each, to stderr."""
    tables = [_flatten(completion.metrics) for completion in completions]
    click.echo("", err=True)
    for name in max(tables, key=len):
        click.echo(f"{name:<34}" + "".join(f"{_cell(table.get(name, '')):>12}" for table in tables), err=True)


def _read_line(path: Path, number: int, line: str) -> Any:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"--prompt-file {path} line {number} is not JSON: {error}") from None
    if isinstance(data, dict) and isinstance(data.get("prompt"), str):
        return data["prompt"]
    messages = data.get("messages") if isinstance(data, dict) else None
    if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
        return messages
    raise PromptError(
        f"--prompt-file {path} line {number}: expected an object with `prompt` (text) or `messages` "
        "(a list of objects with `role` and `content`)"
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _read_stdin() -> str:
    if sys.stdin is None:
        raise PromptError("there is no prompt and no stdin; give --prompt TEXT or --prompt-file FILE")
    if sys.stdin.isatty():
        click.echo("reading the prompt from the terminal; end it with Ctrl-D", err=True)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise PromptError("stdin is not UTF-8; convert the prompt") from None


def _check_not_blank(prompts: list[Any]) -> None:
    for number, prompt in enumerate(prompts, 1):
        if isinstance(prompt, str) and not prompt.strip():
            raise PromptError(f"prompt {number} is empty; give --prompt TEXT, --prompt-file FILE, or text on stdin")


def _as_input(prompt: Any, chat: bool | None, session: Session) -> Any:
    if not isinstance(prompt, str):
        return prompt
    use_chat = session.tokenizer.has_chat_template if chat is None else chat
    return [{"role": "user", "content": prompt}] if use_chat else prompt


def _print_completions(completions: list[Completion], as_json: bool) -> None:
    for completion in completions:
        if as_json:
            click.echo(json.dumps(completion.to_json(), ensure_ascii=False))
        elif len(completions) == 1:
            click.echo(completion.text)
        else:
            click.echo(f"[{completion.index}] {completion.text}")


def _stream(
    session: Session, inputs: list[Any], sampling: SamplingParams, speculation: SpeculationConfig
) -> list[Completion]:
    """Print each prompt's text as it grows, one prompt after the other."""
    completions = []
    for number, prompt in enumerate(inputs):
        if len(inputs) > 1:
            click.echo(f"[{number}] ", nl=False)
        for event in session.stream(prompt, sampling, speculation):
            click.echo(event.text, nl=False)
            if sys.stdout is not None:
                sys.stdout.flush()
            if event.completion:
                completions.append(event.completion)
        click.echo()
    return completions


def _flatten(metrics: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{name}."))
        elif isinstance(value, list):
            flat.update({f"{prefix}{name}[{i}]": item for i, item in enumerate(value)})
        else:
            flat[prefix + name] = value
    return flat


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
