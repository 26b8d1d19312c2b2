"""`trtspec run`: what is printed where, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from invocation import Invoke, assert_done, assert_refused, edit_json

from trtspec.session import Session

KEYS = {"index", "text", "token_ids", "prompt_tokens", "finish_reason", "logprobs", "metrics"}
COUNTS = {"steps", "drafts", "draft_tokens", "accepted_tokens", "emitted_tokens"}
FIGURES = {
    "acceptance_length",
    "acceptance_length_per_draft",
    "draft_acceptance_rate",
    "match_rate",
    "system_efficiency",
    "draft_ms_per_token",
    "time_to_first_token_ms",
    "tokens_per_second",
}
STAGES = {"prefill", "ngram", "eagle", "merge", "verify", "accept", "commit", "host"}
SOURCES = {"ngram", "eagle"}
# Copying is what n-gram lookup is for, so that drafts are made even by a random model.
COPY = "one two three four one two three four one two three four one two"


def test_json_object(trtspec: Invoke, tiny_dir: Path) -> None:
    result = trtspec("run", tiny_dir, "--prompt", COPY, "--max-new-tokens", 40, "--json")
    assert_done(result)
    assert result.out.count("\n") == 1
    found = result.lines[0]
    assert set(found) == KEYS | {"seed"}
    assert (found["index"], found["logprobs"], found["finish_reason"]) == (0, None, "length")
    assert len(found["token_ids"]) == 40
    metrics = found["metrics"]
    assert set(metrics) == COUNTS | FIGURES | {"acceptance_per_position", "by_source", "stage_ms"}
    assert all(type(metrics[name]) is int for name in COUNTS)
    assert all(type(metrics[name]) is float for name in FIGURES)
    assert set(metrics["stage_ms"]) == STAGES
    assert all(type(value) is float for value in metrics["stage_ms"].values())
    assert set(metrics["by_source"]) == SOURCES
    for counts in metrics["by_source"].values():
        assert set(counts) == {"drafts", "draft_tokens", "accepted_tokens"}
        assert all(type(value) is int for value in counts.values())
    assert metrics["by_source"]["ngram"]["drafts"] == metrics["drafts"] > 0
    assert metrics["emitted_tokens"] == 39
    assert all(0 < share <= 1 for share in metrics["acceptance_per_position"])


def test_several_prompts_in_order(trtspec: Invoke, tiny_dir: Path) -> None:
    texts = ["a", COPY, "The sky is"]
    prompts = [part for text in texts for part in ("--prompt", text)]
    together = trtspec("run", tiny_dir, *prompts, "--max-new-tokens", 12, "--json")
    assert_done(together)
    assert [line["index"] for line in together.lines] == [0, 1, 2]
    for text, line in zip(texts, together.lines, strict=True):
        alone = trtspec("run", tiny_dir, "--prompt", text, "--max-new-tokens", 12, "--json").lines[0]
        assert [line[key] for key in ("token_ids", "text", "prompt_tokens")] == [
            alone[key] for key in ("token_ids", "text", "prompt_tokens")
        ]


def test_more_prompts_than_slots(trtspec: Invoke, tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "word " * number}) + "\n" for number in range(11, 0, -1)))
    result = trtspec("run", tiny_dir, "--prompt-file", file, "--max-new-tokens", 3, "--json", "--raw")
    assert_done(result)
    assert [line["index"] for line in result.lines] == list(range(11))
    sizes = [line["prompt_tokens"] for line in result.lines]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 11


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_text_file_and_stdin_are_one_prompt(trtspec: Invoke, tiny_dir: Path, tmp_path: Path, mark: bytes) -> None:
    text = "first line\nsecond line – ünïcode"
    file = tmp_path / "prompt.txt"
    file.write_bytes(mark + text.encode())
    options = ("--max-new-tokens", 8, "--json")
    expected = trtspec("run", tiny_dir, "--prompt", text, *options).lines[0]["token_ids"]
    from_file = trtspec("run", tiny_dir, "--prompt-file", file, *options)
    from_stdin = trtspec("run", tiny_dir, *options, stdin=text.encode())
    assert [line["token_ids"] for line in from_file.lines + from_stdin.lines] == [expected, expected]


def test_jsonl_with_prompt_and_messages(trtspec: Invoke, tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Hi there"}
    rows: list[Any] = [{"prompt": "Hi there"}, {"messages": [user], "id": 7}, {"messages": [system, user]}]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(map(json.dumps, rows)).encode() + b"\r\n")
    result = trtspec("run", tiny_dir, "--prompt-file", file, "--max-new-tokens", 4, "--json")
    assert_done(result)
    plain, chat, briefed = result.lines
    assert plain["token_ids"] == chat["token_ids"]
    with Session.open(tiny_dir) as session:
        sizes = [len(session.encode([user])), len(session.encode([user])), len(session.encode([system, user]))]
    assert [plain["prompt_tokens"], chat["prompt_tokens"], briefed["prompt_tokens"]] == sizes
    assert sizes[2] != sizes[0]


def test_line_separators_within_a_jsonl_string(trtspec: Invoke, tiny_dir: Path, tmp_path: Path) -> None:
    """JSON allows them unescaped, and str.splitlines would cut there."""
    file = tmp_path / "prompts.jsonl"
    text = "a\u2028b\u2029c\x85d"
    file.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    result = trtspec("run", tiny_dir, "--prompt-file", file, "--max-new-tokens", 1, "--json", "--raw")
    assert_done(result)
    with Session.open(tiny_dir) as session:
        assert result.lines[0]["prompt_tokens"] == len(session.encode(text))


def test_chat_is_the_default_where_there_is_a_template(trtspec: Invoke, tiny_dir: Path) -> None:
    options = ("run", tiny_dir, "--prompt", "Hi", "--max-new-tokens", 1, "--json")
    default, chat, raw = (trtspec(*options, *extra).lines[0] for extra in ([], ["--chat"], ["--raw"]))
    assert default["prompt_tokens"] == chat["prompt_tokens"] > raw["prompt_tokens"]


@pytest.mark.parametrize("prompts", [["--prompt", COPY], ["--prompt", COPY, "--prompt", "Ünï"]])
def test_streamed_text_is_the_text(trtspec: Invoke, tiny_dir: Path, prompts: list[str]) -> None:
    options = ("run", tiny_dir, *prompts, "--max-new-tokens", 30)
    streamed, whole = trtspec(*options, "--stream"), trtspec(*options, "--no-stream")
    assert_done(streamed)
    assert_done(whole)
    assert streamed.out == whole.out
    texts = [line["text"] for line in trtspec(*options, "--json").lines]
    expected = texts[0] + "\n" if len(texts) == 1 else "".join(f"[{n}] {text}\n" for n, text in enumerate(texts))
    assert whole.out == expected
    assert trtspec(*options, "--json", "--stream").lines[0]["text"] == texts[0]


def test_methods_give_the_same_tokens(trtspec: Invoke, tiny_dir: Path) -> None:
    options = ("run", tiny_dir, "--prompt", COPY, "--max-new-tokens", 60, "--json")
    plain, ngram, default = (trtspec(*options, *m).lines[0] for m in (["--method=none"], ["--method=ngram"], []))
    assert plain["token_ids"] == ngram["token_ids"] == default["token_ids"]
    assert plain["metrics"]["drafts"] == 0
    assert ngram["metrics"]["drafts"] == default["metrics"]["drafts"] > 0


def test_ngram_options_are_used(trtspec: Invoke, tiny_dir: Path) -> None:
    options = ("run", tiny_dir, "--prompt", COPY, "--max-new-tokens", 60, "--json")
    one = trtspec(*options, "--ngram-tokens", 1).lines[0]["metrics"]
    assert one["draft_tokens"] == one["drafts"] > 0
    none = trtspec(*options, "--ngram-min", 40, "--ngram-max", 40).lines[0]["metrics"]
    assert none["drafts"] < one["drafts"]


def test_stats_go_to_stderr(trtspec: Invoke, tiny_dir: Path) -> None:
    options = ("run", tiny_dir, "--prompt", "Hi", "--prompt", COPY, "--max-new-tokens", 30, "--json")
    plain, with_stats = trtspec(*options), trtspec(*options, "--stats")
    assert plain.err == ""
    assert [line["token_ids"] for line in with_stats.lines] == [line["token_ids"] for line in plain.lines]
    table = {line.split()[0]: line.split()[1:] for line in with_stats.err.splitlines() if line}
    assert table.keys() >= COUNTS | FIGURES | {f"stage_ms.{stage}" for stage in STAGES} | {"by_source.ngram.drafts"}
    assert table["steps"] == [str(line["metrics"]["steps"]) for line in with_stats.lines]
    longest = max(len(line["metrics"]["acceptance_per_position"]) for line in with_stats.lines)
    assert f"acceptance_per_position[{longest - 1}]" in table


def test_stats_show_the_positions_of_every_prompt(trtspec: Invoke, tiny_dir: Path) -> None:
    """The first prompt is too short to be drafted for."""
    options = ("--prompt", "x", "--prompt", COPY, "--raw", "--max-new-tokens", 30)
    swapped = ("--prompt", COPY, "--prompt", "x", "--raw", "--max-new-tokens", 30)
    tables = [trtspec("run", tiny_dir, *prompts, "--stats", "--no-stream").err for prompts in (options, swapped)]
    found = [sorted(line.split()[0] for line in table.splitlines() if line) for table in tables]
    assert found[0] == found[1]


def test_stop_text(trtspec: Invoke, tiny_dir: Path) -> None:
    options = ("run", tiny_dir, "--prompt", "Hi", "--max-new-tokens", 12, "--json")
    whole = trtspec(*options).lines[0]
    words = whole["text"].split()
    assert len(words) > 4
    stopped = trtspec(*options, "--stop", "never to be seen", "--stop", words[3][:4]).lines[0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole["text"][: whole["text"].index(words[3][:4])]
    assert len(stopped["token_ids"]) < len(whole["token_ids"])
    assert whole["token_ids"][: len(stopped["token_ids"])] == stopped["token_ids"]


def test_end_of_sequence(trtspec: Invoke, tiny_dir: Path, hf_copy: Path, tmp_path: Path) -> None:
    """A build whose end-of-sequence token is the fourth one that the model gives."""
    options = ("--prompt", "Hi", "--max-new-tokens", 12, "--json")
    whole = trtspec("run", tiny_dir, *options).lines[0]
    eos = whole["token_ids"][3]
    assert eos not in whole["token_ids"][:3]
    edit_json(hf_copy / "generation_config.json", eos_token_id=[eos, 2])
    assert_done(trtspec("build", hf_copy, "--output", tmp_path / "engine"))
    ended = trtspec("run", tmp_path / "engine", *options).lines[0]
    assert (ended["finish_reason"], ended["token_ids"]) == ("stop", whole["token_ids"][:4])
    assert whole["text"].startswith(ended["text"])
    assert len(ended["text"]) < len(whole["text"])
    ignored = trtspec("run", tmp_path / "engine", *options, "--ignore-eos").lines[0]
    assert (ignored["finish_reason"], ignored["token_ids"]) == ("length", whole["token_ids"])


def test_end_of_the_context(trtspec: Invoke, tiny_dir: Path) -> None:
    text = "word " * 500
    result = trtspec("run", tiny_dir, "--prompt", text, "--raw", "--json", "--ignore-eos").lines[0]
    assert result["finish_reason"] == "context"
    assert result["prompt_tokens"] + len(result["token_ids"]) == 512


def test_missing_directory(trtspec: Invoke, tmp_path: Path) -> None:
    result = trtspec("run", tmp_path / "missing", "--prompt", "Hi")
    assert_refused(result, f"there is no engine directory {tmp_path / 'missing'}", "trtspec build")


def test_checkpoint_in_place_of_an_engine_directory(trtspec: Invoke, tiny_hf_dir: Path) -> None:
    assert_refused(trtspec("run", tiny_hf_dir, "--prompt", "Hi"), "is no engine directory", "trtspec build")


def test_tampered_manifest(trtspec: Invoke, engine_copy: Path) -> None:
    edit_json(engine_copy / "engine.json", dtype="float16")
    assert_refused(trtspec("run", engine_copy, "--prompt", "Hi"), "engine.json was changed after the build", "trtspec")


@pytest.mark.parametrize("name", ["weights/model.safetensors", "target.onnx", "tokenizer/tokenizer.json"])
def test_altered_and_missing_parts(trtspec: Invoke, engine_copy: Path, name: str) -> None:
    file = engine_copy / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert_refused(trtspec("run", engine_copy, "--prompt", "Hi"), f"{file} was changed after the build", "build it")
    os.truncate(file, len(data) // 2)
    assert_refused(trtspec("run", engine_copy, "--prompt", "Hi"), f"{file} has {len(data) // 2} bytes", "build it")
    file.unlink()
    assert_refused(trtspec("run", engine_copy, "--prompt", "Hi"), f"lacks its part {name}", "build it")


@pytest.mark.parametrize("mode", ["--raw", "--chat"])
def test_prompt_longer_than_the_context(trtspec: Invoke, tiny_dir: Path, mode: str) -> None:
    result = trtspec("run", tiny_dir, "--prompt", "word " * 600, mode)
    assert_refused(result, "holds 512 per sequence, output included; shorten it or build with a larger --max-seq-len")


def test_one_bad_prompt_of_a_batch(trtspec: Invoke, tiny_dir: Path) -> None:
    result = trtspec("run", tiny_dir, "--prompt", "fine", "--prompt", "word " * 600, "--json")
    assert_refused(result, "holds 512 per sequence")


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_blank_prompts(trtspec: Invoke, tiny_dir: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "blank.txt"
    file.write_text(text)
    for result in (
        trtspec("run", tiny_dir, "--prompt", "fine", "--prompt", text),
        trtspec("run", tiny_dir, "--prompt-file", file),
        trtspec("run", tiny_dir, stdin=text.encode()),
    ):
        assert_refused(result, "is empty; give --prompt TEXT, --prompt-file FILE, or text on stdin")


def test_prompt_file_that_cannot_be_read(trtspec: Invoke, tiny_dir: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    result = trtspec("run", tiny_dir, "--prompt-file", missing)
    assert_refused(result, f"--prompt-file {missing} cannot be read: No such file")
    assert_refused(trtspec("run", tiny_dir, "--prompt-file", tmp_path), "cannot be read: Is a directory")


@pytest.mark.parametrize("name", ["prompt.txt", "prompts.jsonl"])
def test_prompt_file_that_is_not_utf8(trtspec: Invoke, tiny_dir: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes("naïve".encode("latin-1"))
    result = trtspec("run", tiny_dir, "--prompt-file", tmp_path / name)
    assert_refused(result, f"{name} is not UTF-8 (byte 2); convert it")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "nonsense",
        "[]",
        "3",
        '"text"',
        "{}",
        '{"prompt": 3}',
        '{"prompt": null}',
        '{"messages": []}',
        '{"messages": "Hi"}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": 3}]}',
        '{"text": "Hi"}',
    ],
)
def test_bad_line_is_named(trtspec: Invoke, tiny_dir: Path, tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    assert_refused(trtspec("run", tiny_dir, "--prompt-file", file), f"--prompt-file {file} line 3")


def test_prompt_file_without_prompts(trtspec: Invoke, tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n\n")
    assert_refused(trtspec("run", tiny_dir, "--prompt-file", tmp_path / "none.jsonl"), "none.jsonl holds no prompt")


@pytest.mark.parametrize("mode", ["--raw", "--chat"])
def test_prompts_that_are_no_unicode(trtspec: Invoke, tiny_dir: Path, tmp_path: Path, mode: str) -> None:
    """Bytes that are not UTF-8 arrive as surrogates on the command line; JSON can spell them."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "half \\ud800"}')
    for options in (("--prompt", "half \udcff"), ("--prompt-file", tmp_path / "prompts.jsonl")):
        assert_refused(trtspec("run", tiny_dir, *options, mode), "no valid Unicode text (character 5); give UTF-8")


