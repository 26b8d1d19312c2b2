"""The `auto` merge: which drafters run in a step, and which of their tokens are verified.

Every candidate token has an estimated chance that the target reaches it (`rates`), every pass a measured time
(`costs`). What is maximised is expected tokens by seconds of the step: a token is verified while it raises that, a
drafter runs where its tokens are expected to, and where nothing does the step is a plain one. Sequences of a batch
share the width of the pass, so all of them are weighed together.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtspec.config import HEAD_WIDTH
from trtspec.draft.costs import PassCosts
from trtspec.draft.eagle import OPEN_TOKENS as HEAD_TOKENS
from trtspec.draft.ngram import Match
from trtspec.draft.rates import HeadRates, NgramRates
from trtspec.draft.tree import EAGLE, NGRAM, DraftTree

PROBE_STEPS = 48
"""Steps without the head after which a sequence tries it again, whatever is expected of it."""
HEAT_STEP = 0.25
"""Weight of the newest lookup in a sequence's recent luck."""
BIAS_STEP = 0.15
"""Share of a surprise by a lookup's token that moves the log odds of a sequence's lookups."""
BIAS_RETURN = 0.02
"""Share by which those return to the tables' in a step with a lookup."""
LARGEST_BIAS = 3.0
HEAD_STEP = 0.12
"""Weight of the newest draft in what a sequence expects of the head."""
RETURN_STEP = 0.02
"""Share by which that returns to the session's average in a step without the head, and by which it is open to what
comes after."""
SESSION_STEP = 0.02
"""Weight of a draft in the session's average."""
LEAST_GAIN = 1.02
"""Factor of the expected rate from which on the head runs: estimates err, and its draft costs the host something."""
HOST_STEP = 0.05
"""Weight of the newest step in the estimate of what a step takes outside of passes."""
FIRST_EXPECTED = np.array([[0.55, 0.5, 0.45, 0.45, 0.4, 0.4, 0.4, 0.4], [0.35, 0.45, 0.45, 0.45, 0.4, 0.4, 0.4, 0.4]])
"""What a session expects of the head at first: see `AutoState.expected`."""


@dataclass(eq=False)
class AutoState:
    """What is known of one sequence."""

    expected: np.ndarray
    """Chance that the head's best token is accepted after its parent, by depth, float64 `[2, HEAD_TOKENS]`: without a
    lookup's draft beside it, and where the lookup's first token is wrong."""
    heat: float = 0.5
    """Recent luck of lookups: a moving average of whether their first token was right."""
    ngram_bias: float = 0.0
    """What to add to the log odds of lookups: all classes of matches at once, so that a text that changes is noticed
    before each of them has seen it."""
    idle: int = 0
    """Steps since the head drafted."""
    plain_steps: int = 0
    ngram_steps: int = 0
    eagle_steps: int = 0
    both_steps: int = 0

    def count(self, tree: DraftTree) -> None:
        """Count a step by the drafters whose tokens were verified."""
        used = int(np.bitwise_or.reduce(tree.sources)) if tree.size else 0
        self.plain_steps += used == 0
        self.ngram_steps += used == NGRAM
        self.eagle_steps += used == EAGLE
        self.both_steps += used == NGRAM | EAGLE

    def to_json(self) -> dict[str, Any]:
        """What `--stats` shows: steps by the drafters whose tokens were verified, and the estimates."""
        return {
            "plain_steps": self.plain_steps,
            "ngram_steps": self.ngram_steps,
            "eagle_steps": self.eagle_steps,
            "both_steps": self.both_steps,
            "ngram_luck": round(self.heat, 4),
            "eagle_expected": [round(float(rate), 4) for rate in self.expected[0, :4]],
        }


@dataclass(eq=False)
class Member:
    """One sequence in one step."""

    slot: int
    state: AutoState
    match: Match | None
    """What the lookup found, at most as long as there is room."""
    room: int
    """Draft tokens at most."""
    has_head: bool
    """Whether the head can draft for it now."""
    ngram_paths: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Chance that the target reaches each token of the match."""
    wants_head: bool = False
    reached: float = 1.0
    """Chance that the target reaches the end of the head's chain so far."""
    head_paths: list[float] = field(default_factory=list)
    """The same for each of the chain's tokens."""

    @property
    def context(self) -> int:
        """The row of `AutoState.expected` that holds."""
        return int(self.match is not None)

    @property
    def beside_ngram(self) -> float:
        """Chance that the lookup's first token is wrong: what is left for the head to gain."""
        return 1.0 - float(self.ngram_paths[0]) if len(self.ngram_paths) else 1.0


