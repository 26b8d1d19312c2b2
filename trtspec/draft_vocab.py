"""Draft vocabularies: the tokens that a draft head may propose, chosen by the user to make its LM head cheaper."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import ConfigError
from trtspec.tokenizer import Tokenizer

_SIZE_AND_CORPUS = re.compile(r"(\d{1,18}):(.+)", re.DOTALL)
_PROMPT_KEYS = ("prompt", "turns", "messages")
_EXPECTED = "a size N, a file of token ids, or N:FILE with a corpus"


@dataclass(frozen=True)
class DraftVocab:
    """What --draft-vocab says: a file of token ids, or a size, with a corpus whose most frequent tokens are taken."""

    size: int | None = None
    ids_file: Path | None = None
    corpus: Path | None = None


def parse_draft_vocab(value: int | str | Path) -> DraftVocab:
    """Read N, FILE or N:FILE.

    Raises:
        ConfigError: it is none of these, or the size is below 1.
    """
    if isinstance(value, Path):
        return DraftVocab(ids_file=value.expanduser())
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ConfigError(f"--draft-vocab is {value!r}; expected {_EXPECTED}")
    if isinstance(value, int):
        return DraftVocab(_size(value))
    size = _integer(value)
    if size is not None:
        return DraftVocab(_size(size))
    both = _SIZE_AND_CORPUS.fullmatch(value)
    if both is not None:
        return DraftVocab(_size(int(both[1])), corpus=Path(both[2]).expanduser())
    return DraftVocab(ids_file=Path(value).expanduser())


def choose_ids(
    vocab: DraftVocab,
    candidates: Sequence[int],
    vocab_size: int,
    eos_token_ids: Iterable[int],
    tokenizer: Tokenizer | None = None,
    ranking: Sequence[int] = (),
) -> tuple[int, ...]:
    """The token ids of a draft vocabulary, ascending.

    Ids of a BPE tokenizer are in the order in which its training found them, so the lowest are the most frequent. With
    a corpus, the ids that are most frequent in it are taken, the lower of two equally frequent ones, and the lowest of
    the rest where they don't suffice; without one, those of the head's own ranking, where it has one, come before the
    lowest of the rest. The end-of-sequence ids come on top of the size.

    Args:
        candidates: the ids that may be taken: the target's, or those of the rows that the head's own LM head has.
        vocab_size: the target's.
        tokenizer: the target's; needed with a corpus.
        ranking: ids in the order of their frequency in the head's training data.

    Raises:
        ConfigError: a file can't be read or used.
    """
    if vocab.ids_file is not None:
        return tuple(sorted(read_ids(vocab.ids_file, candidates, vocab_size)))
    assert vocab.size is not None
    counts = Counter({token: len(ranking) - place for place, token in enumerate(ranking)})
    if vocab.corpus is not None:
        assert tokenizer is not None
        counts = count_tokens(vocab.corpus, tokenizer)
    ranked = sorted(candidates, key=lambda token: (-counts[token], token))
    return tuple(sorted({*ranked[: vocab.size], *(set(eos_token_ids) & set(candidates))}))


def read_ids(path: Path, candidates: Sequence[int], vocab_size: int) -> list[int]:
    """The token ids in a file: a JSON array, or integers separated by white space.

    Raises:
        ConfigError: the file can't be read or is empty; an entry is no id of the target or of the head's own LM head,
            or comes twice.
    """
    entries = _entries(path, _read(path))
    if not entries:
        raise ConfigError(f"draft vocabulary {path} is empty; give at least one token id")
    allowed, seen = set(candidates), set[int]()
    for number, entry in enumerate(entries, 1):
        where = f"draft vocabulary {path}: entry {number} is {entry!r}"
        if isinstance(entry, bool) or not isinstance(entry, int) or not 0 <= entry < vocab_size:
            raise ConfigError(f"{where}; expected a token id from 0 to {vocab_size - 1}")
        if entry in seen:
            raise ConfigError(f"{where}, which is there before; give every token id once")
        if entry not in allowed:
            raise ConfigError(f"{where}, of which the draft head's own LM head has no row; leave it out")
        seen.add(entry)
    return list(entries)


def count_tokens(corpus: Path, tokenizer: Tokenizer) -> Counter[int]:
    """How often each token id occurs in a UTF-8 text, or in the prompts and messages of a .jsonl file.

    Raises:
        ConfigError: the file can't be read, or a line of a .jsonl file holds no text.
    """
    text = _read(corpus)
    # Line by line: a tokenizer takes minutes for one text of many megabytes.
    lines = _jsonl_texts(corpus, text) if corpus.suffix == ".jsonl" else iter(text.splitlines(keepends=True))
    counts: Counter[int] = Counter()
    for line in lines:
        counts.update(tokenizer.encode(line))
    return counts


def _integer(text: str) -> int | None:
    # Python refuses to convert thousands of digits.
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def _size(value: int) -> int:
    if value < 1:
        raise ConfigError(f"--draft-vocab {value}: a draft vocabulary needs at least 1 token")
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"--draft-vocab: there is no file {path}; expected {_EXPECTED}") from None
    except OSError as error:
        raise ConfigError(f"--draft-vocab: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--draft-vocab: {path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def _entries(path: Path, text: str) -> list[Any]:
    if not text.lstrip().startswith("["):
        numbers = [(word, _integer(word)) for word in text.split()]
        return [word if number is None else number for word, number in numbers]
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"draft vocabulary {path} is no JSON array ({error}); expected token ids") from None
    return list(entries)


def _jsonl_texts(path: Path, text: str) -> Iterator[str]:
    """Every prompt, turn and message of a file with one JSON object a line."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"corpus {path}:{number}: not JSON ({error}); expected one object a line") from None
        texts = _texts(record)
        if not texts:
            keys = ", ".join(f"`{key}`" for key in _PROMPT_KEYS)
            raise ConfigError(f"corpus {path}:{number}: no text; expected an object with {keys}")
        yield from texts


def _texts(record: Any) -> list[str]:
    if not isinstance(record, dict):
        return []
    values = [record[key] for key in _PROMPT_KEYS if key in record]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    texts = [item.get("content") if isinstance(item, dict) else item for item in flat]
    # JSON may hold halves of surrogate pairs, which no tokenizer takes.
    return [text.encode("utf-8", "replace").decode("utf-8") for text in texts if isinstance(text, str)]
