"""The demo target end to end: the same tokens as Hugging Face generate, with every drafting method and batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_prompts import PROMPTS, DemoPrompt

import trtspec
from trtspec.bench.huggingface import HuggingFaceMethod, load_huggingface
from trtspec.config import OCCURRENCES

pytestmark = pytest.mark.slow
NEW_TOKENS = 40
SAMPLING = trtspec.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
PLAIN = trtspec.SpeculationConfig(method="none")
NGRAM = trtspec.SpeculationConfig(method="ngram")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

every_prompt = pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.name)


@pytest.fixture(scope="module")
def session(demo_dir: Path) -> Iterator[trtspec.Session]:
    with trtspec.Session.open(demo_dir) as session:
        yield session


@pytest.fixture(scope="module")
def huggingface(demo_dir: Path) -> Any:
    return load_huggingface(trtspec.EngineDir.load(demo_dir))


@pytest.fixture(scope="module")
def generated(session: trtspec.Session, huggingface: Any) -> dict[str, list[int]]:
    """What Hugging Face generate makes of each prompt; eight prompts of similar length at a time to save minutes."""
    ids = {prompt.name: session.encode(prompt.prompt) for prompt in PROMPTS}
    names = sorted(ids, key=lambda name: len(ids[name]))
    tokens: dict[str, list[int]] = {}
    for at in range(0, len(names), 8):
        group = names[at : at + 8]
        width = len(ids[group[-1]])
        padded = torch.tensor([[0] * (width - len(ids[name])) + ids[name] for name in group])
        mask = torch.tensor([[0] * (width - len(ids[name])) + [1] * len(ids[name]) for name in group])
        output = huggingface.generate(padded, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        tokens.update(zip(group, output[:, width:].tolist(), strict=True))
    return tokens


@pytest.fixture(scope="module")
def plain(session: trtspec.Session) -> dict[str, list[trtspec.StreamEvent]]:
    """Each prompt's events without drafting, one prompt at a time."""
    return {prompt.name: list(session.stream(prompt.prompt, SAMPLING, PLAIN)) for prompt in PROMPTS}


def completion_of(events: Sequence[trtspec.StreamEvent]) -> trtspec.Completion:
    completion = events[-1].completion
    assert completion is not None
    return completion


def assert_same(session: trtspec.Session, prompt: DemoPrompt, expected: list[int], found: list[int]) -> None:
    """Fail with the place of the first difference and how close the two tokens' logits are there."""
    if found == expected:
        return
    pairs = zip(expected, found, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    gap = None
    if at < min(len(expected), len(found)):
        logits = session.next_logits(session.encode(prompt.prompt) + expected[:at])
        gap = float(logits[expected[at]] - logits[found[at]])
    pytest.fail(f"{prompt.name}: token {at} differs: {expected[at:][:3]} and {found[at:][:3]}, logit gap {gap}")


def check_text(session: trtspec.Session, events: Sequence[trtspec.StreamEvent]) -> None:
    """The pieces make up the text, and the text is what all ids decode to at once."""
    completion = completion_of(events)
    assert [token for event in events for token in event.token_ids] == completion.token_ids
    assert "".join(event.text for event in events) == completion.text
    whole = session.tokenizer.decode(completion.token_ids)
    assert completion.text == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in event.text for event in events)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [completion.finish_reason]


@every_prompt
def test_plain_decoding_gives_hugging_faces_tokens(
    session: trtspec.Session,
    generated: dict[str, list[int]],
    plain: dict[str, list[trtspec.StreamEvent]],
    prompt: DemoPrompt,
) -> None:
    completion, expected = completion_of(plain[prompt.name]), generated[prompt.name]
    assert len(expected) == NEW_TOKENS
    assert completion.prompt_tokens == len(session.encode(prompt.prompt))
    assert completion.finish_reason == "length"
    assert_same(session, prompt, expected, completion.token_ids)


