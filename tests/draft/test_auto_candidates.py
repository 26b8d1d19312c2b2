"""The candidates of the `auto` merge: no estimate may put a node before its parent."""

from __future__ import annotations

import random

import numpy as np
from draft.trees import token_paths
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.draft.candidates import candidates
from trtspec.draft.costs import PassCosts
from trtspec.draft.ngram import NgramDrafter
from trtspec.draft.policy import AutoPolicy, Member
from trtspec.draft.tree import EAGLE, DraftTree, check_tree
from trtspec.sequence import Sequence

ROOM = 12


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 3), st.integers(2, 5))
def test_any_number_of_the_best_candidates_is_a_tree(
    seed: int, learned: bool, hybrid_ngram_min: int, ngram_max: int
) -> None:
    """Also where a lookup behind the head's path goes the way of the first one for a while."""
    chooser, numbers = random.Random(seed), np.random.default_rng(seed)
    options = SpeculationConfig(
        method="ngram-eagle", ngram_min=1, ngram_max=ngram_max, hybrid_ngram_min=hybrid_ngram_min
    )
    costs = PassCosts({1: {1: 1.0}})
    policy = AutoPolicy(costs, costs, [1] * (ROOM + 1))
    if learned:
        for rates in (policy.ngram_rates._table.rates, policy.head_rates._table.rates):
            rates[:] = numbers.uniform(0.01, 0.99, rates.shape)
    tokens = chooser.choices(range(3), k=chooser.randint(4, 30))
    sequence = Sequence.start(0, tokens, 60, SamplingParams(), options)
    found = NgramDrafter().matches(sequence, ROOM)
    member = Member(0, policy.start(), found[0] if found else None, ROOM, has_head=True)
    member.state.heat = chooser.random()
    policy.begin([member], 1, 1, 1)
    chain = chooser.choices(range(3), k=chooser.randint(1, 4))
    if found and chooser.random() < 0.7:
        chain = [*found[0].continuation.tolist(), *chain][: len(chain)]
    scores = np.cumsum(-numbers.uniform(0, 1, len(chain))).astype(np.float32)
    head_tree = DraftTree.chain(np.array(chain, dtype=np.int32), EAGLE, scores)

    all_of_them = candidates(policy, member, sequence, head_tree)
    reached = np.concatenate(([1.0], all_of_them.reached))
    assert (reached[1:] <= reached[all_of_them.tree.parents]).all()
    assert (all_of_them.reached > 0).all()
    paths = set(token_paths(all_of_them.tree))
    for count in range(all_of_them.tree.size + 1):
        best = all_of_them.best(count)
        check_tree(best)
        assert best.size == count
        assert set(token_paths(best)) <= paths
