"""Prompts whose answers by the target train a draft head.

All of them are made from this package's own templates and word lists, in a fixed mix of categories, and the same seed
gives the same prompts; the first n of a longer list are the list of length n.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from trtspec.errors import ConfigError
from trtspec.train.functions import FunctionTasks
from trtspec.train.grammar import Writer, load_sections

SHARES = {
    "general": 20,
    "explain": 12,
    "instruct": 18,
    "code": 18,
    "maths": 14,
    "summarize": 10,
    "edit": 5,
    "creative": 3,
}
"""The categories and their shares, in percent; a category's name is its section in the data files."""

MIXES: dict[str, dict[str, int]] = {"short": SHARES, "report": {"report": 100}, "long": {"long": 100}}
"""Mixes by name: the above; requests to write long articles; and requests to read some, of 300 to 1,000 tokens."""

MAX_PROMPTS = 50_000
"""The longest list; past it, a small category would repeat itself with other openings only."""

_PROSE = {"general", "explain", "instruct", "maths", "summarize", "creative", "report", "long"}
_TRIES = 200


@dataclass(frozen=True)
class TrainingPrompt:
    """One user message and the category that it was made for."""

    category: str
    text: str


def generate_prompts(count: int, seed: int = 0, shares: Mapping[str, int] = SHARES) -> list[TrainingPrompt]:
    """`count` distinct prompts, the same ones each time for a seed and shares."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_PROMPTS:
        raise ConfigError(f"the number of prompts is {count!r}; give an integer from 0 to {MAX_PROMPTS}")
    rng = random.Random(seed)
    writer = Writer(load_sections(), rng)
    writer.hooks["function"] = FunctionTasks(rng).write
    seen: set[str] = set()
    prompts: list[TrainingPrompt] = []
    pack: list[str] = []
    while len(prompts) < count:
        if not pack:
            pack = [name for name, share in shares.items() for _ in range(share)]
            rng.shuffle(pack)
        category = pack.pop()
        prompts.append(TrainingPrompt(category, _unseen(writer, category, seen)))
    return prompts


def reading_prompts(texts: Seq[str], seed: int = 0) -> list[TrainingPrompt]:
    """A request to summarise, or to say what stands in it, for each of some given texts."""
    writer = Writer(load_sections(), random.Random(seed))
    forms = ["{lg.ask}\n\n@text", "{lg.ask} @text", "@text\n\n{sum.after}"]
    return [
        TrainingPrompt("reading", writer.fill(forms[number % len(forms)]).replace("@text", text.strip()))
        for number, text in enumerate(texts)
    ]


def _unseen(writer: Writer, category: str, seen: set[str]) -> str:
    """A text of the category that is not among those seen, which it joins."""
    for _ in range(_TRIES):
        text = writer.write(category).strip()
        if category in _PROSE:
            text = re.sub(" +", " ", text)
        if text not in seen:
            seen.add(text)
            return text
    raise ConfigError(f"no more distinct prompts of the category {category!r} after {len(seen)}; ask for fewer")
