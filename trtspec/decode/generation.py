"""One sequence while it is being generated: its tokens, its text, its figures."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from trtspec.decode.accept import Acceptance
from trtspec.decode.detokenize import TextStream
from trtspec.decode.stats import Stats
from trtspec.draft.head_state import HeadState
from trtspec.draft.policy import AutoState
from trtspec.draft.tree import DraftTree
from trtspec.sampling import Sampler, TokenLogprob
from trtspec.sequence import CONTEXT, LENGTH, STOP, Sequence


@dataclass(eq=False)
class Generation:
    """A sequence with its text stream and statistics."""

    sequence: Sequence
    text: TextStream
    eos_token_ids: frozenset[int]
    stats: Stats = field(default_factory=Stats)
    started: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    ended_at: float | None = None
    taken: int = 0
    """Generated tokens handed out by `take`."""
    taken_text: list[str] = field(default_factory=list)
    """The text that `take` handed out, piece by piece."""
    taken_counts: tuple[int, int] = (0, 0)
    """Draft tokens and accepted ones that `take_counts` told."""
    head: HeadState | None = None
    """What the draft head holds of it; None where its method has no head, and behind its end."""
    auto: AutoState | None = None
    """What the `auto` merge knows of it; None where its method is another."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the generated tokens, where they are asked for."""
    arrival: int = -1
    """Its place in the order in which sequences were queued."""
    _sampler: Sampler | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.sequence.finish_reason is not None

    @property
    def sampler(self) -> Sampler | None:
        """What chooses its tokens; None where they are simply the most probable, and before the first."""
        return self._sampler

    def sampler_of(self, vocab_size: int) -> Sampler | None:
        """The same, made when the first logits come."""
        if self._sampler is None and not self.sequence.sampling.is_plain:
            self._sampler = Sampler(self.sequence.sampling, self.sequence.history, vocab_size)
        return self._sampler

    @property
    def has_news(self) -> bool:
        """Whether `take` would hand out tokens."""
        return self.sequence.generated > self.taken

    def take(self) -> tuple[str, list[int]]:
        """Text and token ids that came since the last call."""
        new = self.sequence.history[self.sequence.prompt_length + self.taken :].tolist()
        self.taken += len(new)
        text = self.text.take()
        self.taken_text.append(text)
        return text, new

    def take_counts(self) -> tuple[int, int]:
        """Draft tokens verified and accepted since the last call."""
        before, now = self.taken_counts, (self.stats.draft_tokens, self.stats.accepted_tokens)
        self.taken_counts = now
        return now[0] - before[0], now[1] - before[1]

    def extend(self, tokens: Seq[int]) -> int:
        """Commit tokens one by one until a stop condition holds; returns how many were kept.

        End of sequence and stop strings come before the length limits: a token that completes a stop string ends the
        sequence with "stop" even when it is the last one allowed.
        """
        kept = 0
        for token in tokens:
            self.sequence.append(token)
            kept += 1
            reason = self._finish_reason(token)
            if reason is not None:
                self.sequence.finish_reason = reason
                break
        if self._sampler is not None:
            self._sampler.commit(tokens[:kept])
        if not self.text.watches:
            # Without stop strings only an end-of-sequence token ends with STOP, and that one is no text.
            self.text.push(tokens[: kept - (self.sequence.finish_reason == STOP)])
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        if self.finished:
            self.end()
        return kept

    def commit(self, tree: DraftTree, acceptance: Acceptance) -> tuple[int, list[int]]:
        """Commit what a verification yielded, trimmed by the stop conditions.

        Returns:
            The number of tokens committed, and the rows committed, from the root (0) on: if it isn't finished, the
            cache has to keep their KV.
        """
        num_kept = self.extend(acceptance.tokens)
        rows = acceptance.rows[:num_kept]
        self.stats.count_step(tree, rows, num_kept, acceptance.num_matches)
        kept = [0, *rows]
        if not self.finished:
            self.sequence.cached += len(kept)
        return num_kept, kept

    def end(self, reason: str | None = None) -> None:
        """Release the held text and the head's state; with a reason, finish for it (cancellation)."""
        self.sequence.finish_reason = reason or self.sequence.finish_reason
        self.text.finish()
        self.head = self._sampler = None
        self.ended_at = time.perf_counter()

    def _finish_reason(self, token: int) -> str | None:
        sequence = self.sequence
        if token in self.eos_token_ids and not sequence.sampling.ignore_eos:
            return STOP
        if self.text.watches and self.text.push([token]):
            return STOP
        if sequence.generated >= sequence.sampling.max_new_tokens:
            return LENGTH
        return CONTEXT if sequence.length >= sequence.capacity else None