class AutoPolicy:
    """What a session knows, and the decisions of its steps."""

    def __init__(self, verify: PassCosts, head: PassCosts | None, pass_widths: Seq[int]) -> None:
        """Estimates start from priors.

        Args:
            verify: of the target's passes.
            head: of the draft head's passes; None where there is none.
            pass_widths: the width that a verification of 1, 2, ... rows runs at.
        """
        self.verify = verify
        self.head = head
        self.ngram_rates = NgramRates()
        self.head_rates = HeadRates()
        self.expected = FIRST_EXPECTED.copy()
        self.host_seconds = 0.0
        """What a step takes outside of passes."""
        self._pass_widths = np.array(pass_widths)

    def start(self) -> AutoState:
        """The state of a new sequence."""
        return AutoState(self.expected.copy())

    def begin(self, members: Seq[Member], batch: int, width: int, refresh_width: int) -> AutoStep:
        """Weigh a step.

        Args:
            batch: sequences in the pass, others than the members included.
            width: rows that the others need.
            refresh_width: rows of the head's first pass.
        """
        for member in members:
            if member.match is not None:
                size, state = min(len(member.match.continuation), member.room), member.state
                member.ngram_paths = self.ngram_rates.path_rates(
                    member.match.length, state.heat, size, state.ngram_bias
                )
        return AutoStep(self, members, batch, width, refresh_width)

    def pass_seconds(self, batch: int, most_rows: int) -> np.ndarray:
        """Of verifications with 1, 2, ... `most_rows` rows, host work included."""
        return self.verify.seconds(batch, self._pass_widths[:most_rows]) + self.host_seconds

    def head_seconds(self, batch: int, refresh_width: int, most_tokens: int) -> np.ndarray:
        """Of chains of 1, 2, ... `most_tokens` tokens."""
        assert self.head is not None
        first, level = self.head.seconds(batch, np.array([refresh_width, 1]))
        return np.asarray(first + level * np.arange(most_tokens))

    def clock(self, batch: int, width: int, verify_seconds: float, host_seconds: float) -> None:
        """Take in what a step took."""
        self.verify.observe(batch, width, verify_seconds)
        self.host_seconds += HOST_STEP * (min(host_seconds, verify_seconds) - self.host_seconds)

    def clock_head(self, batch: int, refresh_width: int, tokens: int, seconds: float) -> None:
        """Take in what drafting chains of so many tokens took."""
        # As many rows as a pass takes may have been the last of more passes.
        if self.head is not None and refresh_width < HEAD_WIDTH:
            self.head.follow(float(self.head_seconds(batch, refresh_width, tokens)[-1]), seconds)

    def learn(self, member: Member, head_tree: DraftTree | None, tokens: Seq[int]) -> None:
        """Take in which tokens the target chose, `tokens`: what was drafted is judged, verified or not."""
        state = member.state
        match_hits = [] if member.match is None else _hits(member.match.continuation, tokens)
        if member.match is not None:
            self.ngram_rates.observe(member.match.length, state.heat, match_hits)
            state.heat += HEAT_STEP * (match_hits[0] - state.heat)
            expected_hits = conditional_rates(member.ngram_paths)[: len(match_hits)].sum()
            bias = (1.0 - BIAS_RETURN) * state.ngram_bias + BIAS_STEP * (sum(match_hits) - float(expected_hits))
            state.ngram_bias = min(max(bias, -LARGEST_BIAS), LARGEST_BIAS)
        if head_tree is None or not head_tree.size:
            state.idle += 1
            state.expected += RETURN_STEP * (self.expected - state.expected)
            return
        own_step = 1.0 - (1.0 - HEAD_STEP) * (1.0 - RETURN_STEP) ** state.idle
        state.idle = 0
        self._learn_head(head_tree, tokens)
        if member.match is None or not match_hits[0]:
            best = _hits(_best_chain(head_tree), tokens)[:HEAD_TOKENS]
            for depth, hit in enumerate(best):
                for expected, step in ((state.expected, own_step), (self.expected, SESSION_STEP)):
                    expected[member.context, depth] += step * (hit - expected[member.context, depth])

    def _learn_head(self, tree: DraftTree, tokens: Seq[int]) -> None:
        """Calibrate: each node that the target reached, by its probability behind its parent."""
        log_probs, depths = conditional(tree), tree.depths
        reached = [True] + [False] * tree.size
        for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
            depth = int(depths[node + 1])
            if reached[parent] and depth <= len(tokens):
                reached[node + 1] = token == tokens[depth - 1]
                self.head_rates.observe(float(log_probs[node]), depth, reached[node + 1])


