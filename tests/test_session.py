"""Sessions: several streams at once, closing, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

import trtspec
from trtspec.errors import PromptError, UserError

SAMPLING = trtspec.SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def session(tiny_dir: Path) -> Iterator[trtspec.Session]:
    with trtspec.Session.open(tiny_dir) as session:
        yield session


def test_interleaved_streams_each_get_their_own_tokens(session: trtspec.Session) -> None:
    prompts = ["one two three", "four five six seven"]
    expected = [completion.token_ids for completion in session.generate(prompts, SAMPLING)]
    streams = [session.stream(prompt, SAMPLING) for prompt in prompts]
    found: list[list[int]] = [[], []]
    for events in zip_longest(*streams):
        for tokens, event in zip(found, events, strict=True):
            tokens.extend(event.token_ids if event else [])
    assert found == expected


def test_generating_while_a_stream_is_open(session: trtspec.Session) -> None:
    [expected] = session.generate(["one two"], SAMPLING)
    stream = session.stream("three four", SAMPLING)
    first = next(stream)
    [between] = session.generate(["one two"], SAMPLING)
    rest = [token for event in stream for token in event.token_ids]
    assert between.token_ids == expected.token_ids
    assert first.token_ids + rest == session.generate(["three four"], SAMPLING)[0].token_ids


def test_a_closed_stream_frees_its_slot(session: trtspec.Session) -> None:
    for _ in range(session.limits.max_batch_size + 1):
        stream = session.stream("one two three", SAMPLING)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert len(session.generate(["one two three"], SAMPLING)[0].token_ids) == SAMPLING.max_new_tokens


def test_logits_stay_when_others_are_computed(session: trtspec.Session) -> None:
    first = session.next_logits([5, 6, 7])
    kept = first.clone()
    session.next_logits([8, 9])
    assert first.equal(kept)
    assert int(first.argmax()) == session.generate([[5, 6, 7]], SAMPLING)[0].token_ids[0]


def test_features_of_every_token(session: trtspec.Session) -> None:
    """In prompt chunks as at once, and none of what the next call computes."""
    tokens = [5 + n % 50 for n in range(session.limits.prefill_chunk + 7)]
    whole = session.features(tokens)
    assert whole.shape == (len(tokens), 64)
    kept = whole.clone()
    assert session.features(tokens[:9]).allclose(whole[:9], atol=1e-5)
    assert whole.equal(kept)
    with pytest.raises(PromptError, match="empty"):
        session.features([])


def test_a_closed_session_says_so(tiny_dir: Path) -> None:
    session = trtspec.Session.open(tiny_dir)
    session.close()
    session.close()
    with pytest.raises(UserError, match="closed"):
        session.generate(["one"])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ([-1], "token ids must lie in"),
        ([49152], "token ids must lie in"),
        ([1.5], "no token id"),
        (["a"], "no token id"),
        ([True], "no token id"),
        (b"hi", "a prompt is a bytes"),
        (None, "a prompt is a NoneType"),
        (5, "a prompt is a int"),
        ([{"role": "user"}], "message 0 has no text as its content"),
        ([{"role": "user", "content": ["parts"]}], "only text is supported"),
        ([{"role": "user", "content": "hi"}, 5], "message 1 is a int"),
        ("bad \ud800 text", "no valid Unicode"),
        ([5] * 512, "holds 512 per sequence"),
    ],
)
def test_prompts_refused(session: trtspec.Session, prompt: object, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        session.generate([prompt], SAMPLING)  # type: ignore[list-item]


@pytest.mark.parametrize("prompts", ["text", b"bytes", None, 5, {"role": "user", "content": "hi"}, iter(["a"])])
def test_prompts_must_be_a_list(session: trtspec.Session, prompts: object) -> None:
    with pytest.raises(PromptError, match="give a list of prompts"):
        session.generate(prompts, SAMPLING)  # type: ignore[arg-type]


def test_messages_without_their_own_list(session: trtspec.Session) -> None:
    with pytest.raises(PromptError, match="a list of their own"):
        session.generate([{"role": "user", "content": "hi"}], SAMPLING)  # type: ignore[list-item]


def test_configurations_of_the_wrong_class(session: trtspec.Session) -> None:
    with pytest.raises(UserError, match="SamplingParams"):
        session.generate(["a"], {"max_new_tokens": 3})  # type: ignore[arg-type]
    for wrong in ({"stop": None}, {"stop": 3}, {"stop": "text"}, {"ignore_eos": "no"}, {"max_new_tokens": 1.5}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            trtspec.SamplingParams(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [0, -1, "2", 997])
def test_threads_refused(tiny_dir: Path, session: trtspec.Session, threads: object) -> None:
    with pytest.raises(UserError, match="threads"):
        trtspec.Session.open(tiny_dir, threads=threads)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, "", 3])
def test_paths_refused(path: object) -> None:
    with pytest.raises(UserError, match="give an engine directory"):
        trtspec.Session.open(path)  # type: ignore[arg-type]


def test_build_refuses_what_it_does_not_do(tmp_path: Path, tiny_hf_dir: Path) -> None:
    with pytest.raises(UserError, match="draft head some-head: some-head does not exist"):
        trtspec.build(tiny_hf_dir, tmp_path / "out", "some-head")
    with pytest.raises(UserError, match="give a tuple"):
        trtspec.build(tiny_hf_dir, tmp_path / "out", runtimes="onnxruntime")  # type: ignore[arg-type]


def test_no_prompts_no_completions(session: trtspec.Session) -> None:
    assert session.generate([], SAMPLING) == []
