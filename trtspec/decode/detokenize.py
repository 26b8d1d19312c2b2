"""Token ids to text, piece by piece, without broken characters; stop strings are found here."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A UTF-8 character has at most 4 bytes, so text that ends in a replacement character for more pushes than this holds
# bytes that will never become a character; only the last three replacement characters may still turn into one.
_LONGEST_WAIT = 8
_LONGEST_TAIL = 3
# Read ids are kept as context up to this many, so that most steps decode once; then all but the last read are dropped.
_LONGEST_WINDOW = 32


class Decoder(Protocol):
    """What decodes token ids; `tokenizers.Tokenizer` does."""

    def decode(self, ids: Seq[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        ...


class TextStream:
    """The text of one sequence as it grows.

    Text is released only when it is whole characters and can no longer turn out to be the start of a stop string.
    """

    def __init__(self, decoder: Decoder, stop: Seq[str] = ()) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._read = 0
        """Ids before this one are in the text already; they stay only as context for the next decoding."""
        self._known = ""
        """The part of the ids' text that is in `_held` or released."""
        self._waited = 0
        """Decodings since the text last ended in a whole character."""
        self._held = ""
        """Decoded, not released: it may be the start of a stop string."""
        self._released: list[str] = []
        self.stopped = False

    @property
    def watches(self) -> bool:
        """Whether stop strings are set, so that tokens must be pushed one at a time."""
        return bool(self._stop)

    def push(self, tokens: Seq[int]) -> bool:
        """Add tokens; true when a stop string is complete: the text ends before it, and nothing more is taken.

        Without stop strings nothing is decoded until the text is asked for.
        """
        self._ids.extend(tokens)
        return self.watches and self._decode(final=False)

    def finish(self) -> None:
        """No more tokens come: release what was held back."""
        if not self.stopped:
            self._decode(final=True)
            self._release(len(self._held))

    def take(self) -> str:
        """The text released since the last call."""
        if not self.watches:
            self._decode(final=False)
        text = "".join(self._released)
        self._released.clear()
        return text

    def _decode(self, final: bool) -> bool:
        """Decode the unread ids behind the read ones, which give them their context (spaces, joined bytes)."""
        if self._read == len(self._ids):
            return False
        text = self._decoder.decode(self._ids, skip_special_tokens=True)
        if text.endswith(REPLACEMENT) and not final:
            return self._wait(text)
        self._waited = 0
        if text and text == self._known:
            # Skipped tokens. Alone, they would be no context for the next one: a first token loses its space.
            del self._ids[self._read :]
            return False
        piece = text[len(self._known) :]
        if len(self._ids) > _LONGEST_WINDOW:
            self._ids = self._ids[self._read :]
            text = self._decoder.decode(self._ids, skip_special_tokens=True)
        self._read, self._known = len(self._ids), text
        return self._extend(piece)

    def _wait(self, text: str) -> bool:
        """Leave an incomplete character for the next decoding, but do not wait for ever."""
        self._waited += 1
        if self._waited <= _LONGEST_WAIT:
            return False
        piece = text[len(self._known) : -_LONGEST_TAIL]
        self._known += piece
        return self._extend(piece)

    def _extend(self, piece: str) -> bool:
        self._held += piece
        ends = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self._held = self._held[: min(ends)]
            self._release(len(self._held))
            self.stopped = True
            return True
        self._release(len(self._held) - self._possible_stop())
        return False

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text with which a stop string starts."""
        lengths = range(max((len(stop) for stop in self._stop), default=1) - 1, 0, -1)
        return next(
            (n for n in lengths if any(self._held.endswith(stop[:n]) for stop in self._stop if n < len(stop))), 0
        )

    def _release(self, length: int) -> None:
        if length:
            self._released.append(self._held[:length])
            self._held = self._held[length:]
