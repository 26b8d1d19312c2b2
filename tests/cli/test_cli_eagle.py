"""EAGLE on the command line: its options reach the drafter, and what can't be done is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint.heads import make_e1
from head_targets import save_head_target
from invocation import Invoke, assert_done, assert_refused

import trtspec as package

PROMPT = ("--prompt", "w5 w6 w7 w8 w9", "--max-new-tokens", 30, "--ignore-eos")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory with a draft head."""
    folder = tmp_path_factory.mktemp("cli-eagle")
    save_head_target(folder / "target")
    make_e1(folder / "head")
    package.build(folder / "target", folder / "engine", folder / "head", max_seq_len=64, max_batch_size=2)
    return folder / "engine"


def run(trtspec: Invoke, directory: Path, *options: object) -> dict[str, Any]:
    result = trtspec("run", directory, "--json", *PROMPT, *options)
    assert_done(result)
    [found] = result.lines
    return dict(found)


def test_eagle_gives_the_tokens_of_none(trtspec: Invoke, directory: Path) -> None:
    plain, drafted = run(trtspec, directory, "--method", "none"), run(trtspec, directory, "--method", "eagle")
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["metrics"]["by_source"]["eagle"]["drafts"] > 0
    assert plain["metrics"]["draft_tokens"] == 0


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ((), 3),
        (("--eagle-tokens", 5), 5),
        (("--eagle-tokens", 1), 1),
        (("--eagle-topk", 3), 15),
        (("--eagle-topk", 3, "--eagle-depth", 1, "--tree-nodes", 12), 12),
        (("--eagle-topk", 3, "--eagle-depth", 0, "--tree-nodes", 12), 3),
        (("--eagle-topk", 2, "--tree-nodes", 4), 4),
    ],
)
def test_options_reach_the_drafter(trtspec: Invoke, directory: Path, options: tuple[object, ...], most: int) -> None:
    # With 16 of 30 tokens to come nothing is cut off yet.
    metrics = run(trtspec, directory, "--method", "eagle", *options)["metrics"]
    assert metrics["draft_tokens"] <= most * metrics["drafts"]
    assert metrics["draft_tokens"] > most * (metrics["drafts"] - most - 1)


