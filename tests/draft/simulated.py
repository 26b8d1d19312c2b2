"""A text without a model: lookups and a head that are right by chance, and what steps with them take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.draft.candidates import candidates
from trtspec.draft.costs import PassCosts
from trtspec.draft.ngram import Match
from trtspec.draft.policy import AutoPolicy, AutoStep, Member
from trtspec.draft.tree import EAGLE, EMPTY, DraftTree
from trtspec.sequence import Sequence

CPU_MS = {1: 28.5, 2: 31.6, 3: 32.3, 4: 33.1, 6: 35.6, 8: 41.6, 12: 48.3, 16: 59.0, 24: 80.0, 32: 104.0}
"""Of a pass of one sequence, by width, measured on a CPU."""
HEAD = {1: {1: 0.002, 2: 0.0017}}
"""Of the head's passes: a further token's, and a refresh's."""
HOST_SECONDS = 0.0005
NOISE = 0.03
"""Of log seconds."""
ROOM = 31


@dataclass(frozen=True)
class Phase:
    """How right the drafters are in a part of the text."""

    lookup: float
    """Chance that a lookup's token is right where its parent is."""
    head: float
    """The same for the head's best token, on average."""
    found: float = 0.9
    """How often a lookup finds something."""
    lengths: tuple[int, int] = (2, 12)
    """Of a match, at least and at most."""


def on_cpu(batch: int = 1) -> PassCosts:
    """Of the target's passes, the larger batches nearly for nothing."""
    return PassCosts({b: {w: ms / 1000 * (1 + 0.02 * (b - 1)) for w, ms in CPU_MS.items()} for b in {1, batch}})


def additive(batch: int) -> PassCosts:
    """Of passes in which every row takes its time."""
    return PassCosts({b: {w: 0.008 + 0.02 * b * w for w in CPU_MS} for b in {1, batch}})


class Taken(NamedTuple):
    """One step."""

    tokens: int
    seconds: float
    width: int
    head_tokens: int


class World:
    """A batch of sequences that a policy decodes."""

    def __init__(self, seed: int, batch: int = 1, costs: Callable[[int], PassCosts] = on_cpu) -> None:
        self._verify, self._head = costs(batch), PassCosts(HEAD)
        self.policy = AutoPolicy(costs(batch), PassCosts(HEAD), range(1, ROOM + 2))
        self.states = [self.policy.start() for _ in range(batch)]
        self._random = np.random.default_rng(seed)
        self._wrong = -1
        self._sequence = Sequence.start(0, range(4), 8, SamplingParams(), SpeculationConfig(method="ngram-eagle"))

    def run(self, phase: Phase, steps: int) -> list[Taken]:
        """Decode."""
        return [self._step(phase) for _ in range(steps)]

    def _step(self, phase: Phase) -> Taken:
        batch = len(self.states)
        members = [Member(slot, state, self._match(phase), ROOM, True) for slot, state in enumerate(self.states)]
        step = self.policy.begin(members, batch, 1, 2)
        step.choose_head(False)
        head_trees = self._draft(step, phase)
        found = [
            candidates(self.policy, member, self._sequence, tree)
            for member, tree in zip(members, head_trees, strict=True)
        ]
        rows = step.choose_rows([each.reached[each.order] for each in found], 1)
        trees = [each.best(rows - 1) for each in found]
        chosen = [list(range(1, accepted(tree) + 2)) for tree in trees]
        width, levels = max(tree.width for tree in trees), max(tree.size for tree in head_trees)
        verify, drafting = self.verify_seconds(width), self.head_seconds(levels)
        for member, tree, head_tree, tokens in zip(members, trees, head_trees, chosen, strict=True):
            member.state.count(tree)
            self.policy.learn(member, head_tree, tokens)
        self.policy.clock(batch, width, verify, HOST_SECONDS)
        if levels:
            self.policy.clock_head(batch, 2, levels, drafting)
        return Taken(sum(map(len, chosen)), verify + drafting + HOST_SECONDS, width, levels)

    def verify_seconds(self, width: int) -> float:
        """Of a pass, as it falls."""
        return float(self._verify.seconds(len(self.states), np.array([width]))[0]) * self._luck()

    def head_seconds(self, tokens: int) -> float:
        """Of drafting chains."""
        if not tokens:
            return 0.0
        level, first = self._head.seconds(len(self.states), np.array([1, 2])).tolist()
        return float(first + level * (tokens - 1)) * self._luck()

    def _luck(self) -> float:
        return float(np.exp(NOISE * self._random.standard_normal()))

    def _match(self, phase: Phase) -> Match | None:
        if self._random.random() >= phase.found:
            return None
        length = int(self._random.integers(phase.lengths[0], phase.lengths[1] + 1))
        return Match(self._chain(self._random.random(ROOM) < phase.lookup), length)

    def _draft(self, step: AutoStep, phase: Phase) -> list[DraftTree]:
        """Chains as long as the step wants them; the head knows how sure it is."""
        trees = [EMPTY] * len(self.states)
        slots = [member.slot for member in step.members if member.wants_head]
        if not slots:
            return trees
        sure = self._random.beta(3 * phase.head, 3 * (1 - phase.head), (len(slots), ROOM)).clip(0.01, 0.999)
        log_probs = np.log(sure).astype(np.float32)
        hits, length = self._random.random(sure.shape) < sure, 1
        while step.go_on(slots, log_probs[:, length - 1]):
            length += 1
        for slot, right, row in zip(slots, hits, log_probs, strict=True):
            trees[slot] = DraftTree.chain(self._chain(right[:length]), EAGLE, np.cumsum(row[:length]))
        return trees

    def _chain(self, hits: np.ndarray) -> np.ndarray:
        """Tokens 1, 2, ... are right; no wrong one comes twice."""
        right = np.cumprod(hits, dtype=bool)
        self._wrong -= len(right)
        return np.where(right, np.arange(1, len(right) + 1), self._wrong + np.arange(len(right))).astype(np.int32)


