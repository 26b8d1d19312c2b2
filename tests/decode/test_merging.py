"""The merges of ngram-eagle in batches: when the head runs, what is verified together, and what `auto` decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import pytest
from toy import Request, ToyTarget, reference
from toy_cases import new_head
from toy_checks import FicklePolicy
from toy_drafters import OracleDrafter, TreeDrafter
from toy_server import Server, outcome

from trtspec.config import MERGES, Limits, SamplingParams, SpeculationConfig
from trtspec.draft.candidates import with_tail
from trtspec.draft.merge import union
from trtspec.draft.proposer import Ask, Lap, Proposal
from trtspec.draft.tree import EAGLE, EMPTY, NGRAM, DraftTree
from trtspec.engine.base import Buckets
from trtspec.sequence import Sequence

CAPACITY = 160
PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)
BOTH = NGRAM | EAGLE
Step = Callable[[Seq[Ask], Proposal, int], None]


def hybrid(merge: str, **options: int) -> SpeculationConfig:
    return SpeculationConfig(
        method="ngram-eagle", merge=merge, **{"hybrid_ngram_min": 3, "eagle_tokens": 4, "ngram_tokens": 6, **options}
    )


def new_server(target: ToyTarget, slots: int = 3, draft_tokens: int = 12, seed: int = 0, **options: int) -> Server:
    limits = Limits(max_seq_len=CAPACITY, max_batch_size=slots, max_draft_tokens=draft_tokens)
    policy = FicklePolicy(seed, limits, target.buckets)
    return Server(target, limits, head=new_head(target, **options), policy=policy)  # type: ignore[arg-type]


def watch(server: Server, on_step: Step) -> None:
    """Have `on_step` called with each step's asks, their proposal, and the number of passes that the head made."""
    propose, head = server.drafters.propose, server.head
    assert head is not None

    def watched(asks: Seq[Ask], lap: Lap) -> Proposal:
        before = len(head.passes)
        proposal = propose(asks, lap)
        on_step(asks, proposal, len(head.passes) - before)
        return proposal

    server.drafters.propose = watched  # type: ignore[method-assign]


def finish(server: Server, batch: Seq[Request]) -> None:
    """Serve requests, whose outputs must be the target's own."""
    generations = [server.add(index, request) for index, request in enumerate(batch)]
    server.run()
    for generation, request in zip(generations, batch, strict=True):
        assert outcome(generation, server) == reference(server.target, request, CAPACITY)


def repeats(tokens: list[int], count: int) -> bool:
    """Whether the last `count` tokens occur earlier, with a token behind them."""
    return any(tokens[at : at + count] == tokens[-count:] for at in range(len(tokens) - count))


def test_exclusive_runs_the_head_only_where_a_sequence_lacks_a_match() -> None:
    """And only for those that lack one; drafts after a run of lookups are those of a head that never paused.

    vllm#14649: drafts behind skipped steps. The server compares each draft with one from all committed tokens anew.
    """
    target = ToyTarget(surprise=12)
    server = new_server(target)
    steps: Counter[bool] = Counter()
    pauses: Counter[int] = Counter()
    ended: list[int] = []

    def check(asks: Seq[Ask], proposal: Proposal, passes: int) -> None:
        lacking = [ask.room > 0 and not repeats(ask.sequence.history.tolist(), 3) for ask in asks]
        assert (passes > 0) == any(lacking)
        assert [tree.size > 0 for tree in proposal.head_trees] == lacking
        steps[passes > 0] += 1
        for ask, lacks in zip(asks, lacking, strict=True):
            if lacks:
                ended.append(pauses.pop(ask.sequence.index, 0))
            else:
                pauses[ask.sequence.index] += 1

    watch(server, check)
    finish(server, [Request((*PROMPT, n), SamplingParams(max_new_tokens=140), hybrid("exclusive")) for n in range(6)])
    assert min(steps[True], steps[False]) > 10
    assert sum(pause > 2 for pause in ended) > 5


def test_union_verifies_both_drafts_in_one_pass() -> None:
    """And what a lookup finds behind the head's path, where the lookup on the history alone found nothing."""
    tails = accepted_tails = 0

    def check(asks: Seq[Ask], proposal: Proposal, passes: int) -> None:
        nonlocal tails, accepted_tails
        [ask], [tree], [by_head] = asks, proposal.trees, proposal.head_trees
        size = by_head.size
        if tree.is_chain and tree.sources.tolist() == [EAGLE] * size + [NGRAM] * max(tree.size - size, 1):
            future = OracleDrafter(target, size + 1).draft(ask.sequence, ask.room).tokens.tolist()
            tails += 1
            accepted_tails += tree.tokens[: size + 1].tolist() == future

    for salt in range(4):
        target = ToyTarget(salt=salt, surprise=8)
        server = new_server(target, slots=1)
        watch(server, check)
        request = Request(PROMPT, SamplingParams(max_new_tokens=140), hybrid("union", ngram_min=3))
        generation = server.add(0, request)
        server.run()
        assert outcome(generation, server) == reference(target, request, CAPACITY)
        # One prefill, then one pass of the target for each step.
        assert len(target.widths) == 1 + generation.stats.steps
        assert server.drafters.kinds["union", BOTH] > 5
        assert all(counts.accepted_tokens > 10 for counts in generation.stats.by_source.values())
    assert tails > 10
    assert accepted_tails > 2


