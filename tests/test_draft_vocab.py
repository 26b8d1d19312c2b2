"""Draft vocabularies: sizes, files of ids and corpora, and what is wrong with them in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from head_targets import save_tokenizer

from trtspec.draft_vocab import DraftVocab, choose_ids, count_tokens, parse_draft_vocab
from trtspec.errors import ConfigError
from trtspec.tokenizer import Tokenizer

VOCAB = 64
ALL = range(VOCAB)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per word: w3 to w63."""
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer(directory)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refused(vocab: DraftVocab, candidates: range | tuple[int, ...] = ALL, tokenizer: Tokenizer | None = None) -> str:
    """The message with which a draft vocabulary is refused."""
    with pytest.raises(ConfigError) as raised:
        choose_ids(vocab, candidates, VOCAB, (2,), tokenizer)
    return str(raised.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (8, DraftVocab(8)),
        ("8192", DraftVocab(8192)),
        ("ids.json", DraftVocab(ids_file=Path("ids.json"))),
        (Path("8"), DraftVocab(ids_file=Path("8"))),
        ("100:corpus.txt", DraftVocab(100, corpus=Path("corpus.txt"))),
        ("1:C:/a:b.jsonl", DraftVocab(1, corpus=Path("C:/a:b.jsonl"))),
        ("C:/ids", DraftVocab(ids_file=Path("C:/ids"))),
        ("~/ids", DraftVocab(ids_file=Path.home() / "ids")),
    ],
)
def test_forms(value: int | str | Path, expected: DraftVocab) -> None:
    assert parse_draft_vocab(value) == expected


@pytest.mark.parametrize("value", [0, -3, "0", "-3", "0:corpus.txt"])
def test_sizes_below_one(value: int | str) -> None:
    with pytest.raises(ConfigError, match="a draft vocabulary needs at least 1 token"):
        parse_draft_vocab(value)


@pytest.mark.parametrize("value", ["", True, 1.5, None, ["8"]])
def test_other_values(value: object) -> None:
    with pytest.raises(ConfigError, match="expected a size N, a file of token ids, or N:FILE with a corpus"):
        parse_draft_vocab(value)  # type: ignore[arg-type]


def test_size_takes_the_lowest_ids_and_the_end_of_sequence() -> None:
    assert choose_ids(DraftVocab(4), ALL, VOCAB, (2,)) == (0, 1, 2, 3)
    assert choose_ids(DraftVocab(4), ALL, VOCAB, (9, 2)) == (0, 1, 2, 3, 9)
    assert choose_ids(DraftVocab(VOCAB), ALL, VOCAB, (9,)) == tuple(ALL)
    assert choose_ids(DraftVocab(10**9), ALL, VOCAB, (9,)) == tuple(ALL)


def test_size_takes_rows_that_the_head_has() -> None:
    assert choose_ids(DraftVocab(3), (40, 5, 7, 12), VOCAB, (2, 40)) == (5, 7, 12, 40)


@pytest.mark.parametrize("text", ["[9, 4, 63]", " [\n9,4,63] ", "9 4 63", "9\n4\n\n\t63\n", "\ufeff9 4 63"])
def test_ids_in_a_file(tmp_path: Path, text: str) -> None:
    """Just these, the end of the sequence isn't added."""
    assert choose_ids(DraftVocab(ids_file=write(tmp_path / "ids", text)), ALL, VOCAB, (2,)) == (4, 9, 63)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; give at least one token id"),
        ("[]", "is empty; give at least one token id"),
        ("1 2 64", "entry 3 is 64; expected a token id from 0 to 63"),
        ("1 -2", "entry 2 is -2; expected a token id from 0 to 63"),
        ("1 two", "entry 2 is 'two'; expected a token id from 0 to 63"),
        ("1 2.0", "entry 2 is '2.0'; expected"),
        ("9" * 5000, "entry 1 is"),
        ("[1, 2.5]", "entry 2 is 2.5; expected"),
        ('["1"]', "entry 1 is '1'; expected"),
        ("[true]", "entry 1 is True; expected"),
        ("[null]", "entry 1 is None; expected"),
        ("[[1]]", "entry 1 is [1]; expected"),
        ("5 6 5", "entry 3 is 5, which is there before; give every token id once"),
        ("[1, 2", "is no JSON array"),
        ('{"ids": [1]}', "entry 1 is '{\"ids\":'; expected"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "ids", text)
    message = refused(DraftVocab(ids_file=path))
    assert f"draft vocabulary {path}" in message
    assert words in message


