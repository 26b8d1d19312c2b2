"""What is proposed in a step: each sequence of a batch by its own method, the head's passes in common."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from trtspec.config import EXCLUSIVE, HEAD_WIDTH
from trtspec.draft.candidates import candidates, with_tail
from trtspec.draft.eagle import EagleDrafter, HeadAsk
from trtspec.draft.head_state import HeadState
from trtspec.draft.lookup import Lookup
from trtspec.draft.ngram import LookupAsk, Match, MergeAsk, tree_of
from trtspec.draft.policy import AutoPolicy, AutoState, AutoStep, Member
from trtspec.draft.tree import EMPTY, DraftTree
from trtspec.sampling import Sampler
from trtspec.sequence import Sequence

Lap = Callable[[str], None]


class Ask(NamedTuple):
    """One sequence of the batch, in slot order."""

    sequence: Sequence
    head: HeadState | None
    """None where its method has no head."""
    auto: AutoState | None
    """None where its method is not the `auto` merge."""
    sampler: Sampler | None
    """What the target's tokens are chosen with; None: greedily."""
    room: int
    """Draft tokens at most."""


@dataclass
class Proposal:
    """What is verified, and what the policy wants to learn from."""

    trees: list[DraftTree]
    head_trees: Seq[DraftTree]
    """What the head proposed, verified or not; empty where it did not draft."""
    step: AutoStep | None
    """None where no sequence is of the `auto` merge."""


class StepTimes(NamedTuple):
    """Seconds of one step."""

    verify: float
    """From the draft to the choice of the target's tokens."""
    eagle: float
    """From the lookup's end to the head's draft."""
    other: float
    width: int
    """Rows of one sequence in the verification, padding included."""