def test_a_lookup_behind_the_drafted_path_extends_it() -> None:
    # vllm#46977: n-gram extends the tail. Nothing matches 9, 1, 2; behind the head's 3, 4 the text goes on with 5, 8.
    options = hybrid("union", ngram_min=3)
    sequence = Sequence.start(0, [1, 2, 3, 4, 5, 8, 9, 1, 2], 40, SamplingParams(), options)
    by_head = DraftTree.chain(np.array([3, 4], dtype=np.int32), EAGLE)
    tree = with_tail(union(EMPTY, by_head, 9), sequence, by_head, 9)
    assert tree.tokens.tolist() == [3, 4, 5, 8, 9, 1, 2, 3]
    assert tree.is_chain
    assert tree.sources.tolist() == [EAGLE] * 2 + [NGRAM] * 6
    assert with_tail(by_head, sequence, by_head, 3).tokens.tolist() == [3, 4, 5]
    assert with_tail(by_head, sequence, by_head, 2) is by_head
    strict = hybrid("union", hybrid_ngram_min=5)
    assert with_tail(by_head, Sequence.start(0, sequence.history, 40, SamplingParams(), strict), by_head, 9) is by_head


def test_auto_takes_each_of_its_decisions() -> None:
    """Steps that are plain, of one drafter and of both, and steps in which what the head drafted isn't verified."""
    counts: Counter[int] = Counter()
    unused = 0

    def check(asks: Seq[Ask], proposal: Proposal, passes: int) -> None:
        nonlocal unused
        for tree, by_head in zip(proposal.trees, proposal.head_trees, strict=True):
            unused += by_head.size > 0 and not any(tree.sources & EAGLE)

    for seed in range(14):
        target = ToyTarget(salt=seed, surprise=6)
        server = new_server(target, seed=seed)
        watch(server, check)
        batch = [
            Request((*PROMPT, n), SamplingParams(max_new_tokens=40), hybrid("auto", eagle_topk=1 + n // 4))
            for n in range(5)
        ]
        generations = [server.add(index, request) for index, request in enumerate(batch)]
        server.run()
        served: Counter[int] = Counter()
        for generation, request in zip(generations, batch, strict=True):
            assert outcome(generation, server) == reference(target, request, CAPACITY)
            state = generation.auto
            assert state is not None
            steps = {0: state.plain_steps, NGRAM: state.ngram_steps, EAGLE: state.eagle_steps, BOTH: state.both_steps}
            assert sum(steps.values()) == generation.stats.steps
            served.update(steps)
        assert +served == {used: count for (_, used), count in server.drafters.kinds.items()}
        counts += served
    assert min(counts[kind] for kind in (0, NGRAM, EAGLE, BOTH)) > 15
    assert unused > 5


@pytest.mark.parametrize(
    "others", [SpeculationConfig(method="ngram", ngram_branches=3, ngram_tokens=2), hybrid("union", ngram_branches=3)]
)
def test_auto_beside_a_tree_wider_than_its_own_room(others: SpeculationConfig) -> None:
    """Nothing is left to decide then: rows up to the neighbour's width cost nothing."""
    target = ToyTarget()
    server = new_server(target, draft_tokens=20)
    server.drafters.ngram = TreeDrafter(target, seed=3)
    wider = 0

    def check(asks: Seq[Ask], proposal: Proposal, passes: int) -> None:
        nonlocal wider
        rooms = [ask.room for ask in asks if ask.auto is not None]
        wider += bool(rooms) and max(tree.size for tree in proposal.trees) > max(rooms)

    watch(server, check)
    finish(
        server,
        [
            Request(PROMPT, SamplingParams(max_new_tokens=60), others),
            *(Request((*PROMPT, n), SamplingParams(max_new_tokens=3 + n), hybrid("auto")) for n in range(6)),
        ],
    )
    assert wider > 2


def test_auto_with_room_for_very_long_continuations() -> None:
    target = ToyTarget(surprise=10**9)
    limits = Limits(max_seq_len=900, max_batch_size=1, max_draft_tokens=400)
    server = Server(target, limits, head=new_head(target), policy=FicklePolicy(1, limits, target.buckets))
    request = Request(PROMPT, SamplingParams(max_new_tokens=850), hybrid("auto", ngram_tokens=400))
    generation = server.add(0, request)
    server.run()
    assert outcome(generation, server) == reference(target, request, 900)
    assert max(target.widths) > 257


@pytest.mark.parametrize("merge", MERGES)
def test_the_head_stops_at_its_position_limit_while_lookups_go_on(merge: str) -> None:
    # vllm#48894
    target = ToyTarget(surprise=8)
    server = new_server(target, slots=2, max_positions=40)
    behind: Counter[int] = Counter()

    def check(asks: Seq[Ask], proposal: Proposal, passes: int) -> None:
        for ask, tree, by_head in zip(asks, proposal.trees, proposal.head_trees, strict=True):
            if ask.head is None or not ask.head.stopped:
                continue
            assert by_head is EMPTY
            assert not any(tree.sources & EAGLE)
            behind[tree.size] += 1

    watch(server, check)
    finish(server, [Request((*PROMPT, n), SamplingParams(max_new_tokens=100), hybrid(merge)) for n in range(2)])
    assert server.eagle is not None
    assert sum(tree.size > 0 for tree in server.eagle.trees) > 3
    assert sum(n for size, n in behind.items() if size) > 10


METHODS = [
    SpeculationConfig(method="none"),
    SpeculationConfig(method="ngram"),
    SpeculationConfig(method="eagle"),
    SpeculationConfig(method="eagle", eagle_topk=3),
    *map(hybrid, MERGES),
]


def test_an_empty_draft_is_legal() -> None:
    # TensorRT-LLM#2684: no room for drafts at all, with each method.
    target = ToyTarget()
    server = new_server(target, draft_tokens=0)
    finish(server, [Request(PROMPT, SamplingParams(max_new_tokens=12), options) for options in METHODS])
    assert server.head is not None
    assert server.head.passes == []
    assert set(target.widths) == {len(PROMPT), 1}


def test_drafts_stay_with_their_sequence_when_only_some_rows_draft() -> None:
    # vllm#29779: of each three rows, the first and the last draft, by the lookup or by the head.
    target = ToyTarget(surprise=12)
    server = new_server(target, slots=3)
    mixed = 0

    def check(asks: Seq[Ask], proposal: Proposal, passes: int) -> None:
        nonlocal mixed
        mixed += [tree.size > 0 for tree in proposal.trees] == [True, False, True]

    watch(server, check)
    none = SpeculationConfig(method="none")
    limit = SamplingParams(max_new_tokens=80)
    finish(server, [Request(PROMPT, limit, options) for options in (hybrid("exclusive"), none, hybrid("union"))])
    assert mixed > 8


def test_fillers_are_never_counted_as_drafted() -> None:
    # vllm#44054: passes are padded to a bucket's width; what pads them is no draft.
    target = ToyTarget(buckets=Buckets((16,), 16, CAPACITY + 16))
    server = new_server(target, slots=8)
    sizes: Counter[int] = Counter()

    def check(asks: Seq[Ask], proposal: Proposal, passes: int) -> None:
        for ask, tree in zip(asks, proposal.trees, strict=True):
            sizes[ask.sequence.index] += tree.size

    watch(server, check)
    generations = [
        server.add(index, Request(PROMPT, SamplingParams(max_new_tokens=20), options))
        for index, options in enumerate(METHODS)
    ]
    server.run()
    assert set(target.widths) == {len(PROMPT), 16}
    for index, generation in enumerate(generations):
        assert generation.stats.draft_tokens == sizes[index]
        by_source = [counts.draft_tokens for counts in generation.stats.by_source.values()]
        assert max(by_source) <= sizes[index] <= sum(by_source)
    assert sizes[0] == 0 < min(sizes[index] for index in range(2, len(METHODS)))


def test_a_draft_vocabularys_ids_are_the_targets() -> None:
    """vllm#5203: the head's rows are not the target's ids, and what is verified are always the latter.

    The toy target refuses ids outside its vocabulary; heads with a map that names such are refused when they are read.
    """
    target = ToyTarget(vocab=9, surprise=8)
    server = new_server(target, stride=2)
    assert server.head is not None
    drafted: set[int] = set()

    def check(asks: Seq[Ask], proposal: Proposal, passes: int) -> None:
        drafted.update(*(tree.tokens.tolist() for tree in proposal.head_trees))

    watch(server, check)
    finish(server, [Request(PROMPT, SamplingParams(max_new_tokens=50), hybrid(merge)) for merge in MERGES])
    assert len(drafted) > 2
    assert drafted <= set(server.head.ids.tolist()) == {8, 6, 4, 2, 0}
    server.drafters.ngram = TreeDrafter(target, seed=0, skill=0, favourites=[9])
    server.add(9, Request(PROMPT, SamplingParams(max_new_tokens=50), SpeculationConfig(method="ngram")))
    with pytest.raises(AssertionError, match="no tokens of the vocabulary"):
        server.run()