def test_messages_that_are_no_unicode(trtspec: Invoke, tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "\\udfff"}]}')
    assert_refused(trtspec("run", tiny_dir, "--prompt-file", file), "no valid Unicode text (character 0)")


def test_stdin_that_is_not_utf8(trtspec: Invoke, tiny_dir: Path) -> None:
    assert_refused(trtspec("run", tiny_dir, stdin=b"na\xefve"), "stdin is not UTF-8; convert the prompt")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-new-tokens", 0), "max_new_tokens is 0; give an integer of at least 1"),
        (("--max-new-tokens", "many"), "--max-new-tokens"),
        (("--stop", ""), "stop holds an empty string"),
        (("--method", "telepathy"), "'telepathy' is not one of 'none', 'ngram'"),
        (("--runtime", "cuda"), "'cuda' is not one of"),
        (("--ngram-min", 4, "--ngram-max", 3), "ngram_max 3 is less than ngram_min 4"),
        (("--ngram-min", 0), "ngram_min is 0; give an integer of at least 1"),
        (("--ngram-tokens", 0), "ngram_tokens is 0; give an integer of at least 1"),
        (("--ngram-occurrence", "middle"), "'middle' is not one of 'earliest', 'latest'"),
        (("--threads", 0), "--threads"),
        (("--no-such-option",), "No such option"),
        (("more",), "unexpected extra argument"),
    ],
)
def test_bad_options(trtspec: Invoke, tiny_dir: Path, options: tuple[object, ...], words: str) -> None:
    assert_refused(trtspec("run", tiny_dir, "--prompt", "Hi", *options), words)


