"""Help, unknown commands, and the defaults that help shows."""

from __future__ import annotations

import dataclasses

import click
import pytest
from click.testing import CliRunner
from invocation import Invoke, assert_refused

import trtspec as package
from trtspec.cli.main import cli
from trtspec.config import SamplingParams, SpeculationConfig

COMMANDS = ("demo", "build", "run", "bench", "tune", "inspect", "triton-repo")
# Left out, these are simply not done.
WITHOUT_DEFAULT = {
    "dataset",
    "target",
    "options",
    "prompts",
    "prompt_file",
    "stop",
    "compare",
    "json_file",
    "sweep_tokens",
    "report",
}


def help_of(command: str) -> str:
    """A command's help in one line."""
    result = CliRunner().invoke(cli, [command, "--help"], terminal_width=300)
    assert result.exit_code == 0
    return " ".join(result.output.split())


def options(command: str) -> list[click.Option]:
    """A command's options."""
    return [parameter for parameter in cli.commands[command].params if isinstance(parameter, click.Option)]


def test_commands_are_listed() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    assert set(COMMANDS) <= set(cli.commands)
    assert all(f"\n  {command} " in result.output for command in COMMANDS)


def test_version(trtspec: Invoke) -> None:
    result = trtspec("--version")
    assert (result.code, result.err) == (0, "")
    assert package.__version__ in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_described_with_its_default(command: str) -> None:
    text = help_of(command)
    assert options(command)
    for option in options(command):
        record = option.get_help_record(click.Context(cli.commands[command]))
        assert record is not None
        names, description = record
        assert " ".join(description.split()) in text, names
        assert len(description) > 10, names
        if not (option.is_flag or option.required or option.name in WITHOUT_DEFAULT):
            assert "[default: " in description, names


@pytest.mark.parametrize("command", ["run", "bench"])
def test_defaults_are_those_of_the_configuration(command: str) -> None:
    text = help_of(command)
    for option, value in {
        "--ngram-min": SpeculationConfig().ngram_min,
        "--ngram-max": SpeculationConfig().ngram_max,
        "--ngram-tokens": SpeculationConfig().ngram_tokens,
        "--ngram-occurrence": SpeculationConfig().ngram_occurrence,
    }.items():
        assert f"[default: {value}]" in text[text.index(option) :].split(" --", 1)[0], option


def test_default_of_max_new_tokens() -> None:
    text = help_of("run")
    assert f"[default: {SamplingParams().max_new_tokens}]" in text[text.index("--max-new-tokens") :].split(" --")[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing command. (see: trtspec --help)"),
        (("fly",), "No such command 'fly'"),
        (("--fly",), "No such option"),
        (("run",), "Missing argument 'DIR'. (see: trtspec run --help)"),
        (("build",), "Missing argument 'TARGET'"),
        (("build", "x"), "Missing option '--output'"),
        (("bench", "x"), "Missing option '--dataset'"),
        (("inspect",), "Missing argument 'PATH'"),
        (("build", "x", "--output", "y", "--fly"), "No such option"),
        (("build", "x", "--output", "y", "--dtype", "int8"), "'int8' is not one of 'float32', 'float16', 'bfloat16'"),
        (("build", "x", "--output", "y", "--runtime", "cuda"), "'cuda' is not one of 'onnxruntime', 'tensorrt-rtx'"),
        (("build", "x", "--output", "y", "--max-seq-len", "long"), "--max-seq-len"),
        (("demo", "more"), "unexpected extra argument"),
        (("inspect", "x", "--deep"), "No such option"),
    ],
)
def test_usage_errors(trtspec: Invoke, arguments: tuple[str, ...], words: str) -> None:
    assert_refused(trtspec(*arguments), words, "(see: trtspec")


def test_option_names_are_field_names() -> None:
    names = {option.name for option in options("run")}
    for kind in (SamplingParams, SpeculationConfig):
        assert {field.name for field in dataclasses.fields(kind)} <= names
