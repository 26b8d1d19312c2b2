"""Built-in prompt sets and the reading of JSONL files."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from trtspec.bench.datasets import BUILT_IN, BenchPrompt, load_dataset
from trtspec.errors import PromptError


def write(tmp_path: Path, *records: Any) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def only_user_text(prompt: BenchPrompt) -> str:
    assert prompt.text is None
    assert prompt.messages is not None
    (message,) = prompt.messages
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_set_has_forty_distinct_prompts(name: str) -> None:
    prompts = load_dataset(name)
    assert [prompt.id for prompt in prompts] == [f"{name}-{number:02d}" for number in range(1, 41)]
    assert len({only_user_text(prompt) for prompt in prompts}) == 40


def test_built_in_sets_share_no_prompt() -> None:
    texts = [only_user_text(prompt) for name in BUILT_IN for prompt in load_dataset(name)]
    assert len(set(texts)) == len(texts) == 40 * len(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_prompts_leave_room_in_2048_tokens(name: str) -> None:
    for prompt in load_dataset(name):
        text = only_user_text(prompt)
        assert len(text.encode()) < 1800, "a token takes a byte at least"
        assert text.count("```") % 2 == 0, f"{prompt.id} leaves a block of code open"


def test_code_set_is_of_varied_kinds() -> None:
    lines = (resources.files("trtspec.bench") / "data" / "code.jsonl").read_text(encoding="utf-8").splitlines()
    kinds = Counter(json.loads(line)["category"] for line in lines)
    assert set(kinds) == {
        *("write", "complete", "fix", "types", "docstring", "refactor", "explain", "translate", "test", "review")
    }
    assert max(kinds.values()) <= 10


def test_built_in_name_wins_over_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("edit").write_text('{"prompt": "mine"}\n', encoding="utf-8")
    assert len(load_dataset("edit")) == 40
    assert load_dataset("./edit") == [BenchPrompt("1", None, "mine")]


def test_turns_as_in_public_benchmarks(tmp_path: Path) -> None:
    record = {"question_id": 241, "category": "math", "turns": ["What is 2 + 3?", "And doubled?"], "reference": ["5"]}
    assert load_dataset(write(tmp_path, record)) == [BenchPrompt("241", (user("What is 2 + 3?"),), None)]


def test_messages_are_cut_after_the_first_user_turn(tmp_path: Path) -> None:
    system, reply = {"role": "system", "content": ""}, {"role": "assistant", "content": "Hello."}
    path = write(tmp_path, {"id": "a", "messages": [system, user("Hi"), reply, user("Bye")]})
    assert load_dataset(path) == [BenchPrompt("a", (system, user("Hi")), None)]


def test_keys_of_a_message_other_than_role_and_content_are_dropped(tmp_path: Path) -> None:
    (prompt,) = load_dataset(write(tmp_path, {"messages": [{**user("Hi"), "weight": 1}]}))
    assert prompt.messages == (user("Hi"),)


def test_raw_prompt_keeps_its_whitespace(tmp_path: Path) -> None:
    assert load_dataset(write(tmp_path, {"id": 7, "prompt": " Once\n"})) == [BenchPrompt("7", None, " Once\n")]


def test_line_number_stands_in_for_a_missing_id(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n', encoding="utf-8")
    assert [prompt.id for prompt in load_dataset(str(path))] == ["1", "3"]


@pytest.mark.parametrize("raw", [b'\xef\xbb\xbf{"prompt": "a"}', b'{"prompt": "a"}\r\n', b'\n {"prompt": "a"} \n\n'])
def test_byte_order_mark_line_ends_and_blank_lines_are_accepted(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(raw)
    assert [prompt.text for prompt in load_dataset(str(path))] == ["a"]


def test_unicode_line_separator_does_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert [prompt.text for prompt in load_dataset(str(path))] == ["a\u2028b"]


def test_limit_takes_the_first_prompts(tmp_path: Path) -> None:
    assert [prompt.id for prompt in load_dataset("chat", limit=3)] == ["chat-01", "chat-02", "chat-03"]
    assert len(load_dataset("chat", limit=500)) == 40
    assert len(load_dataset(write(tmp_path, {"prompt": "a"}, "not read"), limit=1)) == 1


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(PromptError, match=f"limit of {limit} "):
        load_dataset("edit", limit=limit)


def test_missing_file_names_the_built_in_sets(tmp_path: Path) -> None:
    path = str(tmp_path / "edits")
    with pytest.raises(PromptError, match=r"edits: no such file.*edit, chat, mixed") as caught:
        load_dataset(path)
    assert str(caught.value).startswith(path)


def test_directory_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"cannot be read: .*directory"):
        load_dataset(str(tmp_path))


@pytest.mark.parametrize("content", ["", "\n", " \n\t\n"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(PromptError, match=r"prompts\.jsonl:1: .*empty"):
        load_dataset(str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "caf\xe9"}', "byte 16 of the line is not UTF-8"),
        (b'{"prompt": "a"', "not JSON"),
        (b"plain text", "not JSON"),
        (b'["a"]', "found a JSON list; expected an object"),
        (b"{}", r"found the keys \(none\); expected exactly one of `turns`, `messages`, `prompt`"),
        (b'{"text": "a", "label": 1}', "found the keys text, label; expected exactly one"),
        (b'{"prompt": "a", "turns": ["a"]}', "found the keys prompt, turns; expected exactly one"),
        (b'{"turns": []}', "`turns` must be a list of at least one string"),
        (b'{"turns": "a"}', "`turns` must be a list of at least one string"),
        (b'{"turns": ["a", 2]}', "`turns` must be a list of at least one string"),
        (b'{"messages": {"role": "user", "content": "a"}}', "`messages` must be a list of objects"),
        (b'{"messages": []}', "no message with the role user"),
        (b'{"messages": [{"role": "system", "content": "a"}]}', "no message with the role user"),
        (b'{"messages": ["a"]}', "each of `messages` must be an object"),
        (b'{"messages": [{"role": "user"}]}', "each of `messages` must be an object"),
        (b'{"messages": [{"role": "user", "content": ["a"]}]}', "each of `messages` must be an object"),
        (b'{"prompt": null}', "`prompt` is a NoneType; expected a string"),
        (b'{"prompt": ""}', "`prompt` is blank"),
        (b'{"turns": [" \\n"]}', r"`turns\[0\]` is blank"),
        (b'{"messages": [{"role": "user", "content": " "}]}', "the first user message is blank"),
        (b'{"id": null, "prompt": "a"}', "the id is a NoneType; expected a string or an integer"),
        (b'{"id": true, "prompt": "a"}', "the id is a bool"),
    ],
)
def test_unusable_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    with pytest.raises(PromptError, match=rf"prompts\.jsonl:2: .*{message}"):
        load_dataset(str(path))
