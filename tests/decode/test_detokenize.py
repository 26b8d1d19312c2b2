"""The text stream with real tokenizers: whole characters, stop strings, nothing lost at the edges of a push."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from trtspec.decode.detokenize import Decoder, TextStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TRAINING = ["the cat sat on the mat", "A 世界, 世界! こんにちは", "naïve café 😀😀 👩‍👩‍👧", "def f(x):\n    return x\n"]


def byte_characters() -> list[str]:
    """The character with which byte-level tokenizers write each byte: printable ones stand for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTE_CHARACTERS = byte_characters()


def byte_pair_tokenizer() -> Tokenizer:
    """A byte-level BPE like the demo target's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


def chunk_tokenizer(chunks: Seq[bytes]) -> Tokenizer:
    """A byte-level tokenizer whose token i is the i-th of the distinct chunks, which may split characters anywhere."""
    vocab = {"".join(BYTE_CHARACTERS[byte] for byte in chunk): i for i, chunk in enumerate(chunks)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = chunk_tokenizer([bytes([byte]) for byte in range(256)])
BYTE_PAIRS = byte_pair_tokenizer()

PIECES = ["▁", "▁▁", "▁hello", "▁world", "lo", ",", "a", "s", "▁世", "界", "é"]
SPACE_SPECIALS = ["<unk>", "<s>", "</s>"]
FIRST_PIECE = len(SPACE_SPECIALS) + 256


def space_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """A SentencePiece-like tokenizer: spaces in the tokens, single bytes for characters without a token."""
    names = [*SPACE_SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPACE_SPECIALS])
    return tokenizer


SPACES = {
    "metaspace": space_tokenizer(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "replace": space_tokenizer(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    ),
}


def byte_ids(text: str, first: int = 0) -> list[int]:
    return [first + byte for byte in text.encode()]


def pushes(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """The ids in groups that end where the cuts say."""
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:stop] for start, stop in itertools.pairwise(edges)]


def released(decoder: Decoder, groups: list[list[int]], stop: Seq[str] = ()) -> list[str]:
    """What the stream releases after each push, and at the end."""
    stream, pieces = TextStream(decoder, stop), []
    for group in groups:
        if stream.push(group):
            break
        pieces.append(stream.take())
    stream.finish()
    pieces.append(stream.take())
    assert stream.take() == ""
    return pieces


def check_stream(decoder: Decoder, groups: list[list[int]]) -> None:
    """Every piece continues the text of all tokens, so none holds a replacement character that the text has not."""
    whole, so_far = decoder.decode(list(itertools.chain(*groups))), ""
    for piece in released(decoder, groups):
        so_far += piece
        assert whole.startswith(so_far), (piece, groups)
    assert so_far == whole


texts = st.text(st.sampled_from("aé世界😀👧 \n") | st.characters(codec="utf-8"), max_size=30)
cut_lists = st.lists(st.integers(0, 10**6), max_size=12)


@settings(max_examples=150, deadline=None)
@given(texts, st.lists(st.integers(0, 10**6), max_size=50), cut_lists)
def test_tokens_may_split_characters_anywhere(text: str, token_cuts: list[int], push_cuts: list[int]) -> None:
    data = list(text.encode())
    chunks = [bytes(chunk) for chunk in pushes(data, token_cuts) if chunk]
    vocab = sorted(set(chunks))
    ids = [vocab.index(chunk) for chunk in chunks]
    decoder = chunk_tokenizer(vocab)
    assert decoder.decode(ids) == text
    check_stream(decoder, pushes(ids, push_cuts))


@settings(max_examples=150, deadline=None)
@given(texts, cut_lists)
@example(text="12345678世", cuts=[9])
@example(text="123456789012345678901234567890" + "é😀" * 20, cuts=list(range(7, 140, 13)))
def test_single_bytes(text: str, cuts: list[int]) -> None:
    assert BYTES.decode(byte_ids(text)) == text
    check_stream(BYTES, pushes(byte_ids(text), cuts))
    check_stream(BYTES, [[token] for token in byte_ids(text)])


@settings(max_examples=100, deadline=None)
@given(texts, cut_lists)
def test_byte_pairs(text: str, cuts: list[int]) -> None:
    ids = BYTE_PAIRS.encode(text).ids
    assert BYTE_PAIRS.decode(ids) == text
    check_stream(BYTE_PAIRS, pushes(ids, cuts))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), cut_lists)
@example(data=b"\x80" * 9 + "世".encode(), cuts=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
@example(data=b"\x80" * 40 + "世界".encode() * 3, cuts=list(range(60)))
def test_bytes_that_are_no_text(data: bytes, cuts: list[int]) -> None:
    check_stream(BYTES, pushes(list(data), cuts))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(SPACES)),
    st.lists(
        st.one_of(
            st.integers(FIRST_PIECE, FIRST_PIECE + len(PIECES) - 1).map(lambda piece: [piece]),
            st.sampled_from("é世😀x ").map(lambda text: byte_ids(text, len(SPACE_SPECIALS))),
            st.just([2]),
        ),
        max_size=60,
    ),
    cut_lists,
)
def test_spaces_in_tokens_and_bytes_for_rare_characters(name: str, parts: list[list[int]], cuts: list[int]) -> None:
    ids = list(itertools.chain(*parts))
    check_stream(SPACES[name], pushes(ids, cuts))
    check_stream(SPACES[name], [[token] for token in ids])


@pytest.mark.parametrize("name", sorted(SPACES))
@pytest.mark.parametrize("before", [0, 1, 31, 32, 33, 70])
def test_a_word_after_a_special_token_keeps_its_space(name: str, before: int) -> None:
    hello, special = FIRST_PIECE + PIECES.index("▁hello"), 2
    ids = [hello] * before + [special] * 3 + [hello]
    check_stream(SPACES[name], [[token] for token in ids])
    check_stream(SPACES[name], [ids[:-1], ids[-1:]])


@pytest.mark.parametrize(
    ("first", "others"),
    [("A 世", ["界"]), ("A ", ["世", "a", "b"]), ("안", ["녕", "하", "세요"]), ("", ["👩‍👩‍👧", "é"])],
)
def test_characters_that_arrive_byte_by_byte(first: str, others: list[str]) -> None:
    # sglang#31598: a character was repeated behind an incomplete one; exo#1691, dynamo#12630: syllables were lost.
    text = first + "".join(others)
    pieces = released(BYTES, [[token] for token in byte_ids(text)])
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_a_character_over_several_pushes_comes_when_it_is_complete() -> None:
    head, tail = byte_ids("A 世")[:-1], byte_ids("A 世")[-1:]
    assert released(BYTES, [head[:2], head[2:3], head[3:], tail, byte_ids("ab")]) == ["A ", "", "", "世", "ab", ""]


def test_an_incomplete_character_at_the_end_is_released_by_finish() -> None:
    assert released(BYTES, [byte_ids("ok"), byte_ids("世")[:2]]) == ["ok", "", REPLACEMENT]


@pytest.mark.parametrize("byte", [0x80, 0xE4, 0xFF])
@pytest.mark.parametrize("group", [1, 3, 12])
@pytest.mark.parametrize("first", [0, len(SPACE_SPECIALS)])
def test_invalid_bytes_forever_do_not_stall_the_stream(byte: int, group: int, first: int) -> None:
    decoder = SPACES["metaspace"] if first else BYTES
    stream, total = TextStream(decoder), ""
    for _ in range(120 // group):
        stream.push([first + byte] * group)
        total += stream.take()
    assert len(total) >= 100 - 8 * group
    assert set(total) == {REPLACEMENT}
    stream.push([FIRST_PIECE if first else ord("x")])
    stream.finish()
    assert (total + stream.take()).count(REPLACEMENT) == 120


def test_special_tokens_have_no_text() -> None:
    end = BYTE_PAIRS.token_to_id("<|end|>")
    assert end is not None
    cat = BYTE_PAIRS.encode("the cat").ids
    assert "".join(released(BYTE_PAIRS, [cat, [end], cat, [end]])) == "the catthe cat"


class Letters:
    """Token i is the i-th of some strings."""

    def __init__(self, pieces: Seq[str]) -> None:
        self.pieces = list(pieces)

    def decode(self, ids: Seq[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[token] for token in ids)


def possible_stop(text: str, stop: Seq[str]) -> int:
    """Length of the longest end of the text that a stop string may turn out to begin with."""
    return max((n for n in range(len(text) + 1) for s in stop if n < len(s) and text.endswith(s[:n])), default=0)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=30),
    st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_stop_strings_equal_brute_force(pieces: list[str], stop: list[str]) -> None:
    stream, text, out = TextStream(Letters(pieces), stop), "", ""
    for token, piece in enumerate(pieces):
        text += piece
        found = [text.index(s) for s in stop if s in text]
        stopped = stream.push([token])
        out += stream.take()
        assert stopped == stream.stopped == bool(found)
        if found:
            assert out == text[: min(found)]
            stream.finish()
            assert stream.take() == ""
            return
        assert out == text[: len(text) - possible_stop(text, stop)]
    stream.finish()
    assert out + stream.take() == text
    assert not stream.stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        # pieces released after each push, and at the end
        (["one", "STOP", "two"], ["STOP"], ["one", ""]),
        (["one", " ST", "OP", "two"], ["STOP"], ["one", " ", ""]),
        (["a", "S", "T", "x"], ["STOP"], ["a", "", "", "STx", ""]),
        (["a", "S", "T"], ["STOP"], ["a", "", "", "ST"]),
        (["xSTOPySTOPz"], ["STOP"], ["x"]),
        (["ab", "c"], ["abc", "ab"], [""]),
        (["a", "c", "b"], ["abc", "ab"], ["", "ac", "b", ""]),
        (["a", "b"], ["b", "ab"], ["", ""]),
        (["abab", "ac"], ["abac"], ["ab", ""]),
        (["aab", "ab"], ["ab", "zz"], ["a"]),
        (["n\n", "\n", "m"], ["\n\n"], ["n", ""]),
        (["世", "界"], ["界"], ["世", ""]),
        (["end"], ["end", "nd"], [""]),
    ],
)
def test_stop_string_cases(pieces: list[str], stop: list[str], expected: list[str]) -> None:
    assert released(Letters(pieces), [[token] for token in range(len(pieces))], stop) == expected


def test_a_push_may_hold_the_stop_string_and_more() -> None:
    assert released(Letters(["x", "ST", "OP", "y"]), [[0, 1, 2, 3]], ["STOP"]) == ["x"]


@pytest.mark.parametrize("tokens", [lambda text: byte_ids(text), lambda text: BYTE_PAIRS.encode(text).ids])
def test_a_stop_string_of_characters_of_several_bytes(tokens: Callable[[str], list[int]]) -> None:
    decoder = BYTES if tokens("世") == byte_ids("世") else BYTE_PAIRS
    ids = tokens("A 世界, naïve 😀 end")
    for stop, kept in (("界,", "A 世"), ("😀", "A 世界, naïve "), ("ïv", "A 世界, na")):
        assert "".join(released(decoder, [[token] for token in ids], [stop])) == kept


def test_only_streams_with_stop_strings_watch() -> None:
    assert not TextStream(BYTES).watches
    assert TextStream(BYTES, ["x"]).watches


def test_a_stopped_stream_stays_stopped() -> None:
    stream = TextStream(Letters(["x", "STOP", "y"]), ["STOP"])
    assert [stream.push([0]), stream.push([1])] == [False, True]
    stream.finish()
    assert (stream.take(), stream.stopped) == ("x", True)