class Drafters:
    """Those that an engine directory supports."""

    def __init__(self, ngram: Lookup, eagle: EagleDrafter | None = None) -> None:
        self.ngram = ngram
        self.eagle = eagle
        self.policy: AutoPolicy | None = None
        """Set before the first sequence of the `auto` merge."""

    @property
    def head_seconds(self) -> float:
        """Seconds spent inside the draft head's engines so far."""
        return self.eagle.head.engine_seconds if self.eagle else 0.0

    def propose(self, asks: Seq[Ask], lap: Lap) -> Proposal:
        """Draft trees for a batch.

        Args:
            lap: called with the name of each stage that ends.
        """
        lookup_asks = [lookup_ask(ask) for ask in asks]
        matches = self.ngram.lookups(lookup_asks)
        ngram_trees = [
            EMPTY if ask.auto or asked.merged else self._looked_up(ask, found)
            for ask, asked, found in zip(asks, lookup_asks, matches, strict=True)
        ]
        lap("ngram")
        step = self._weigh(asks, matches)
        lap("merge")
        head_trees = self._run_head(asks, matches, step, lap)
        trees = [
            EMPTY if ask.auto else proposed if proposed.size else looked_up
            for ask, looked_up, proposed in zip(asks, ngram_trees, head_trees, strict=True)
        ]
        merge_asks = [
            MergeAsk(slot, ask.sequence, asked.num_tokens, matches[slot], head_trees[slot], ask.room)
            for slot, (ask, asked) in enumerate(zip(asks, lookup_asks, strict=True))
            if asked.merged
        ]
        if merge_asks:
            self._merge(merge_asks, trees)
        if step is not None:
            self._choose(step, asks, trees, head_trees)
        lap("merge")
        return Proposal(trees, head_trees, step)

    def _choose(self, step: AutoStep, asks: Seq[Ask], trees: list[DraftTree], head_trees: Seq[DraftTree]) -> None:
        """Set the auto sequences' trees."""
        assert self.policy is not None
        found = [
            candidates(self.policy, member, asks[member.slot].sequence, head_trees[member.slot])
            for member in step.members
        ]
        rows = step.choose_rows([each.reached[each.order] for each in found], max(tree.width for tree in trees))
        for member, each in zip(step.members, found, strict=True):
            trees[member.slot] = each.best(min(rows - 1, member.room))

    def learn(self, proposal: Proposal, chosen: Seq[Seq[int]], times: StepTimes) -> None:
        """Tell the policy what came of a proposal.

        Args:
            chosen: the tokens that the target chose for each sequence, the bonus token included.
        """
        step = proposal.step
        if step is None or self.policy is None:
            return
        for member in step.members:
            member.state.count(proposal.trees[member.slot])
            self.policy.learn(member, proposal.head_trees[member.slot], chosen[member.slot])
        batch, levels = len(proposal.trees), max(tree.depth for tree in proposal.head_trees)
        self.policy.clock(batch, times.width, times.verify, times.other)
        if levels and len(step.members) == batch and all(tree.is_chain for tree in proposal.head_trees):
            self.policy.clock_head(batch, step.refresh_width, levels, times.eagle)

    def _looked_up(self, ask: Ask, found: Seq[Match]) -> DraftTree:
        """The tree of a sequence for which only a lookup drafts in this step."""
        return tree_of(found, ask.room)

    def _merge(self, merge_asks: Seq[MergeAsk], trees: list[DraftTree]) -> None:
        """Set the trees of the sequences that verify both drafts."""
        for ask, tree in zip(merge_asks, self.ngram.merges(merge_asks), strict=True):
            by_head = ask.head_tree
            trees[ask.slot] = with_tail(tree, ask.sequence, by_head, ask.room) if by_head.size else tree

    def _weigh(self, asks: Seq[Ask], matches: Seq[Seq[Match]]) -> AutoStep | None:
        """The auto sequences' step, the head's part decided."""
        members = [
            Member(slot, ask.auto, found[0] if found else None, ask.room, bool(ask.head and not ask.head.stopped))
            for slot, (ask, found) in enumerate(zip(asks, matches, strict=True))
            if ask.auto is not None
        ]
        if not members:
            return None
        assert self.policy is not None
        width = 1 + max((_usual_size(ask) for ask in asks if ask.auto is None), default=0)
        step = self.policy.begin(members, len(asks), width, _refresh_width(asks))
        step.choose_head(any(map(_runs_head, asks, matches)))
        return step

    def _run_head(self, asks: Seq[Ask], matches: Seq[Seq[Match]], step: AutoStep | None, lap: Lap) -> Seq[DraftTree]:
        wanted = {member.slot for member in step.members if member.wants_head} if step else set()
        wanted.update(slot for slot, runs in enumerate(map(_runs_head, asks, matches)) if runs)
        if self.eagle is None or not wanted:
            return [EMPTY] * len(asks)
        head_trees = self.eagle.draft(
            [
                HeadAsk(ask.sequence, ask.head, ask.room if slot in wanted else 0, ask.sampler, ask.auto is not None)
                for slot, ask in enumerate(asks)
            ],
            step,
        )
        lap("eagle")
        return head_trees


def lookup_ask(ask: Ask) -> LookupAsk:
    """Of `auto` for as long a continuation as there is room for: it cuts them itself."""
    options = ask.sequence.speculation
    if options.method == "ngram-eagle":
        if ask.auto is not None:
            return LookupAsk(ask.sequence, ask.room)
        return LookupAsk(ask.sequence, min(options.ngram_tokens, ask.room), options.merge != EXCLUSIVE)
    return LookupAsk(ask.sequence, min(options.ngram_tokens, ask.room) if options.method == "ngram" else 0)


def _refresh_width(asks: Seq[Ask]) -> int:
    """Rows that the head's first pass has if it runs."""
    return min(max((ask.head.queued for ask in asks if ask.head), default=1), HEAD_WIDTH) or 1


def _runs_head(ask: Ask, found: Seq[Match]) -> bool:
    """Whether a sequence has the head draft without the policy being asked: not where `exclusive` has a good match."""
    options = ask.sequence.speculation
    if ask.auto is not None or ask.head is None or ask.head.stopped or not ask.room:
        return False
    exclusive = options.method == "ngram-eagle" and options.merge == EXCLUSIVE
    return not (exclusive and bool(found) and found[0].length >= options.hybrid_ngram_min)


def _usual_size(ask: Ask) -> int:
    """Draft tokens that a sequence of a fixed method usually has."""
    options = ask.sequence.speculation
    sizes = {
        "none": 0,
        "ngram": options.ngram_tokens,
        "eagle": options.eagle_tokens if options.eagle_topk == 1 else options.tree_nodes,
    }
    return min(sizes.get(options.method or "none", max(sizes.values())), ask.room)
