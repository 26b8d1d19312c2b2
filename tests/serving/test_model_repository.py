"""The model repository that `trtspec triton-repo` writes, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from google.protobuf import json_format, text_format

from trtspec.cli.main import cli
from trtspec.engine_dir import EngineDir, RuntimeRecord
from trtspec.errors import ConfigError, UserError
from trtspec.serving.model_repository import ServingOptions, config_text, write_model
from trtspec.serving.request import INPUTS, OUTPUTS

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tiny_dir: Path, tmp_path: Path) -> Run:
    """`trtspec triton-repo` of the tiny engine directory into `tmp_path/models`: exit code and output."""

    def invoke(*options: object) -> tuple[int, str]:
        arguments = ["triton-repo", str(tiny_dir), "--output", str(tmp_path / "models"), *map(str, options)]
        try:
            cli.main(arguments, standalone_mode=False)
        except UserError as error:
            return 2, str(error)
        return 0, ""

    return invoke


def parsed(text: str) -> dict[str, object]:
    """config.pbtxt as the server reads it: the message of Triton's own protocol."""
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    found: dict[str, object] = json_format.MessageToDict(
        text_format.Parse(text, messages.ModelConfig()), preserving_proto_field_name=True
    )
    return found


def files(directory: Path) -> list[str]:
    return sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())


def test_the_files(run: Run, tiny_dir: Path, tmp_path: Path) -> None:
    assert run() == (0, "")
    assert files(tmp_path / "models") == ["trtspec/1/model.py", "trtspec/config.pbtxt"]
    model = (tmp_path / "models" / "trtspec" / "1" / "model.py").read_text()
    compile(model, "model.py", "exec")
    assert "from trtspec.serving.backend import TritonPythonModel\n" in model


def test_the_configuration(run: Run, tiny_dir: Path, tmp_path: Path) -> None:
    run("--name", "llm", "--instances", 2, "--threads", 1, "--max-queued", 7, "--raw")
    config = parsed((tmp_path / "models" / "llm" / "config.pbtxt").read_text())
    assert (config["name"], config["backend"]) == ("llm", "python")
    assert config.get("max_batch_size", 0) == 0
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["instance_group"] == [{"count": 2, "kind": "KIND_CPU"}]
    assert config["parameters"] == {
        "engine_dir": {"string_value": str(tiny_dir.resolve())},
        "runtime": {"string_value": "onnxruntime"},
        "threads": {"string_value": "1"},
        "max_queued": {"string_value": "7"},
        "chat": {"string_value": "raw"},
    }
    assert config["input"] == [
        {"name": field.name, "data_type": f"TYPE_{field.dtype}", "dims": [str(field.size)], "optional": True}
        for field in INPUTS
    ]
    assert config["output"] == [
        {"name": field.name, "data_type": f"TYPE_{field.dtype}", "dims": [str(field.size)]} for field in OUTPUTS
    ]


def test_the_fields_are_those_of_the_contract() -> None:
    assert {(field.name, field.dtype, field.size) for field in INPUTS} == {
        ("text_input", "STRING", 1),
        ("input_ids", "INT32", -1),
        ("max_tokens", "INT32", 1),
        ("temperature", "FP32", 1),
        ("top_k", "INT32", 1),
        ("top_p", "FP32", 1),
        ("min_p", "FP32", 1),
        ("repetition_penalty", "FP32", 1),
        ("seed", "UINT64", 1),
        ("stop_words", "STRING", -1),
        ("method", "STRING", 1),
        ("merge", "STRING", 1),
        ("stream", "BOOL", 1),
        ("ignore_eos", "BOOL", 1),
    }
    assert [(field.name, field.dtype, field.size) for field in OUTPUTS] == [
        ("text_output", "STRING", 1),
        ("output_ids", "INT32", -1),
        ("finish_reason", "STRING", 1),
        ("num_draft_tokens", "INT32", 1),
        ("num_accepted_tokens", "INT32", 1),
    ]


def test_several_models_in_one_repository(run: Run, tmp_path: Path) -> None:
    assert run("--name", "a") == (0, "")
    assert run("--name", "b") == (0, "")
    assert files(tmp_path / "models") == ["a/1/model.py", "a/config.pbtxt", "b/1/model.py", "b/config.pbtxt"]


def test_an_existing_model_is_replaced_only_with_force(run: Run, tmp_path: Path) -> None:
    run()
    code, message = run("--max-queued", 3)
    assert code == 2
    assert "trtspec exists and is not empty" in message
    assert "--force" in message
    assert run("--max-queued", 3, "--force") == (0, "")
    assert '"3"' in (tmp_path / "models" / "trtspec" / "config.pbtxt").read_text()
    assert files(tmp_path / "models") == ["trtspec/1/model.py", "trtspec/config.pbtxt"]


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "a b", "a:b", "ü", "-a", "a" * 129])
def test_a_name_that_is_none(run: Run, tmp_path: Path, name: str) -> None:
    code, message = run("--name", name)
    assert (code, message.startswith(f"--name {name!r} is no model name; use letters")) == (2, True)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--instances", 0), "--instances is 0; give at least 1"),
        (("--threads", 0), "threads is 0; give at least 1"),
        (("--max-queued", 0), "max_queued is 0; give at least 1"),
        (("--runtime", "tensorrt"), "was built for onnxruntime, not for tensorrt; build it with --runtime tensorrt"),
    ],
)
def test_wrong_options(run: Run, tmp_path: Path, options: tuple[object, ...], words: str) -> None:
    code, message = run(*options)
    assert (code, words in message) == (2, True), message
    assert not (tmp_path / "models").exists()