class AutoStep:
    """The decisions of one step, in their order: whether the head drafts, how far, and what is verified."""

    def __init__(self, policy: AutoPolicy, members: Seq[Member], batch: int, width: int, refresh_width: int) -> None:
        self._policy = policy
        self.members = members
        self.refresh_width = refresh_width
        self._batch = batch
        self._width = width
        self._spent = 0.0
        self._rows = max([width, *(member.room + 1 for member in members)])
        self._seconds = policy.pass_seconds(batch, self._rows)
        self._head_seconds: np.ndarray | None = None
        if policy.head is not None:
            self._head_seconds = policy.head_seconds(batch, refresh_width, HEAD_TOKENS)

    def choose_head(self, others_draft: bool) -> None:
        """Set `wants_head` of each member.

        Args:
            others_draft: whether the head runs anyway, for other sequences of the batch.
        """
        able = [member for member in self.members if member.has_head and member.room]
        if not able or self._head_seconds is None:
            return
        hopes = {member.slot: self._hope(member) for member in able}
        best, _ = self._best_rate([member.ngram_paths for member in self.members])
        for length in (1, 2, 3, 5, HEAD_TOKENS):
            paths = [
                _merged(member.ngram_paths, hopes[member.slot][:length] if member in able else None)
                for member in self.members
            ]
            rate, _ = self._best_rate(paths, 0.0 if others_draft else float(self._head_seconds[length - 1]))
            if rate > LEAST_GAIN * best:
                break
        else:
            able = [member for member in able if member.state.idle >= PROBE_STEPS]
        for member in able:
            member.wants_head = True
            # Trees grow as the options say, without being asked how far: at least this is spent then.
            self._spent = float(self._head_seconds[0])

    def go_on(self, slots: Seq[int], log_probs: np.ndarray) -> bool:
        """Whether the head's chains should get another token.

        Args:
            slots: of the chains that have not ended.
            log_probs: of each one's newest token behind its parent, by the head, `[len(slots)]`.
        """
        assert self._head_seconds is not None
        drafting = {member.slot: member for member in self.members if member.wants_head}
        gain, length = 0.0, 1
        for slot, log_prob in zip(slots, log_probs, strict=True):
            if (member := drafting.get(slot)) is None:
                continue
            length = len(member.head_paths) + 1
            rate = self._policy.head_rates.rates(np.array([log_prob]), np.array([length]))[0]
            member.reached *= float(rate)
            member.head_paths.append(member.reached * member.beside_ngram)
            if length < min(HEAD_TOKENS, member.room):
                gain += member.head_paths[-1] * float(member.state.expected[member.context, length])
        self._spent = float(self._head_seconds[min(length, HEAD_TOKENS) - 1])
        if not gain or length >= HEAD_TOKENS:
            return False
        rate, rows = self._best_rate(self._paths(), self._spent)
        step = self._head_seconds[length] - self._head_seconds[length - 1]
        if rows < self._rows:
            step += max(float(self._seconds[rows] - self._seconds[rows - 1]), 0.0)
        return bool(gain > rate * step)

    def choose_rows(self, paths: Seq[np.ndarray], width: int) -> int:
        """The width of the verification, root included: the one with the most expected tokens by second.

        Args:
            paths: each member's candidates: the chance that the target reaches them, falling.
            width: rows that the other sequences' trees turned out to need.
        """
        if width >= self._rows:
            # Others' trees left nothing to decide: no member's room is wider.
            return width
        self._width = width
        _, rows = self._best_rate(paths, self._spent)
        return rows

    def _paths(self) -> list[np.ndarray]:
        return [_merged(member.ngram_paths, np.array(member.head_paths)) for member in self.members]

    def _hope(self, member: Member) -> np.ndarray:
        """What the head's next chain is expected to gain, token by token."""
        length = min(HEAD_TOKENS, member.room)
        return np.cumprod(member.state.expected[member.context, :length]) * member.beside_ngram

    def _best_rate(self, paths: Seq[np.ndarray], spent: float = 0.0) -> tuple[float, int]:
        """The highest rate of expected tokens by second, and the rows it takes."""
        gains = np.full(self._rows, float(self._batch))
        for chances in paths:
            reached = np.cumsum(chances[: self._rows - 1])
            gains[1 : len(reached) + 1] += reached
            if len(reached):
                gains[len(reached) + 1 :] += reached[-1]
        rates = gains[self._width - 1 :] / (self._seconds[self._width - 1 :] + spent)
        best = int(rates.argmax())
        return float(rates[best]), best + self._width


def conditional(tree: DraftTree) -> np.ndarray:
    """Log-probability of each node behind its parent, from the scores of paths, `[size]`."""
    assert tree.scores is not None
    return np.asarray(tree.scores - np.concatenate(([0.0], tree.scores))[tree.parents])


def conditional_rates(paths: np.ndarray) -> np.ndarray:
    """The chance of each token of a chain behind its parent."""
    return np.asarray(paths / np.concatenate(([1.0], paths[:-1])))


def _hits(drafted: np.ndarray, tokens: Seq[int]) -> list[bool]:
    """Which drafted tokens the target chose, up to the first that it didn't, as far as is known."""
    hits: list[bool] = []
    for token, chosen in zip(drafted.tolist(), tokens, strict=False):
        hits.append(token == chosen)
        if not hits[-1]:
            break
    return hits


def _best_chain(tree: DraftTree) -> np.ndarray:
    """The path of first children from the root down: the head's best tokens."""
    if tree.is_chain:
        return tree.tokens
    tokens, row = [], 0
    for node, parent in enumerate(tree.parents.tolist()):
        if parent == row:
            tokens.append(tree.tokens[node])
            row = node + 1
    return np.array(tokens)


def _merged(first: np.ndarray, second: np.ndarray | None) -> np.ndarray:
    """Both drafters' chances, falling."""
    if second is None or not len(second):
        return first
    if not len(first):
        return second
    return np.asarray(-np.sort(-np.concatenate((first, second))))