def test_bench_takes_all_methods_of_the_directory(trtspec: Invoke, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text('{"prompt": "w5 w6 w7 w5 w6"}\n{"prompt": "w9 w9"}\n', encoding="utf-8")
    report = tmp_path / "report.json"
    options = ("--dataset", tmp_path / "set.jsonl", "--max-new-tokens", 12, "--json", report)
    result = trtspec("bench", directory, *options, "--eagle-topk", 3, "--tree-nodes", 6)
    assert_done(result)
    data = json.loads(report.read_text(encoding="utf-8"))
    assert [row["method"] for row in data["methods"]] == ["none", "ngram", "eagle", "ngram-eagle"]
    assert data["lossless"], data["differences"]
    eagle = data["methods"][2]
    assert eagle["metrics"]["by_source"]["eagle"]["drafts"] == eagle["metrics"]["drafts"] > 0
    assert 0 < eagle["outside_engines_ms_per_step"] < eagle["step_ms"]
    expected = {"eagle_tokens": 3, "eagle_topk": 3, "eagle_depth": 3, "tree_nodes": 6, "ngram_tokens": 10}
    assert data["settings"].items() >= expected.items()


def test_bench_of_one_method(trtspec: Invoke, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text('{"prompt": "w5 w6 w7 w5 w6"}\n', encoding="utf-8")
    result = trtspec(
        "bench", directory, "--dataset", tmp_path / "set.jsonl", "--max-new-tokens", 12, "--methods", "eagle"
    )
    assert_done(result)
    assert [line.split()[0] for line in result.out.splitlines()[:2]] == ["method", "eagle"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--eagle-tokens", 0), "eagle_tokens is 0; give an integer of at least 1"),
        (("--eagle-tokens", 129), "eagle_tokens is 129; give at most 128"),
        (("--eagle-topk", 0), "eagle_topk is 0; give an integer of at least 1"),
        (("--eagle-topk", 33), "eagle_topk is 33; give at most 32"),
        (("--eagle-depth", -1), "eagle_depth is -1; give an integer of at least 0"),
        (("--eagle-topk", 16, "--eagle-depth", 9), "eagle_topk 16 times eagle_depth 9 is more than 128; lower one"),
        (("--tree-nodes", 0), "tree_nodes is 0; give an integer of at least 1"),
    ],
)
@pytest.mark.parametrize("command", ["run", "bench"])
def test_bad_options(trtspec: Invoke, tmp_path: Path, command: str, options: tuple[object, ...], words: str) -> None:
    needed = ("--prompt", "x") if command == "run" else ("--dataset", "chat")
    assert_refused(trtspec(command, tmp_path, *needed, *options), words)


def test_a_directory_without_a_head(trtspec: Invoke, tiny_dir: Path) -> None:
    words = f"method eagle needs a draft head, which {tiny_dir} has not: build it with --eagle HEAD, or choose one of: "
    assert_refused(trtspec("run", tiny_dir, "--prompt", "x", "--method", "eagle", "--no-stream"), words + "none, ngram")
    assert_refused(trtspec("run", tiny_dir, "--prompt", "x", "--method", "eagle"), words)
    assert_refused(trtspec("bench", tiny_dir, "--dataset", "chat", "--limit", 1, "--methods", "none,eagle"), words)


MERGES = [("--method", "ngram-eagle", "--merge", merge) for merge in ("auto", "exclusive", "union")]
REPEATING = ("--prompt", "w5 w6 w7 w5 w6 w7 w5 w6", "--max-new-tokens", 24, "--ignore-eos")


@pytest.mark.parametrize(
    "options", [(), ("--temperature", 0.9, "--seed", 5, "--top-p", 0.9, "--frequency-penalty", 0.5)]
)
def test_merges_give_the_tokens_of_none(trtspec: Invoke, directory: Path, options: tuple[object, ...]) -> None:
    def tokens(*method: object) -> list[int]:
        result = trtspec("run", directory, "--json", *REPEATING, *method, *options)
        assert_done(result)
        return list(result.lines[0]["token_ids"])

    plain = tokens("--method", "none")
    assert len(plain) == 24
    assert [tokens(*merge) for merge in MERGES] == [plain] * 3


def test_seed_is_drawn_and_told(trtspec: Invoke, directory: Path) -> None:
    hot = ("--temperature", 1.5)
    drawn = [run(trtspec, directory, *hot) for _ in range(2)]
    assert drawn[0]["seed"] != drawn[1]["seed"]
    assert drawn[0]["token_ids"] != drawn[1]["token_ids"]
    again = run(trtspec, directory, *hot, "--seed", drawn[0]["seed"], "--method", "none")
    assert again["token_ids"] == drawn[0]["token_ids"]
    assert run(trtspec, directory)["seed"] is None


def test_logprobs(trtspec: Invoke, directory: Path) -> None:
    plain, drafted = (run(trtspec, directory, "--logprobs", 2, "--method", m) for m in ("none", "ngram-eagle"))
    assert [each["id"] for each in drafted["logprobs"]] == drafted["token_ids"]
    for each, right in zip(drafted["logprobs"], plain["logprobs"], strict=True):
        assert each["logprob"] == pytest.approx(right["logprob"], abs=1e-4)
        # Greedy: the chosen token is the likeliest.
        assert each["top"][0] == [each["id"], each["logprob"]]
        assert len(each["top"]) == 2


def test_policy_is_shown(trtspec: Invoke, directory: Path) -> None:
    result = trtspec("run", directory, *PROMPT, "--stats")
    assert result.code == 0
    assert "policy.plain_steps" in result.err
    assert "policy.eagle_expected[0]" in result.err


def test_bench_of_merges(trtspec: Invoke, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text('{"prompt": "w5 w6 w7 w5 w6 w7"}\n', encoding="utf-8")
    methods = "none,ngram-eagle,ngram-eagle:union,ngram-eagle:exclusive"
    report = tmp_path / "report.json"
    options = ("--dataset", tmp_path / "set.jsonl", "--max-new-tokens", 12, "--temperature", 1.2, "--json", report)
    result = trtspec("bench", directory, *options, "--methods", methods)
    assert_done(result)
    data = json.loads(report.read_text(encoding="utf-8"))
    assert ",".join(row["method"] for row in data["methods"]) == methods
    assert data["lossless"], data["differences"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--temperature", -1), "temperature is -1.0; give a number from 0"),
        (("--temperature", "nan"), "temperature is nan"),
        (("--top-p", 0), "top_p is 0"),
        (("--min-p", 1.5), "min_p is 1.5"),
        (("--repetition-penalty", 0), "repetition_penalty is 0"),
        (("--seed", -1), "--seed"),
        (("--logprobs", 21), "--logprobs"),
        (("--merge", "both"), "--merge"),
        (("--ngram-branches", 0), "ngram_branches is 0"),
        (("--hybrid-ngram-min", 0), "hybrid_ngram_min is 0"),
    ],
)
def test_wrong_sampling_and_merging_options(
    trtspec: Invoke, directory: Path, options: tuple[object, ...], words: str
) -> None:
    assert_refused(trtspec("run", directory, *PROMPT, *options), words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--methods", "ngram:union"), "--methods ngram:union: only ngram-eagle has merges"),
        (("--methods", "ngram-eagle:both"), "merge 'both' is unknown"),
        (("--methods", "none", "--compare", "hf", "--temperature", 1), "--compare hf decodes greedily"),
    ],
)
def test_wrong_bench_options(trtspec: Invoke, directory: Path, options: tuple[object, ...], words: str) -> None:
    assert_refused(trtspec("bench", directory, "--dataset", "chat", *options), words)
