"""Names of methods, and draft length sweeps."""

from __future__ import annotations

import pytest

from trtspec.bench.methods import check_lengths, draft_length, parse_methods, sweep
from trtspec.config import SpeculationConfig
from trtspec.errors import ConfigError

BASE = SpeculationConfig(ngram_max=7)


def names(methods: str, lengths: list[int]) -> list[str]:
    return [each.name for each in sweep(parse_methods(methods, BASE), lengths)]


def test_names_give_configurations() -> None:
    plain, chain, union = parse_methods("none, ngram@5, ngram-eagle:union", BASE)
    assert (plain.name, plain.speculation.method) == ("none", "none")
    assert (chain.name, chain.speculation.method, chain.speculation.ngram_tokens) == ("ngram@5", "ngram", 5)
    assert (union.speculation.method, union.speculation.merge) == ("ngram-eagle", "union")
    assert {each.speculation.ngram_max for each in (plain, chain, union)} == {7}
    assert draft_length("ngram-eagle:union@12") == 12
    assert draft_length("hf-lookup-10") is None


def test_sweep_varies_what_has_a_draft_length() -> None:
    assert names("none,ngram,eagle,ngram-eagle,ngram-eagle:union", [2, 5]) == [
        *("ngram@2", "ngram@5", "eagle@2", "eagle@5"),
        *("ngram-eagle:union@2", "ngram-eagle:union@5"),
    ]
    [both] = sweep(parse_methods("ngram-eagle:exclusive", BASE), [4])
    assert (both.speculation.ngram_tokens, both.speculation.eagle_tokens) == (4, 4)
    assert (both.speculation.merge, both.speculation.ngram_max) == ("exclusive", 7)


def test_sweep_leaves_out_what_is_there() -> None:
    assert names("ngram,ngram@5", [5, 6]) == ["ngram@6"]


@pytest.mark.parametrize("methods", ["none", "ngram-eagle", "none,ngram-eagle:auto", "ngram@4"])
def test_sweep_without_a_draft_length_is_refused(methods: str) -> None:
    with pytest.raises(ConfigError, match=r"--sweep-tokens: none of .* has a draft length"):
        names(methods, [2])


def test_trees_have_no_draft_length() -> None:
    tree = SpeculationConfig(eagle_topk=4)
    assert [each.name for each in sweep(parse_methods("ngram,eagle", tree), [2])] == ["ngram@2"]
    with pytest.raises(ConfigError, match="only ngram, EAGLE chains"):
        parse_methods("eagle@2", tree)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("none@2", "only ngram, EAGLE chains, and the merges exclusive and union of both take a draft length"),
        ("ngram-eagle@2", "take a draft length"),
        ("ngram@", "take a draft length"),
        ("ngram@two", "take a draft length"),
        ("ngram@0", "ngram_tokens is 0"),
        ("ngram:union", "only ngram-eagle has merges"),
        ("ngram,,none", "give each method once"),
    ],
)
def test_wrong_names(methods: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_methods(methods, BASE)


def test_a_length_beyond_the_directory_is_refused() -> None:
    chosen = parse_methods("ngram,ngram@33", BASE)
    check_lengths(chosen, 33)
    with pytest.raises(ConfigError, match=r"ngram@33: .* verifies 32 draft tokens at most; build it with"):
        check_lengths(chosen, 32)
