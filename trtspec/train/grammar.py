"""A small text grammar: sections of templates in data/*.txt, filled in with seeded draws.

A data file holds sections. `== name` starts one with an item a line, `== name *` one whose lines are split at ";",
and `=== name` one of blocks separated by lines of "--". A line that starts with "# " is a comment outside blocks.
"3* text" counts an item three times and "@other" takes over another section's items; `\\n`, `\\s` and `\\e` stand for a
line break, a space and nothing. Fields of an item are separated by "@@".

In an item, `(a|b)` is a choice; `{name}` is a bound value or a draw from a section, `{p:person}` binds, `{p.1}` is a
field of p, `{n:2-9}` and `{n:10-90/5}` bind numbers, `{t=n*2}` binds a computed one. A name belongs to its item, except
that one with an underscore at the start is bound silently and for the whole text. `^a`, `^cap`, `^ing`, `^,` and
`^money` at the end change how the value is written.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from trtspec.errors import ConfigError

DATA = Path(__file__).parent / "data"

_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")
SLOT = re.compile(
    r"\{(?P<name>[A-Za-z_][\w.]*)(?:(?P<how>[:=])(?P<what>[^{}\"^\s][^{}\"^]*))?(?P<forms>(?:\^[a-z,]+)*)\}"
)
_RANGE = re.compile(r"(\d+)-(\d+)(?:/(\d+))?")
_FIELD = re.compile(r"(\w+)\.(\d)")
_REPEAT = re.compile(r"(\d+)\* (.*)", re.DOTALL)
_DOUBLED = {"begin", "cut", "get", "jog", "plan", "put", "run", "set", "shop", "stop", "swim", "trim", "wrap"}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def _items(header: str, body: str) -> list[str]:
    """The items of one section, repeats spelled out."""
    if header.startswith("=== "):
        raw = [block.strip("\n") for block in re.split(r"^--$", body, flags=re.MULTILINE)]
    else:
        raw = [line.strip() for line in body.splitlines() if not line.startswith("# ")]
        if header.endswith(" *"):
            raw = [part.strip() for line in raw for part in line.split(";")]
    found: list[str] = []
    for item in filter(None, raw):
        repeat = _REPEAT.fullmatch(item)
        text = repeat[2] if repeat else item
        found += [text.replace("\\n", "\n").replace("\\s", " ").replace("\\e", "")] * (int(repeat[1]) if repeat else 1)
    return found


def load_sections(folder: Path = DATA) -> dict[str, list[str]]:
    """Every section of the data files in a folder, by name, with "@other" items replaced by the other's items."""
    sections: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.txt")):
        parts = re.split(r"^(={2,3} .+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for header, body in zip(parts[1::2], parts[2::2], strict=True):
            name = header.strip("=* ")
            if name in sections:
                raise ConfigError(f"{path.name} repeats the section {name!r}; give it another name")
            sections[name] = _items(header.strip(), body)
    return {name: list(_spliced(sections, name)) for name in sections}


def _spliced(sections: dict[str, list[str]], name: str) -> Iterator[str]:
    for item in sections[name]:
        if item.startswith("@"):
            yield from _spliced(sections, item[1:])
        else:
            yield item


def _calculate(node: ast.expr, names: Mapping[str, str]) -> int:
    """The integer an arithmetic expression over bound numbers stands for."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_calculate(node.left, names), _calculate(node.right, names))
    if isinstance(node, ast.Name):
        return int(names[node.id].split("@@")[0])
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ConfigError(f"a template computes {ast.unparse(node)!r}; use +, -, *, // over bound numbers")


def _gerund(phrase: str) -> str:
    """A verb phrase with its first word in the -ing form."""
    verb, _, rest = phrase.partition(" ")
    if verb in _DOUBLED:
        verb += verb[-1]
    elif verb.endswith("e") and not verb.endswith("ee"):
        verb = verb[:-1]
    return f"{verb}ing {rest}".strip()


def _article(phrase: str) -> str:
    """A noun phrase with its indefinite article."""
    vowel = re.match(r"(?i)(?!uni|use|usu|eu|one\b)[aeiou]|hour|honest|LRU|\b8|\b11\b|\b18\b", phrase)
    return f"{'an' if vowel else 'a'} {phrase}"


_FORMS: dict[str, Callable[[str], str]] = {
    "a": _article,
    "cap": lambda text: text[:1].upper() + text[1:],
    "ing": _gerund,
    ",": lambda text: f"{int(text):,}",
    "money": lambda text: f"{int(text) // 100}.{int(text) % 100:02d}",
}


class Writer:
    """Fills templates in. Every section is dealt out like a pack of cards, so that its items come up equally often."""

    def __init__(self, sections: dict[str, list[str]], rng: random.Random) -> None:
        self.rng = rng
        self.sections = sections
        self.hooks: dict[str, Callable[[Writer], str]] = {}
        self._packs: dict[str, list[str]] = {}
        self._shared: dict[str, str] = {}
        self._used: dict[str, set[str]] = {}

    def write(self, section: str) -> str:
        """One text from a section, its values bound afresh."""
        self._shared, self._used = {}, {}
        return self.fill("{" + section + "}")

    def fill(self, template: str) -> str:
        """The template with choices made and slots filled."""
        while choice := _CHOICE.search(template):
            picked = self.rng.choice(choice[1].split("|"))
            template = template[: choice.start()] + picked + template[choice.end() :]
        names = ChainMap[str, str]({}, self._shared)
        return SLOT.sub(lambda match: self._slot(match, names), template)

    def draw(self, section: str) -> str:
        """An item of a section that this text has not used yet, as it stands in the data."""
        used = self._used.setdefault(section, set())
        if len(used) >= len(set(self.sections[section])):
            used.clear()
        pack = self._packs.setdefault(section, [])
        fitting = [i for i, item in enumerate(pack) if item not in used]
        if not fitting:
            fresh = list(self.sections[section])
            self.rng.shuffle(fresh)
            pack[:0] = fresh
            fitting = [i for i, item in enumerate(pack) if item not in used]
        item = pack.pop(fitting[-1])
        used.add(item)
        return item

    def _slot(self, match: re.Match[str], names: ChainMap[str, str]) -> str:
        """What replaces one slot, given the names bound so far in its item and in the text."""
        name, how, what = match["name"], match["how"], match["what"]
        if how is None:
            value = self._value(name, names)
        else:
            if name not in names:
                value = self._new(how, what, names)
                (self._shared if name.startswith("_") else names)[name] = value
            if name.startswith("_"):
                return ""
            value = names[name]
        text = value.split("@@")[0]
        for form in match["forms"].split("^")[1:]:
            text = _FORMS[form](text)
        return text

    def _value(self, name: str, names: ChainMap[str, str]) -> str:
        """A bound value, a field of one, a hook's text or a draw."""
        if name in names:
            return names[name]
        field = _FIELD.fullmatch(name)
        if field and field[1] in names:
            return names[field[1]].split("@@")[int(field[2])]
        if name in self.hooks:
            return self.hooks[name](self)
        return self._new(":", name, names)

    def _new(self, how: str, what: str, names: ChainMap[str, str]) -> str:
        """The value that a binding gives a name."""
        if how == "=":
            return str(_calculate(ast.parse(what.strip(), mode="eval").body, names))
        span = _RANGE.fullmatch(what)
        if span:
            low, high, step = int(span[1]), int(span[2]), int(span[3] or 1)
            return str(self.rng.randrange(low, high + 1, step))
        if what not in self.sections:
            raise ConfigError(f"a template draws from {what!r}; the data has no section of that name")
        return self.fill(self.draw(what))