def test_ids_that_the_head_lacks(tmp_path: Path) -> None:
    path = write(tmp_path / "ids", "5 6")
    message = refused(DraftVocab(ids_file=path), (5, 7))
    assert message.endswith("entry 2 is 6, of which the draft head's own LM head has no row; leave it out")


def test_files_that_cannot_be_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for vocab in (DraftVocab(ids_file=tmp_path / "missing"), DraftVocab(3, corpus=tmp_path / "missing")):
        assert f"there is no file {tmp_path / 'missing'}; expected a size N, a file" in refused(vocab, ALL, tokenizer)
    assert "cannot be read" in refused(DraftVocab(ids_file=tmp_path))
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "is not UTF-8 (byte 3); save it as UTF-8" in refused(DraftVocab(ids_file=tmp_path / "latin"))


def test_most_frequent_of_a_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus = write(tmp_path / "corpus.txt", "w50 w50 w50\nw40 w40 w7 w9\nw9 w40\n")
    assert count_tokens(corpus, tokenizer) == {50: 3, 40: 3, 9: 2, 7: 1}

    def chosen(size: int, candidates: range | tuple[int, ...] = ALL) -> tuple[int, ...]:
        return choose_ids(DraftVocab(size, corpus=corpus), candidates, VOCAB, (2,), tokenizer)

    assert chosen(1) == (2, 40)
    assert chosen(3) == (2, 9, 40, 50)
    # The corpus has four different tokens: the lowest ids fill up.
    assert chosen(6) == (0, 1, 2, 7, 9, 40, 50)
    assert chosen(2, (60, 50, 9, 3)) == (9, 50)
    assert chosen(VOCAB) == tuple(ALL)


def test_texts_of_a_jsonl_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = [
        {"prompt": "w3"},
        {"turns": ["w4", "w5"], "id": "w60"},
        {"messages": [{"role": "user", "content": "w6"}, {"role": "assistant", "content": "w7 w7"}]},
    ]
    corpus = write(tmp_path / "c.jsonl", "\n\n".join(json.dumps(record) for record in records) + "\n")
    assert count_tokens(corpus, tokenizer) == {3: 1, 4: 1, 5: 1, 6: 1, 7: 2}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "corpus.jsonl:2: not JSON"),
        ("[1]", "corpus.jsonl:2: no text; expected an object with `prompt`, `turns`, `messages`"),
        ('{"text": "w3"}', "corpus.jsonl:2: no text"),
        ('{"prompt": 3}', "corpus.jsonl:2: no text"),
        ('{"messages": [{"role": "user"}]}', "corpus.jsonl:2: no text"),
    ],
)
def test_jsonl_files_that_are_refused(tmp_path: Path, tokenizer: Tokenizer, line: str, words: str) -> None:
    corpus = write(tmp_path / "corpus.jsonl", '{"prompt": "w3"}\n' + line)
    assert words in refused(DraftVocab(3, corpus=corpus), ALL, tokenizer)


def test_halves_of_characters_do_no_harm(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus = write(tmp_path / "corpus.jsonl", '{"prompt": "w3 \\ud83d w4"}')
    assert count_tokens(corpus, tokenizer)[4] == 1


def test_a_heads_ranking_comes_before_the_order_of_ids() -> None:
    assert choose_ids(DraftVocab(3), ALL, VOCAB, (2,), ranking=(40, 7)) == (0, 2, 7, 40)
    assert choose_ids(DraftVocab(1), ALL, VOCAB, (2,), ranking=(40, 7)) == (2, 40)
    assert choose_ids(DraftVocab(2), (5, 6, 7), VOCAB, (2,), ranking=(40, 7)) == (5, 7)
