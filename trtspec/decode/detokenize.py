"""Token ids to text, piece by piece, without broken characters; stop strings are found here."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The longest UTF-8 character has 4 bytes, so more tokens than this that end in a replacement character hold bytes
# that will never become a character.
_LONGEST_WAIT = 8


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
        self._held = ""
        """Decoded, not released: it may be the start of a stop string."""
        self._released: list[str] = []
        self.stopped = False

    @property
    def watches(self) -> bool:
        """Whether stop strings are set, so that tokens must be pushed one at a time."""
        return bool(self._stop)

    def push(self, tokens: Seq[int]) -> bool:
        """Add tokens; true when a stop string is complete: the text ends before it, and nothing more is taken."""
        self._ids.extend(tokens)
        return self._decode(final=False)

    def finish(self) -> None:
        """No more tokens come: release what was held back."""
        if not self.stopped:
            self._decode(final=True)
            self._release(len(self._held))

    def take(self) -> str:
        """The text released since the last call."""
        text = "".join(self._released)
        self._released.clear()
        return text

    def _decode(self, final: bool) -> bool:
        """Decode the unread ids behind the read ones, which give them their context (spaces, joined bytes)."""
        if self._read == len(self._ids):
            return False
        known = self._decoder.decode(self._ids[: self._read], skip_special_tokens=True)
        text = self._decoder.decode(self._ids, skip_special_tokens=True)
        unfinished = text.endswith(REPLACEMENT) and len(self._ids) - self._read <= _LONGEST_WAIT
        if unfinished and not final:
            return False
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        return self._extend(text[len(known) :])

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