def test_the_python_environment(run: Run, tmp_path: Path) -> None:
    code, message = run("--python-env", tmp_path)
    assert (code, message) == (2, f"--python-env {tmp_path} is no virtual environment: bin/activate is not there")
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "activate").write_text("")
    assert run("--python-env", tmp_path / "env") == (0, "")
    parameters = parsed((tmp_path / "models" / "trtspec" / "config.pbtxt").read_text())["parameters"]
    assert json.loads(json.dumps(parameters))["EXECUTION_ENV_PATH"] == {"string_value": str(tmp_path / "env")}


def test_a_directory_that_is_no_engine_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.json"):
        cli.main(["triton-repo", str(tmp_path), "--output", str(tmp_path / "models")], standalone_mode=False)
    assert not (tmp_path / "models").exists()


def test_the_engine_directory_is_never_replaced(tiny_dir: Path) -> None:
    before = files(tiny_dir)
    with pytest.raises(UserError, match="is or holds the engine directory"):
        write_model(EngineDir.load(tiny_dir), tiny_dir.parent, name=tiny_dir.name, force=True)
    assert files(tiny_dir) == before


def test_a_repository_that_is_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("")
    code, message = run()
    assert code == 2
    assert "models" in message


def test_help_shows_defaults() -> None:
    text = " ".join(CliRunner().invoke(cli, ["triton-repo", "--help"], terminal_width=300).output.split())
    for words in ("[default: trtspec]", "[default: 1]", "[default: 128]", "[default: chat if there is one]"):
        assert words in text


def test_compiled_runtimes_come_first_and_run_on_gpus(tiny_dir: Path, tmp_path: Path) -> None:
    engine_dir = EngineDir.load(tiny_dir)
    both = dataclasses.replace(
        engine_dir, runtimes={**engine_dir.runtimes, "tensorrt-rtx": RuntimeRecord({"target": "x"}, (89,))}
    )
    for runtime, expected in ((None, "tensorrt-rtx"), ("onnxruntime", "onnxruntime")):
        model = write_model(both, tmp_path, name=expected, runtime=runtime)
        config = parsed((model / "config.pbtxt").read_text())
        assert f'"{expected}"' in json.dumps(config["parameters"])
        kind = "KIND_CPU" if expected == "onnxruntime" else "KIND_GPU"
        assert config["instance_group"] == [{"count": 1, "kind": kind}]


def test_any_path_is_written_so_that_the_server_reads_it() -> None:
    path = Path('/models/a "quoted" \\ näme\n\t')
    config = parsed(config_text("m", ServingOptions(path, "onnxruntime"), 1))
    assert json.loads(json.dumps(config))["parameters"]["engine_dir"]["string_value"] == str(path)


def test_a_path_that_is_no_text(tiny_dir: Path, tmp_path: Path) -> None:
    link = tmp_path / os.fsdecode(b"not-utf8-\xff")
    try:
        link.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    engine_dir = dataclasses.replace(EngineDir.load(tiny_dir), path=link)
    with pytest.raises(ConfigError, match="is not UTF-8; move or rename the directory"):
        write_model(engine_dir, tmp_path / "models")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine_dir": None}, "config.pbtxt has no parameter engine_dir"),
        ({"engine_dir": ""}, "config.pbtxt has no parameter engine_dir"),
        ({"runtime": None}, "config.pbtxt has no parameter runtime"),
        ({"runtime": "cuda"}, "parameter runtime is 'cuda'; choose one of: onnxruntime"),
        ({"threads": "many"}, "parameter threads is 'many'; give an integer"),
        ({"threads": "0"}, "parameter threads is 0; give at least 1"),
        ({"max_queued": ""}, "parameter max_queued is ''; give an integer"),
        ({"max_queued": "-1"}, "parameter max_queued is -1; give at least 1"),
        ({"chat": "yes"}, "parameter chat is 'yes'; choose one of: auto, chat, raw"),
    ],
)
def test_parameters_edited_by_hand(changes: dict[str, str | None], words: str) -> None:
    good = ServingOptions(Path("/x"), "onnxruntime", threads=2, max_queued=5, chat="raw", python_env=Path("/env"))
    assert ServingOptions.from_parameters(good.to_parameters()) == good
    parameters = {key: value for key, value in {**good.to_parameters(), **changes}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        ServingOptions.from_parameters(parameters)
    assert str(caught.value).startswith(words)
