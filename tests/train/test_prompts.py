"""The training prompts: distinct, reproducible, in the promised mix, and filled in completely."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter

import pytest

from trtspec.errors import ConfigError
from trtspec.train.functions import load_ideas, third_person
from trtspec.train.grammar import DATA, SLOT, Writer, load_sections
from trtspec.train.prompts import MAX_PROMPTS, MIXES, SHARES, TrainingPrompt, generate_prompts, reading_prompts

COUNT = 20_000


@pytest.fixture(scope="module")
def prompts() -> list[TrainingPrompt]:
    return generate_prompts(COUNT)


def test_all_distinct(prompts: list[TrainingPrompt]) -> None:
    assert len(prompts) == COUNT
    assert len({prompt.text for prompt in prompts}) == COUNT


def test_few_near_repeats(prompts: list[TrainingPrompt]) -> None:
    """Prompts stay apart when case, digits and punctuation are ignored."""
    bare = {re.sub(r"[^a-z]+", " ", prompt.text.lower()).strip() for prompt in prompts}
    assert len(bare) > 0.9 * COUNT


def test_same_seed_same_prompts(prompts: list[TrainingPrompt]) -> None:
    assert generate_prompts(500) == prompts[:500]
    assert generate_prompts(500, seed=1) != prompts[:500]


def test_category_mix(prompts: list[TrainingPrompt]) -> None:
    counts = Counter(prompt.category for prompt in prompts)
    assert sum(SHARES.values()) == 100
    assert counts == {name: COUNT * share // 100 for name, share in SHARES.items()}


def test_nothing_left_to_fill_in(prompts: list[TrainingPrompt]) -> None:
    prompts = [*prompts, *generate_prompts(500, 1, MIXES["report"]), *generate_prompts(500, 1, MIXES["long"])]
    marks = re.compile(r"@@|\^(?:a|cap|ing|money)\b|\((?:[a-z ]*\|)+[a-z ]*\)|\\[nse]\b|@(?:call|does|in|out)\b")
    for prompt in prompts:
        assert not SLOT.search(prompt.text), prompt.text
        assert not marks.search(prompt.text), prompt.text
        if prompt.category not in ("code", "edit"):
            assert "{" not in prompt.text, prompt.text
            assert "  " not in prompt.text, prompt.text


def test_lengths(prompts: list[TrainingPrompt]) -> None:
    for prompt in prompts:
        assert 8 <= len(prompt.text) <= 2500, prompt.text
        assert prompt.text == prompt.text.strip()
    articles = [len(prompt.text.split()) for prompt in prompts if prompt.category == "summarize"]
    assert min(articles) >= 120
    assert max(articles) <= 370


def test_long_articles() -> None:
    prompts = generate_prompts(600, 3, MIXES["long"])
    lengths = [len(prompt.text.split()) for prompt in prompts]
    assert min(lengths) >= 150
    assert max(lengths) <= 850
    assert sum(length >= 300 for length in lengths) > 300
    names = {name for prompt in prompts for name in re.findall(r"\b[A-Z][a-z]{3,}\b", prompt.text)}
    assert len(names) > 2000
    assert len({prompt.text for prompt in [*prompts, *generate_prompts(600, 3, MIXES["report"])]}) == 1200


def test_reading_prompts_hold_their_texts() -> None:
    texts = [f"A text about {number} (things|people) and {{braces}}." for number in range(40)]
    prompts = reading_prompts(texts, 5)
    assert prompts == reading_prompts(texts, 5)
    assert all(
        text in prompt.text and len(prompt.text) > len(text) for text, prompt in zip(texts, prompts, strict=True)
    )


@pytest.mark.parametrize("count", [-1, MAX_PROMPTS + 1, 2.5, True])
def test_impossible_counts(count: int) -> None:
    with pytest.raises(ConfigError, match="number of prompts"):
        generate_prompts(count)


def test_zero_prompts() -> None:
    assert generate_prompts(0) == []


def test_every_section_is_reachable() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*DATA.glob("*.txt"), *DATA.parent.glob("*.py")])
    for name in load_sections():
        uses = re.findall(rf"[{{:@\"]{re.escape(name)}(?=[}}^\n\"])", text)
        assert uses, name


def test_every_template_is_reached(prompts: list[TrainingPrompt], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand prompts use every item of every section that they reach; the long mixes work on their own."""
    drawn: set[tuple[str, str]] = set()
    draw = Writer.draw

    def recording(self: Writer, section: str) -> str:
        item = draw(self, section)
        drawn.add((section, item))
        return item

    monkeypatch.setattr(Writer, "draw", recording)
    assert generate_prompts(COUNT) == prompts
    reachable = {section for section, _ in drawn}
    sections = load_sections()
    missed = [(name, item) for name in reachable for item in sections[name] if (name, item) not in drawn]
    assert not missed
    for mix in ("report", "long"):
        assert len(generate_prompts(150, 0, MIXES[mix])) == 150
        assert mix in {section for section, _ in drawn}


def test_function_ideas() -> None:
    ideas = load_ideas()
    assert len({idea.name for idea in ideas}) == len(ideas) >= 60
    for idea in ideas:
        tree = ast.parse(f"def {idea.name}({idea.params}) -> {idea.returns}: ...")
        assert isinstance(tree.body[0], ast.FunctionDef)
        for args, result in idea.examples:
            ast.parse(f"{idea.name}({args}) == {result}")
            ast.literal_eval(result)
        assert third_person(idea.doc).split()[0].endswith("s")


def test_grammar_forms() -> None:
    sections = {
        "who": ["Ana@@she"],
        "do": ["make tea", "run home"],
        "n": ["{a:4-4}{b=a*(3+2)//4} {_k:7-7}{in}"],
        "in": ["{_k}"],
    }
    writer = Writer(sections, random.Random(3))
    assert writer.fill("{p:who} {p.1^cap} (x|x) {_q:who}{_q}") == "Ana She x Ana"
    assert {writer.fill("{do^ing^cap}") for _ in range(4)} == {"Making tea", "Running home"}
    assert writer.write("n") == "45 7"
    with pytest.raises(ConfigError, match="no section"):
        writer.fill("{nowhere}")
    with pytest.raises(ConfigError, match="computes"):
        writer.fill("{a:1-2}{b=a**2.5}")
