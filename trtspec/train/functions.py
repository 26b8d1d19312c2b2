"""Requests to write or complete a Python function, from the ideas in data/functions.json and in many styles."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from trtspec.train.grammar import DATA, Writer


@dataclass(frozen=True)
class Idea:
    """A function to be written: its signature, what it does, and calls (arguments, result) that show it."""

    name: str
    params: str
    returns: str
    doc: str
    note: str
    examples: list[tuple[str, str]]


def load_ideas() -> list[Idea]:
    """The function ideas of the package."""
    raw = json.loads((DATA / "functions.json").read_text(encoding="utf-8"))
    return [Idea(**{**entry, "examples": [tuple(pair) for pair in entry["examples"]]}) for entry in raw]


def third_person(doc: str) -> str:
    """An imperative sentence as what the function does: "Return the sum." becomes "returns the sum"."""
    verb, rest = doc.rstrip(".").split(" ", 1)
    ending = "es" if verb.endswith(("s", "sh", "ch", "x")) else "s"
    return f"{verb.lower()}{ending} {rest}"


class FunctionTasks:
    """Writes requests for functions, going through all the ideas before one comes up again."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ideas = load_ideas()
        self._pack: list[Idea] = []
        self._styles: list[Callable[[Idea, Writer], str]] = [
            self._completion,
            self._completion,
            self._completion,
            self._described,
            self._described,
            self._asserted,
            self._commented,
            self._elsewhere,
        ]

    def write(self, writer: Writer) -> str:
        """One request; the writer supplies the words around the code."""
        if not self._pack:
            self._pack = self._rng.sample(self._ideas, len(self._ideas))
        return self._rng.choice(self._styles)(self._pack.pop(), writer)

    def _examples(self, idea: Idea, most: int) -> list[tuple[str, str]]:
        return self._rng.sample(idea.examples, self._rng.randint(1, most))

    def _signature(self, idea: Idea) -> tuple[str, str]:
        """The lines before the definition and its first line, with today's, older or no annotations."""
        roll = self._rng.random()
        if roll < 0.25:
            bare = ", ".join(part.split(":")[0] for part in re.split(r", (?=\w+:)", idea.params))
            return "", f"def {idea.name}({bare}):"
        line = f"def {idea.name}({idea.params}) -> {idea.returns}:"
        if roll < 0.6:
            old = re.sub(r"(\w+(?:\[\w+\])?) \| None", r"Optional[\1]", line)
            old = re.sub(r"\b(list|dict|tuple)\[", lambda match: match[1].capitalize() + "[", old)
            names = sorted(set(re.findall(r"\b(?:List|Dict|Tuple|Optional)(?=\[)", old)))
            return (f"from typing import {', '.join(names)}\n\n\n" if names else ""), old
        return "", line

    def _docstring(self, idea: Idea) -> str:
        """The description and a few examples as an indented docstring."""
        doc = idea.doc + (f" {idea.note}" if idea.note else "")
        shown = self._examples(idea, 3)
        style = self._rng.randrange(6)
        name = idea.name
        if style < 2:
            calls = [f">>> {name}({args})\n    {result}" for args, result in shown]
            body = "\n    ".join(calls)
        elif style == 2:
            arrow = self._rng.choice(["->", "=>", "==", "➞", "returns"])
            body = "Examples:\n    " + "\n    ".join(f"{name}({args}) {arrow} {result}" for args, result in shown)
        elif style == 3:
            body = "\n    ".join(f"For example, {name}({args}) should return {result}." for args, result in shown[:1])
        elif style == 4:
            body = "\n    ".join(f"Input: {args}\n    Output: {result}" for args, result in shown)
        else:
            body = ""
        quote = self._rng.choice(['"""', '"""', '"""', "'''"])
        if not body:
            return f"    {quote}{doc}{quote}\n"
        start = self._rng.choice(["", "\n    ", " "])
        return f"    {quote}{start}{doc}\n\n    {body}\n    {quote}\n"

    def _fenced(self, code: str) -> str:
        code = code.rstrip("\n")
        return f"```python\n{code}\n```" if self._rng.random() < 0.4 else code

    def _completion(self, idea: Idea, writer: Writer) -> str:
        """A signature with a docstring, to be completed."""
        imports, line = self._signature(idea)
        tail = self._rng.choice(["", "", "", "    pass\n", "    # your code here\n", "    ...\n"])
        code = self._fenced(f"{imports}{line}\n{self._docstring(idea)}{tail}")
        opening = writer.fill("{fn.complete}")
        return f"{code}\n\n{opening.rstrip(':')}" if self._rng.random() < 0.15 else f"{opening}\n\n{code}"

    def _described(self, idea: Idea, writer: Writer) -> str:
        """A request in words, perhaps with an example."""
        args = ", ".join(re.findall(r"(\w+): ", idea.params))
        call = f"`{idea.name}({args})`" if self._rng.random() < 0.6 else f"`{idea.name}`"
        text = writer.fill("{fn.describe}").replace("@call", call).replace("@does", third_person(idea.doc))
        text += f" {idea.note}" if idea.note else ""
        if self._rng.random() < 0.6:
            given, result = self._rng.choice(idea.examples)
            shown = writer.fill("{fn.example}")
            text += " " + shown.replace("@in", f"`{idea.name}({given})`").replace("@out", f"`{result}`")
        return text + writer.fill("{k.close}")

    def _asserted(self, idea: Idea, writer: Writer) -> str:
        """A request in words with assertions that the code should satisfy."""
        text = writer.fill("{fn.describe}").replace("@call", f"`{idea.name}`").replace("@does", third_person(idea.doc))
        text += f" {idea.note}" if idea.note else ""
        tests = "\n".join(f"assert {idea.name}({args}) == {result}" for args, result in self._examples(idea, 4))
        return f"{text} {writer.fill('{fn.tests}')}\n\n{tests}"

    def _commented(self, idea: Idea, writer: Writer) -> str:
        """A definition with a comment instead of a docstring."""
        imports, line = self._signature(idea)
        args, result = self._rng.choice(idea.examples)
        example = f"# {idea.name}({args}) -> {result}\n" if self._rng.random() < 0.6 else ""
        note = f" {idea.note}" if idea.note else ""
        code = self._fenced(f"{imports}# {idea.doc}{note}\n{example}{line}\n")
        return f"{writer.fill('{fn.complete}')}\n\n{code}"

    def _elsewhere(self, idea: Idea, writer: Writer) -> str:
        """The same function in another language, or something else about it."""
        text = writer.fill("{fn.other}").replace("@call", f"`{idea.name}`").replace("@does", third_person(idea.doc))
        return text + (f" {idea.note}" if idea.note else "")