def test_two_sources_of_prompts(trtspec: Invoke, tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Hi")
    result = trtspec("run", tiny_dir, "--prompt", "Hi", "--prompt-file", tmp_path / "p.txt")
    assert_refused(result, "give --prompt or --prompt-file, not both")


def test_runtime_that_was_not_built(trtspec: Invoke, tiny_dir: Path) -> None:
    result = trtspec("run", tiny_dir, "--prompt", "Hi", "--runtime", "tensorrt-rtx")
    assert_refused(result, "was built for onnxruntime, not for tensorrt-rtx; build it with --runtime tensorrt-rtx")


def test_chat_without_a_template(trtspec: Invoke, hf_copy: Path, tmp_path: Path) -> None:
    (hf_copy / "chat_template.jinja").unlink()
    output = tmp_path / "engine"
    assert_done(trtspec("build", hf_copy, "--output", output))
    assert_refused(trtspec("run", output, "--prompt", "Hi", "--chat"), "no chat template; give raw text (--raw)")
    raw = trtspec("run", output, "--prompt", "Hi", "--json", "--max-new-tokens", 1)
    assert_done(raw)
    assert raw.lines[0]["prompt_tokens"] == 1


def test_kv_cache_beyond_memory(trtspec: Invoke, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtspec.engine import loading

    monkeypatch.setattr(loading, "_free_bytes", lambda device: 10_000)
    result = trtspec("run", tiny_dir, "--prompt", "Hi")
    assert_refused(result, "0.0 GB are free: build with a smaller --max-batch-size or --max-seq-len")


def test_bug_has_a_traceback_and_exit_code_1(trtspec: Invoke, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(Session, "encode", fail)
    result = trtspec("run", tiny_dir, "--prompt", "Hi")
    assert result.code == 1
    assert "Traceback" in result.err
    assert result.err.endswith("error: this is a bug in trtspec: ZeroDivisionError: oops\n")


def test_engine_failure_is_exit_code_1_without_traceback(
    trtspec: Invoke, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtspec.errors import EngineError

    def fail(*args: object) -> None:
        raise EngineError("the device\nis gone")

    monkeypatch.setattr(Session, "encode", fail)
    result = trtspec("run", tiny_dir, "--prompt", "Hi")
    assert (result.code, result.err) == (1, "error: the device is gone\n")