def accepted(tree: DraftTree) -> int:
    """Draft tokens on the path of the tokens 1, 2, ..."""
    row = count = 0
    for child, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True), start=1):
        if parent == row and token == count + 1:
            row, count = child, count + 1
    return count


def speed(steps: Iterable[Taken]) -> float:
    """Tokens by second."""
    steps = list(steps)
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def plain_speed(world: World) -> float:
    """Of steps without drafts."""
    batch = len(world.states)
    return batch / (float(world._verify.seconds(batch, np.array([1]))[0]) + HOST_SECONDS)


def best_fixed(world: World, phase: Phase, sizes: Seq[int] = (0, 1, 2, 3, 4, 5, 7, 9, 11, 15, 23, 31)) -> float:
    """Tokens by second of the best fixed choice for a phase: lookups, the head, either behind the other, or both.

    As many steps are imagined as there are tokens of each drafter; all sequences of a batch do the same.
    """
    batch = len(world.states)
    widths = world._verify.seconds(batch, np.arange(1, 2 * ROOM + 2)) + HOST_SECONDS
    level, first = world._head.seconds(batch, np.array([1, 2])).tolist()
    best = 0.0
    for lookups in sizes:
        for heads in range(9):
            drafting = first + level * (heads - 1) if heads else 0.0
            looked, headed = reach(phase.lookup, lookups), reach(phase.head, heads)
            both = 1 - (1 - padded(looked)) * (1 - padded(headed))
            # A batch is as wide as its widest tree.
            some = 1 - (1 - phase.found) ** batch if lookups else 0.0
            tokens = phase.found * both.sum() + (1 - phase.found) * headed.sum()
            seconds = some * widths[lookups + heads] + (1 - some) * widths[heads] + drafting
            best = max(best, batch * (1 + tokens) / seconds)
            # The head where nothing is found.
            if batch == 1:
                tokens = phase.found * looked.sum() + (1 - phase.found) * headed.sum()
                seconds = phase.found * widths[lookups] + (1 - phase.found) * (widths[heads] + drafting)
                best = max(best, (1 + tokens) / seconds)
    return float(best)


def reach(rate: float, size: int) -> np.ndarray:
    """Chances that a chain's tokens are reached and right."""
    return np.cumprod(np.full(size, rate))


def padded(chances: np.ndarray) -> np.ndarray:
    return np.pad(chances, (0, ROOM - len(chances)))
