"""The metrics of scripted runs, counted by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.decode.accept import accept
from trtspec.decode.detokenize import TextStream
from trtspec.decode.generation import Generation
from trtspec.decode.stats import STAGES, Stats
from trtspec.draft.tree import EAGLE, EMPTY, NGRAM, DraftTree
from trtspec.sequence import LENGTH, STOP, Sequence

EOS = 2
Step = tuple[DraftTree, list[int]]
"""A draft tree, and the target's token after each of its rows."""


class Numbers:
    """Decodes token 7 to "<7>"."""

    def decode(self, ids: Seq[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{token}>" for token in ids if token != EOS)


def chain(*tokens: int) -> DraftTree:
    return DraftTree.chain(np.array(tokens, dtype=np.int32), NGRAM)


PLAIN: Step = (EMPTY, [11])
# Accepted 12, 13, bonus 99; 15 matches behind the rejected 14.
HALF: Step = (chain(12, 13, 14, 15), [12, 13, 99, 15, 0])
# root -> 20 -> 23 and root -> 21 -> 22: 21 and 22 accepted, bonus 30; 23 matches as well. Both drafters proposed 22.
MIXED: Step = (
    DraftTree(
        np.array([20, 21, 22, 23], dtype=np.int32),
        np.array([0, 0, 2, 1], dtype=np.int32),
        np.array([NGRAM, EAGLE, NGRAM | EAGLE, NGRAM], dtype=np.int8),
    ),
    [21, 23, 22, 30, 0],
)
# All accepted, but the user receives 40, 41 and the end of the sequence.
ENDING: Step = (chain(40, 41, EOS, 42, 43), [40, 41, EOS, 42, 43, 44])


# The draft's acceptance vector is [1, 0, 1, 0]: 12 accepted, 13 rejected, 14 right behind it, bonus 99.
VECTOR: Step = (chain(12, 13, 14, 15), [12, 99, 14, 77, 0])
# EAGLE's alone: all four accepted, bonus 24.
WHOLE: Step = (DraftTree.chain(np.array([20, 21, 22, 23], dtype=np.int32), EAGLE), [20, 21, 22, 23, 24])
# The target agrees with all four, but the second is the end of the sequence.
CUT: Step = (chain(40, EOS, 41, 42), [40, EOS, 41, 42, 43])


def start(sampling: SamplingParams | None = None, first: int = 10) -> Generation:
    """A generation that has its first token, which prefill yields."""
    sampling = sampling or SamplingParams(max_new_tokens=100)
    sequence = Sequence.start(0, [1, 5, 6], 64, sampling, SpeculationConfig())
    sequence.slot, sequence.cached = 0, 3
    generation = Generation(sequence, TextStream(Numbers(), sampling.stop), frozenset({EOS}))
    generation.extend([first])
    return generation


def play(generation: Generation, steps: list[Step]) -> Generation:
    for tree, target_tokens in steps:
        generation.commit(tree, accept(tree, target_tokens))
    return generation


def test_the_first_token_is_not_counted() -> None:
    metrics = start().stats.metrics()
    assert (metrics["steps"], metrics["emitted_tokens"], metrics["accepted_tokens"]) == (0, 0, 0)


def test_a_run_by_hand() -> None:
    generation = play(start(), [PLAIN, HALF, MIXED, ENDING])
    assert generation.take()[1] == [10, 11, 12, 13, 99, 21, 22, 30, 40, 41, EOS]
    assert generation.sequence.finish_reason == STOP
    generation.stats.stage_seconds.update(ngram=0.020, eagle=0.005, merge=0.001, verify=3.0)
    metrics = generation.stats.metrics()
    assert {name: metrics[name] for name in ("steps", "drafts", "draft_tokens", "accepted_tokens")} == {
        "steps": 4,
        "drafts": 3,
        "draft_tokens": 4 + 4 + 5,
        "accepted_tokens": 2 + 2 + 3,
    }
    assert metrics["emitted_tokens"] == 1 + 3 + 3 + 3
    assert metrics["acceptance_length"] == pytest.approx(10 / 4)
    assert metrics["acceptance_length_per_draft"] == pytest.approx(1 + 7 / 3)
    assert metrics["draft_acceptance_rate"] == pytest.approx(7 / 13)
    assert metrics["match_rate"] == pytest.approx((3 + 3 + 5) / 13)
    assert metrics["system_efficiency"] == pytest.approx(10 / (1 + 5 + 3 + 6))
    assert metrics["acceptance_per_position"] == pytest.approx([1, 1, 1 / 3])
    assert metrics["draft_ms_per_token"] == pytest.approx(26 / 13)
    assert metrics["by_source"] == {
        "ngram": {"drafts": 3, "draft_tokens": 4 + 3 + 5, "accepted_tokens": 2 + 1 + 3},
        "eagle": {"drafts": 1, "draft_tokens": 2, "accepted_tokens": 2},
    }
    assert metrics["stage_ms"] == pytest.approx(
        {**dict.fromkeys(STAGES, 0.0), "ngram": 20.0, "eagle": 5.0, "merge": 1.0, "verify": 3000.0}
    )


def test_acceptance_by_position_of_each_drafter() -> None:
    by_source = play(start(), [PLAIN, HALF, MIXED, ENDING]).stats.acceptance_by_source()
    # Of MIXED's two accepted tokens lookup proposed the second one only.
    assert by_source == {"ngram": pytest.approx([2 / 3, 1, 1 / 3]), "eagle": [1, 1]}
    assert Stats().acceptance_by_source() == {"ngram": [], "eagle": []}
    # EAGLE proposed only the first of the three accepted tokens.
    tree = DraftTree(np.array([20, 21, 22]), np.array([0, 1, 2]), np.array([NGRAM | EAGLE, NGRAM, NGRAM]))
    assert play(start(), [(tree, [20, 21, 22, 23])]).stats.acceptance_by_source() == {"ngram": [1, 1, 1], "eagle": [1]}


def test_end_of_sequence_inside_the_accepted_draft() -> None:
    # vllm#56101: two draft tokens, the end of the sequence, two more and a bonus token must count 3.
    metrics = play(start(), [ENDING]).stats.metrics()
    assert metrics["acceptance_length"] == 3
    assert (metrics["accepted_tokens"], metrics["emitted_tokens"]) == (3, 3)
    assert metrics["acceptance_per_position"] == [1, 1, 1]


def test_the_example_in_the_documentation() -> None:
    # docs/metrics.md works these four steps through: one without a draft, then three with four draft tokens each.
    generation = play(start(), [PLAIN, VECTOR, WHOLE, CUT])
    assert generation.take()[1] == [10, 11, 12, 99, 20, 21, 22, 23, 24, 40, EOS]
    metrics = generation.stats.metrics()
    counts = ("steps", "drafts", "draft_tokens", "accepted_tokens", "emitted_tokens")
    assert [metrics[name] for name in counts] == [4, 3, 12, 7, 10]
    assert metrics["acceptance_length"] == pytest.approx(2.5)
    assert metrics["acceptance_length_per_draft"] == pytest.approx(3.33, abs=0.005)
    assert metrics["draft_acceptance_rate"] == pytest.approx(0.583, abs=0.0005)
    assert metrics["match_rate"] == pytest.approx(0.833, abs=0.0005)
    assert metrics["system_efficiency"] == pytest.approx(0.625)
    assert metrics["acceptance_per_position"] == pytest.approx([1, 2 / 3, 1 / 3, 1 / 3])
    assert metrics["by_source"] == {
        "ngram": {"drafts": 2, "draft_tokens": 8, "accepted_tokens": 3},
        "eagle": {"drafts": 1, "draft_tokens": 4, "accepted_tokens": 4},
    }


def test_right_tokens_behind_a_rejection() -> None:
    metrics = play(start(), [VECTOR]).stats.metrics()
    assert (metrics["accepted_tokens"], metrics["emitted_tokens"]) == (1, 2)
    assert (metrics["draft_acceptance_rate"], metrics["match_rate"]) == (1 / 4, 2 / 4)
    assert metrics["acceptance_per_position"] == [1]
    assert metrics["system_efficiency"] == 2 / 5


def test_steps_without_a_draft_count_in_lengths_and_efficiency_only() -> None:
    drafting = play(start(), [VECTOR]).stats.metrics()
    mixed = play(start(), [PLAIN, VECTOR, PLAIN]).stats.metrics()
    assert (mixed["steps"], mixed["drafts"], mixed["emitted_tokens"]) == (3, 1, 4)
    assert mixed["acceptance_length"] == pytest.approx(4 / 3)
    assert mixed["system_efficiency"] == pytest.approx(4 / 7)
    for name in ("acceptance_length_per_draft", "draft_acceptance_rate", "match_rate", "acceptance_per_position"):
        assert mixed[name] == drafting[name], name
    assert mixed["by_source"] == drafting["by_source"]


def test_stop_string_inside_the_accepted_draft() -> None:
    # vllm#47616: token ids, counts and text end together.
    generation = play(start(SamplingParams(stop=("<13>",))), [HALF])
    assert generation.take() == ("<10><12>", [10, 12, 13])
    assert generation.sequence.finish_reason == STOP
    metrics = generation.stats.metrics()
    assert (metrics["accepted_tokens"], metrics["emitted_tokens"], metrics["draft_tokens"]) == (2, 2, 4)


@pytest.mark.parametrize(("max_new_tokens", "emitted", "accepted"), [(2, 1, 1), (3, 2, 2), (4, 3, 2)])
def test_length_limit_inside_a_step(max_new_tokens: int, emitted: int, accepted: int) -> None:
    generation = play(start(SamplingParams(max_new_tokens=max_new_tokens)), [HALF])
    metrics = generation.stats.metrics()
    assert generation.sequence.finish_reason == LENGTH
    assert generation.sequence.generated == max_new_tokens
    assert (metrics["emitted_tokens"], metrics["accepted_tokens"]) == (emitted, accepted)


def test_a_draft_of_which_nothing_is_accepted() -> None:
    metrics = play(start(), [(chain(12, 13), [50, 13, 60])]).stats.metrics()
    assert metrics["acceptance_length"] == 1
    assert metrics["acceptance_length_per_draft"] == 1
    assert metrics["draft_acceptance_rate"] == 0
    assert metrics["match_rate"] == 0.5
    assert metrics["system_efficiency"] == pytest.approx(1 / 3)
    assert metrics["acceptance_per_position"] == []


def test_system_efficiency_is_1_when_the_main_path_is_accepted() -> None:
    metrics = play(start(), [PLAIN, (chain(12, 13), [12, 13, 14]), MIXED]).stats.metrics()
    assert metrics["system_efficiency"] == 1
    assert metrics["acceptance_length"] == pytest.approx(7 / 3)


def test_ratios_without_a_denominator_are_0() -> None:
    metrics = Stats().metrics()
    assert metrics["acceptance_per_position"] == []
    ratios = ("acceptance_length", "acceptance_length_per_draft", "draft_acceptance_rate", "match_rate")
    assert [metrics[name] for name in (*ratios, "system_efficiency", "draft_ms_per_token")] == [0.0] * 6
    plain = play(start(), [PLAIN, PLAIN]).stats.metrics()
    assert plain["acceptance_length"] == plain["system_efficiency"] == 1
    assert (plain["drafts"], plain["acceptance_length_per_draft"], plain["match_rate"]) == (0, 0, 0)


@pytest.mark.parametrize("split", [0, 1, 2, 3, 4])
def test_add_gives_the_metrics_of_the_whole(split: int) -> None:
    steps = [PLAIN, HALF, MIXED, ENDING]
    parts = [play(start(), steps[:split]).stats, play(start(), steps[split:]).stats]
    for part, seconds in zip(parts, (0.25, 0.5), strict=True):
        part.stage_seconds.update(ngram=seconds, host=2 * seconds)
    whole = play(start(), steps).stats
    whole.stage_seconds.update(ngram=0.75, host=1.5)
    for first, second in itertools.permutations(parts):
        total = Stats()
        total.add(first)
        total.add(second)
        assert total.metrics() == whole.metrics()
        assert total.acceptance_by_source() == whole.acceptance_by_source()
    assert parts[1].steps == 4 - split