@pytest.mark.parametrize("name", ["raw_chinese", "edit_rename", "chat_long"])
def test_benchmarks_hugging_face_method_gives_the_same_tokens(
    session: trtspec.Session, huggingface: Any, plain: dict[str, list[trtspec.StreamEvent]], name: str
) -> None:
    prompt = next(prompt for prompt in PROMPTS if prompt.name == name)
    ids = session.encode(prompt.prompt)
    (expected,) = HuggingFaceMethod(huggingface, (), None).complete([ids], SAMPLING).token_ids
    assert_same(session, prompt, expected, completion_of(plain[name]).token_ids)


@every_prompt
def test_ngram_gives_the_tokens_of_plain_decoding(
    session: trtspec.Session, plain: dict[str, list[trtspec.StreamEvent]], prompt: DemoPrompt
) -> None:
    events = list(session.stream(prompt.prompt, SAMPLING, NGRAM))
    assert_same(session, prompt, completion_of(plain[prompt.name]).token_ids, completion_of(events).token_ids)
    check_text(session, plain[prompt.name])
    check_text(session, events)
    assert completion_of(events).stats.emitted_tokens == NEW_TOKENS - 1
    assert completion_of(plain[prompt.name]).stats.steps == NEW_TOKENS - 1


@pytest.mark.parametrize("occurrence", OCCURRENCES)
@pytest.mark.parametrize("ngram_tokens", [1, 5, 10])
def test_ngram_in_batches_of_four_gives_the_tokens_of_plain_decoding(
    session: trtspec.Session, plain: dict[str, list[trtspec.StreamEvent]], ngram_tokens: int, occurrence: str
) -> None:
    """Half of the prompts for one occurrence rule and half for the other, to save time."""
    speculation = trtspec.SpeculationConfig("ngram", ngram_tokens=ngram_tokens, ngram_occurrence=occurrence)
    accepted = 0
    for at in range(4 * OCCURRENCES.index(occurrence), len(PROMPTS), 8):
        batch = PROMPTS[at : at + 4]
        completions = session.generate([prompt.prompt for prompt in batch], SAMPLING, speculation)
        for prompt, completion in zip(batch, completions, strict=True):
            assert_same(session, prompt, completion_of(plain[prompt.name]).token_ids, completion.token_ids)
            assert completion.text == completion_of(plain[prompt.name]).text
            accepted += completion.stats.accepted_tokens
            assert len(completion.stats.accepted_at) <= ngram_tokens
    # Losslessness would be cheap if nothing were drafted, or nothing accepted.
    assert accepted > NEW_TOKENS // 2


def test_all_prompts_at_once_without_drafting(
    session: trtspec.Session, plain: dict[str, list[trtspec.StreamEvent]]
) -> None:
    """More prompts than slots: sequences wait, join and leave."""
    assert len(PROMPTS) > session.limits.max_batch_size
    completions = session.generate([prompt.prompt for prompt in PROMPTS], SAMPLING, PLAIN)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert_same(session, prompt, completion_of(plain[prompt.name]).token_ids, completion.token_ids)


@pytest.mark.parametrize("question", ["Say hello.", "What is 2 + 2?", "Name one colour."])
def test_end_of_sequence_is_hugging_faces(session: trtspec.Session, huggingface: Any, question: str) -> None:
    prompt = DemoPrompt(question, [{"role": "user", "content": question}])
    sampling = trtspec.SamplingParams(max_new_tokens=120)
    eos = session.engine_dir.target.config["eos_token_ids"]
    hf = HuggingFaceMethod(huggingface, eos, None)
    (expected,) = hf.complete([session.encode(prompt.prompt)], sampling).token_ids
    for speculation in (PLAIN, NGRAM):
        events = list(session.stream(prompt.prompt, sampling, speculation))
        completion = completion_of(events)
        assert_same(session, prompt, expected, completion.token_ids)
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] in eos
        check_text(session, events)


def test_prompts_are_as_they_should_be(session: trtspec.Session) -> None:
    lengths = [len(session.encode(prompt.prompt)) for prompt in PROMPTS]
    assert len(PROMPTS) == len({prompt.name for prompt in PROMPTS}) == 24
    assert min(lengths) == 1
    assert max(lengths) > session.limits.prefill_chunk
