"""Drafts of real heads of every format, against an oracle that computes each path anew in float64."""

from __future__ import annotations

import pytest
import torch
from draft.real_heads import OracleDrafts, RealHead, Shelf
from graph.head_graphs import CASES, SAME_GRAPH, features
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trtspec.config import Limits, SamplingParams, SpeculationConfig
from trtspec.draft.eagle import EagleDrafter, HeadAsk
from trtspec.draft.head_state import HeadState
from trtspec.draft.tree import DraftTree, check_tree
from trtspec.sequence import Sequence

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LIMITS = Limits(max_seq_len=60, max_batch_size=3)
NARROW_MARGIN = 1e-4
# One head for each set of equal graphs; the maps of ids differ within them.
NAMES = [*sorted(set(CASES).difference(*SAME_GRAPH.values())), "e2_token_map", "e2_token_map_16_rows", "e3_embedding"]
some_heads = pytest.mark.parametrize("name", ["e1", "e2_token_map", "e3", "e4_norm_output", "e4_two_layers"])


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(LIMITS, tmp_path_factory)


class Writer:
    """A sequence of random tokens with features such as a target could give."""

    def __init__(self, head: RealHead, length: int, options: SpeculationConfig, drafter: EagleDrafter) -> None:
        generator = torch.Generator().manual_seed(length)
        vocab = head.graphs.config.vocab_size
        self.graphs, self.state = head.graphs, drafter.start()
        self.tokens = torch.randint(0, vocab, (LIMITS.max_seq_len,), generator=generator).tolist()
        self.features = features(head.graphs, LIMITS.max_seq_len, seed=length)
        self.sequence = Sequence.start(0, self.tokens[:length], LIMITS.max_seq_len, SamplingParams(), options)
        self.sequence.length = 0
        self.commit(length)

    def commit(self, count: int) -> None:
        """Commit the next tokens; the last is the root."""
        start = max(self.sequence.length - 1, 0)
        self.sequence.tokens[: len(self.tokens)] = self.tokens
        self.sequence.length += count
        self.sequence.cached = self.sequence.length - 1
        if self.sequence.cached > start:
            self.state.push(self.features[start : self.sequence.cached])

    def oracle(self) -> OracleDrafts:
        """What should be drafted now."""
        cached = self.sequence.cached
        return OracleDrafts(self.graphs, self.tokens[: cached + 1], self.features[:cached])


def chain_of(tokens: int) -> SpeculationConfig:
    return SpeculationConfig(method="eagle", eagle_tokens=tokens)


def tree_of(top_k: int, depth: int, nodes: int) -> SpeculationConfig:
    return SpeculationConfig(method="eagle", eagle_topk=top_k, eagle_depth=depth, tree_nodes=nodes)


def draft(drafter: EagleDrafter, writers: list[Writer], room: int = 32) -> list[DraftTree]:
    states: list[HeadState | None] = [writer.state for writer in writers]
    return drafter.draft([HeadAsk(writer.sequence, state, room) for writer, state in zip(writers, states, strict=True)])


def right_draft(writer: Writer) -> tuple[list[int], list[int]]:
    """The oracle's tokens and parents; an example in which rounding could decide is dropped."""
    oracle, options = writer.oracle(), writer.sequence.speculation
    if options.eagle_topk == 1:
        tokens = oracle.chain(options.eagle_tokens)
        result = tokens, list(range(len(tokens)))
    else:
        result = oracle.tree(options.eagle_topk, options.eagle_depth, options.tree_nodes)
    assume(oracle.margin > NARROW_MARGIN)
    return result


def check(tree: DraftTree, right: tuple[list[int], list[int]]) -> None:
    check_tree(tree)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == right


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_the_oracles(shelf: Shelf, name: str) -> None:
    head = shelf[name]
    runner, cache = head.load()
    compared = 0
    for length in (2, 3, 5, 8):
        for options in (chain_of(4), tree_of(3, 2, 8)):
            writer = Writer(head, length, options, drafter := EagleDrafter(runner, cache))
            oracle = writer.oracle()
            chains = oracle.chain(4) if options.eagle_topk == 1 else None
            right = oracle.tree(3, 2, 8) if chains is None else (chains, list(range(4)))
            [tree] = draft(drafter, [writer])
            if oracle.margin > NARROW_MARGIN:
                check(tree, right)
                compared += 1
    assert compared > 4
    runner.close()


speculations = st.one_of(
    st.builds(chain_of, st.integers(1, 4)), st.builds(tree_of, st.integers(2, 4), st.integers(0, 2), st.integers(1, 9))
)


@some_heads
@settings(max_examples=12, deadline=None)
@given(
    members=st.lists(st.tuples(st.integers(2, 45), speculations), min_size=1, max_size=3),
    commits=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=3),
)
def test_batches_in_several_steps(
    shelf: Shelf, name: str, members: list[tuple[int, SpeculationConfig]], commits: list[tuple[int, bool]]
) -> None:
    """Lengths and options mixed; some steps draft nothing, so that queues differ."""
    head = shelf[name]
    runner, cache = head.load()
    drafter = EagleDrafter(runner, cache)
    writers = [Writer(head, length, options, drafter) for length, options in members]
    for count, drafts in commits:
        if drafts:
            draft(drafter, writers)
        for writer in writers:
            writer.commit(count)
    right = [right_draft(writer) for writer in writers]
    for tree, expected in zip(draft(drafter, writers), right, strict=True):
        check(tree, expected)
    runner.close()
