"""What is tried: settings that differ in something that acts, whatever the method."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from trtspec.bench.tune_space import Space
from trtspec.config import SpeculationConfig

SPACE = Space(("none", "ngram", "eagle", "ngram-eagle"), 32)
LOOKUP = {"ngram_tokens", "ngram_min", "ngram_max", "ngram_branches", "ngram_occurrence"}
BOTH = {"method", "merge", "eagle_topk"}
TREE = {"eagle_topk", "eagle_depth", "tree_nodes"}
CASES: list[tuple[dict[str, Any], set[str]]] = [
    ({"method": "none"}, {"method"}),
    ({"method": "ngram"}, {"method", *LOOKUP}),
    ({"method": "eagle"}, {"method", "eagle_topk", "eagle_tokens"}),
    ({"method": "eagle", "eagle_topk": 4}, {"method", *TREE}),
    ({"merge": "exclusive"}, {*BOTH, *LOOKUP, "eagle_tokens", "hybrid_ngram_min"}),
    ({"merge": "exclusive", "eagle_topk": 4}, {*BOTH, *LOOKUP, *TREE, "hybrid_ngram_min"}),
    ({"merge": "union"}, {*BOTH, *LOOKUP, "eagle_tokens", "hybrid_ngram_min"}),
    ({"merge": "union", "eagle_topk": 4}, {*BOTH, *LOOKUP, *TREE}),
    (
        {"merge": "auto"},
        {*BOTH, "ngram_min", "ngram_max", "ngram_occurrence", "hybrid_ngram_min", "ngram_tokens"},
    ),
    ({"merge": "auto", "eagle_topk": 4}, {*BOTH, *TREE, "ngram_min", "ngram_max", "ngram_occurrence"}),
]
every_case = pytest.mark.parametrize(
    ("fields", "acting"), CASES, ids=lambda value: str(value if isinstance(value, dict) else sorted(value))[:40]
)


def made(fields: dict[str, Any]) -> SpeculationConfig:
    """Settings; ngram-eagle's where no method is said."""
    return SpeculationConfig(**{"method": "ngram-eagle", **fields})


@every_case
def test_what_acts(fields: dict[str, Any], acting: set[str]) -> None:
    assert set(SPACE.acting(made(fields))) == acting


@every_case
def test_every_step_changes_only_what_acts(fields: dict[str, Any], acting: set[str]) -> None:
    settings = made(fields)
    steps = SPACE.steps(settings)
    assert steps[0] == "method"
    assert len(set(steps)) == len(steps)
    for step in steps:
        found = SPACE.alternatives(step, settings)
        keys = [SPACE.key(each) for each in found]
        assert found, step
        assert len(set(keys)) == len(keys)
        assert SPACE.key(settings) not in keys
        for each in found:
            changed = {name for name, value in asdict(each).items() if value != getattr(settings, name)}
            allowed = {"method": {"method", "merge"}, "eagle shape": {*TREE, "eagle_tokens"}}.get(step, {step})
            assert changed <= allowed
            assert changed & set(SPACE.acting(each))


def test_methods_and_merges_are_all_tried() -> None:
    found = SPACE.alternatives("method", SpeculationConfig(method="ngram"))
    assert [SPACE.label(each) for each in found] == [
        "none",
        "eagle",
        "ngram-eagle:auto",
        "ngram-eagle:exclusive",
        "ngram-eagle:union",
    ]
    plain = Space(("none", "ngram"), 32)
    assert [each.method for each in plain.alternatives("method", SpeculationConfig(method="ngram"))] == ["none"]


def test_what_the_directory_cuts_is_the_same() -> None:
    narrow, settings = Space(SPACE.methods, 8), SpeculationConfig(method="ngram")
    assert [each.ngram_tokens for each in narrow.alternatives("ngram_tokens", settings)] == [3, 5]
    assert narrow.key(settings) == narrow.key(replace(settings, ngram_tokens=24))
    assert SPACE.key(settings) != SPACE.key(replace(settings, ngram_tokens=24))


def test_values_that_do_not_fit_the_others_are_left_out() -> None:
    found = SPACE.alternatives("ngram_min", SpeculationConfig(method="ngram", ngram_min=1, ngram_max=3))
    assert [each.ngram_min for each in found] == [2, 3]
    deep = SpeculationConfig(method="eagle", eagle_topk=2, eagle_depth=40)
    assert [each.eagle_topk for each in SPACE.alternatives("eagle_topk", deep)] == []


def test_under_auto_the_only_chain_keeps_its_length() -> None:
    """The length doesn't act there, but does where --merge says something else."""
    tree = SpeculationConfig(method="ngram-eagle", eagle_topk=4, eagle_tokens=5)
    chains = [each for each in SPACE.alternatives("eagle shape", tree) if each.eagle_topk == 1]
    assert [each.eagle_tokens for each in chains] == [5]


def test_labels() -> None:
    assert SPACE.label(SpeculationConfig(method="ngram")) == "ngram"
    assert SPACE.label(SpeculationConfig(method="ngram", ngram_max=8, eagle_tokens=7)) == "ngram ngram_max=8"
    both = SpeculationConfig(method="ngram-eagle", merge="union", ngram_tokens=5, eagle_tokens=2)
    assert SPACE.label(both) == "ngram-eagle:union ngram_tokens=5 eagle_tokens=2"
