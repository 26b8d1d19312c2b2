"""The drafting of a step under watch, and a policy whose decisions vary."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

import numpy as np
from draft.toy_head import ToyHead, committed_rows, expected_chain, expected_draft
from draft.trees import token_paths
from toy import ToyTarget

from trtspec.config import AUTO, EXCLUSIVE, HEAD_METHODS, HEAD_WIDTH, Limits
from trtspec.draft.costs import PassCosts
from trtspec.draft.eagle import OPEN_TOKENS, EagleDrafter, HeadAsk
from trtspec.draft.expansion import ChainRule
from trtspec.draft.lookup import Lookup
from trtspec.draft.ngram import Match, NgramDrafter, tree_of
from trtspec.draft.policy import AutoPolicy, AutoStep, Member
from trtspec.draft.proposer import Ask, Drafters, Lap, Proposal, lookup_ask
from trtspec.draft.tree import EAGLE, EMPTY, NGRAM, DraftTree, check_tree
from trtspec.engine.base import Buckets
from trtspec.engine.draft_head import RowNoise
from trtspec.engine.kv_cache import KVCache
from trtspec.sequence import Sequence


class CheckedEagle(EagleDrafter):
    """Every draft must be the one that official EAGLE code would make of the committed tokens and the noise."""

    def __init__(self, target: ToyTarget, head: ToyHead, cache: KVCache) -> None:
        super().__init__(head, cache)
        self.target, self.toy = target, head
        self.trees: list[DraftTree] = []

    def draft(self, asks: Seq[HeadAsk], rule: ChainRule | None = None) -> list[DraftTree]:
        trees = super().draft(asks, rule)
        for ask, tree in zip(asks, trees, strict=True):
            check_tree(tree)
            if ask.state is None or ask.state.stopped or not ask.room:
                assert tree is EMPTY
            elif ask.sequence.length + OPEN_TOKENS < ask.state.max_rows:
                self._check(ask, tree)
            self.trees.append(tree)
        return trees

    def _check(self, ask: HeadAsk, tree: DraftTree) -> None:
        path, options = ask.sequence.history.tolist(), ask.sequence.speculation
        features = [self.target.feature(path[: i + 1]) for i in range(len(path) - 1)]
        rows = committed_rows(self.toy, path, features)

        def noise(level: int) -> RowNoise | None:
            if ask.sequence.sampling.temperature == 0 or ask.sequence.sampling.top_k == 1:
                return None
            assert ask.sampler is not None
            return RowNoise(ask.sequence.sampling.temperature, ask.sampler.draft_noise(len(path) + level))

        if ask.open and min(options.eagle_topk, len(self.toy.ids)) == 1:
            right = expected_chain(self.toy, rows, min(OPEN_TOKENS, ask.room), noise)
            assert 1 <= tree.size <= right.size
        else:
            right = expected_draft(self.toy, options, rows, ask.room, noise)
            assert tree.size == right.size
        assert tree.tokens.tolist() == right.tokens[: tree.size].tolist()
        assert tree.parents.tolist() == right.parents[: tree.size].tolist()
        if tree.scores is not None:
            assert right.scores is not None
            assert tree.scores.tolist() == right.scores[: tree.size].tolist()


@runtime_checkable
class DraftsTrees(Protocol):
    """A lookup for tests that proposes what no matches are."""

    def draft(self, sequence: Sequence, room: int) -> DraftTree: ...


def contents(matches: Seq[Match]) -> list[tuple[list[int], int]]:
    """Continuations and lengths."""
    return [(match.continuation.tolist(), match.length) for match in matches]


class CheckedDrafters(Drafters):
    """Each sequence must be given what its method and merge say."""

    def __init__(self, ngram: Lookup, eagle: CheckedEagle | None = None) -> None:
        super().__init__(ngram, eagle)
        self.kinds: Counter[tuple[str, int]] = Counter()
        """Proposals by merge and by the flags of the drafters in them; other methods by their name."""
        self.drafted: Counter[int] = Counter()
        """Draft tokens by number of the sequence."""
        self._found: list[Seq[Match]] = []

    def propose(self, asks: Seq[Ask], lap: Lap) -> Proposal:
        passes = self.eagle.head.passes if isinstance(self.eagle, CheckedEagle) else []  # type: ignore[attr-defined]
        passes_before = len(passes)
        proposal = super().propose(asks, lap)
        drafted = zip(asks, self._found, proposal.trees, proposal.head_trees, strict=True)
        for ask, found, tree, by_head in drafted:
            self._check(ask, found, tree, by_head)
            options = ask.sequence.speculation
            used = int(np.bitwise_or.reduce(tree.sources)) if tree.size else 0
            self.kinds[options.merge if options.method == "ngram-eagle" else options.method or "", used] += 1
            self.drafted[ask.sequence.index] += tree.size
        assert (len(passes) > passes_before) == any(tree.size for tree in proposal.head_trees)
        return proposal

    def _weigh(self, asks: Seq[Ask], matches: Seq[Seq[Match]]) -> AutoStep | None:
        self._found = list(matches)
        if not isinstance(self.ngram, NgramDrafter):
            lookup_asks = [lookup_ask(ask) for ask in asks]
            for slot, found in enumerate(NgramDrafter().lookups(lookup_asks)):
                # An engine that merges too doesn't tell the matches. The host's search may end at fewer branches.
                if lookup_asks[slot].merged and not matches[slot]:
                    self._found[slot] = found
                assert contents(self._found[slot])[: len(found)] == contents(found)
                assert len(self._found[slot]) <= asks[slot].sequence.speculation.ngram_branches
        return super()._weigh(asks, matches)

    def _looked_up(self, ask: Ask, found: Seq[Match]) -> DraftTree:
        if ask.sequence.speculation.method == "ngram" and ask.room and isinstance(self.ngram, DraftsTrees):
            return self.ngram.draft(ask.sequence, ask.room)
        return super()._looked_up(ask, found)

    def _check(self, ask: Ask, found: Seq[Match], tree: DraftTree, by_head: DraftTree) -> None:
        options = ask.sequence.speculation
        check_tree(tree)
        assert tree.size <= ask.room
        can_draft = ask.head is not None and not ask.head.stopped and ask.room > 0
        assert can_draft or not by_head.size
        if options.method in ("none", "eagle"):
            assert tree is by_head
            assert (tree.size > 0) == (can_draft and options.method == "eagle")
        if options.method not in HEAD_METHODS:
            assert not by_head.size
        if options.method != "ngram-eagle":
            return
        if options.merge == EXCLUSIVE:
            qualified = bool(found) and found[0].length >= options.hybrid_ngram_min
            assert (by_head.size > 0) == (can_draft and not qualified)
            right = by_head if by_head.size else tree_of(found, ask.room)
            assert (token_paths(tree), tree.sources.tolist()) == (token_paths(right), right.sources.tolist())
        else:
            self._check_union(ask, found, tree, by_head)

    def _check_union(self, ask: Ask, found: Seq[Match], tree: DraftTree, by_head: DraftTree) -> None:
        """No path is anybody's invention, each is put down to those who proposed it, and none is left out for nothing.

        The tail is what only a lookup proposes, behind the head's whole chain.
        """
        options = ask.sequence.speculation
        first = found[:1] if options.merge == AUTO else found
        looked_up, proposed = set(token_paths(tree_of(first, ask.room))), set(token_paths(by_head))
        paths = dict(zip(token_paths(tree), tree.sources.tolist(), strict=True))
        chain = tuple(by_head.tokens.tolist())
        for path, sources in paths.items():
            behind = by_head.size > 0 and by_head.is_chain and path[: len(chain)] == chain and len(path) > len(chain)
            flags = NGRAM * (path in looked_up) | EAGLE * (path in proposed)
            assert sources == flags or (sources == NGRAM and behind)
        if ask.auto is None:
            assert (by_head.size > 0) == (ask.head is not None and not ask.head.stopped and ask.room > 0)
            if len(both := looked_up | proposed) <= ask.room:
                assert both <= paths.keys()
            else:
                assert tree.size == ask.room


class FicklePolicy(AutoPolicy):
    """Passes cost something else in each step, and drafters are trusted differently: every decision occurs, also
    absurd ones, and none depends on the machine's speed."""

    def __init__(self, seed: int, limits: Limits, buckets: Buckets, spread: float = 1.0) -> None:
        """`spread`: by how many powers of ten a width's time may lie off the others."""
        self._random = random.Random(seed)
        self._spread = spread
        self._numbers = np.random.default_rng(seed)
        self._widest = limits.max_width
        widths = [buckets.width(rows) for rows in range(1, limits.max_width + 1)]
        super().__init__(self._costs(self._widest), self._costs(HEAD_WIDTH), widths)

    def begin(self, members: Seq[Member], batch: int, width: int, refresh_width: int) -> AutoStep:
        self.verify, self.head = self._costs(self._widest), self._costs(HEAD_WIDTH)
        for rates in (self.ngram_rates._table.rates, self.head_rates._table.rates):
            rates[:] = self._numbers.uniform(0.02, 0.99, rates.shape)
        return super().begin(members, batch, width, refresh_width)

    def clock(self, batch: int, width: int, verify_seconds: float, host_seconds: float) -> None:
        super().clock(batch, width, 10 ** self._random.uniform(-4, 0), 10 ** self._random.uniform(-4, 0))

    def _costs(self, widest: int) -> PassCosts:
        widths, scale = sorted({1, 2, min(widest, 4), widest}), self._random.uniform(-3, 0)

        def seconds() -> float:
            return float(10 ** (scale + self._random.uniform(-self._spread, self._spread)))

        return PassCosts({batch: {width: seconds() for width in widths} for batch in (1, 4)})
