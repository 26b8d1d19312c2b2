"""Random requests, and the targets, heads and policies that serve them."""

from __future__ import annotations

from typing import NamedTuple

from draft.toy_head import ToyHead
from hypothesis import strategies as st
from toy import Request, ToyTarget
from toy_checks import FicklePolicy

from trtspec.config import AUTO, MERGES, Limits, SamplingParams, SpeculationConfig
from trtspec.engine.base import Buckets

CAPACITY = 48


class Setting(NamedTuple):
    """What requests are served with."""

    target: ToyTarget
    head: ToyHead
    limits: Limits
    seed: int

    def policy(self) -> FicklePolicy:
        """A policy that nobody has used."""
        return FicklePolicy(self.seed, self.limits, self.target.buckets)


def new_head(target: ToyTarget, *, stride: int = 1, max_positions: int = 10_000, bucketed: bool = False) -> ToyHead:
    """A head that mostly finds the target's token likeliest, where its vocabulary has it."""
    buckets = Buckets((1, 2, 4, 8, 32), 16, CAPACITY + 128) if bucketed else None
    guess, salt = target.likely_token, target.salt
    return ToyHead(target.vocab, salt=salt, stride=stride, max_positions=max_positions, guess=guess, buckets=buckets)


@st.composite
def settings_of_a_server(draw: st.DrawFn) -> Setting:
    """Targets with exact logits that often tie, heads that may end early or know half of the tokens."""
    limits = Limits(
        max_seq_len=CAPACITY,
        max_batch_size=draw(st.integers(1, 4)),
        max_draft_tokens=draw(st.integers(0, 12)),
        prefill_chunk=draw(st.integers(1, 8)),
    )
    salt, bucketed = draw(st.integers(0, 10**6)), draw(st.booleans())
    target = ToyTarget(
        vocab=8,
        salt=salt,
        surprise=draw(st.sampled_from([3, 8, 30])),
        buckets=Buckets((1, 3, limits.max_width), 16, limits.cache_rows) if bucketed else None,
        levels=draw(st.sampled_from([0, 2, 5])),
        peak=draw(st.sampled_from([0, 1, 4])),
    )
    head = new_head(
        target,
        stride=draw(st.sampled_from([1, 1, 2])),
        max_positions=draw(st.sampled_from([10_000, 10_000, 30, 9])),
        bucketed=draw(st.booleans()),
    )
    return Setting(target, head, limits, draw(st.integers(0, 10**6)))


# Edges of top-p and min-p are no sums of equal probabilities, so that float32 has no say in them.
samplings = st.builds(
    SamplingParams,
    max_new_tokens=st.sampled_from([24, 1, 17, 5, 40, 11, 2]),
    stop=st.lists(st.text("abé. ", min_size=2, max_size=4), max_size=1).map(tuple),
    ignore_eos=st.booleans(),
    temperature=st.sampled_from([0, 0, 0.3, 0.8, 1, 2.5]),
    top_k=st.sampled_from([0, 0, 0, 1, 3]),
    top_p=st.sampled_from([1, 1, 0.83, 0.61]),
    min_p=st.sampled_from([0, 0, 0.07, 0.3]),
    repetition_penalty=st.sampled_from([1, 1, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0, 0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0, 0, 0.35, -0.2]),
    seed=st.integers(0, 2**64 - 1),
)
ngrams = {
    "ngram_min": st.integers(1, 2),
    "ngram_max": st.integers(2, 5),
    "ngram_tokens": st.integers(1, 8),
    "ngram_occurrence": st.sampled_from(["earliest", "latest"]),
    "ngram_branches": st.sampled_from([1, 1, 2, 3]),
}
heads = {
    "eagle_tokens": st.integers(1, 6),
    "eagle_topk": st.sampled_from([1, 1, 2, 3]),
    "eagle_depth": st.integers(0, 3),
    "tree_nodes": st.integers(1, 9),
}
speculations = st.one_of(
    st.just(SpeculationConfig(method="none")),
    st.builds(SpeculationConfig, method=st.just("ngram"), **ngrams),
    st.builds(SpeculationConfig, method=st.just("eagle"), **heads),
    *(
        st.builds(
            SpeculationConfig,
            method=st.just("ngram-eagle"),
            merge=st.just(merge),
            hybrid_ngram_min=st.integers(1, 4),
            **ngrams,
            **heads,
        )
        for merge in (*MERGES, AUTO)
    ),
)
prompts = st.lists(st.integers(0, 4), min_size=1, max_size=40).map(tuple)
requests = st.builds(Request, prompts, samplings, speculations, st.frozensets(st.integers(0, 7), max_size=1))
batches = st.integers(1, 7).flatmap(lambda count: st.lists(requests, min_size=count, max_size=count))
