"""Fields that tuning leaves out under a method do nothing there: sessions with a draft head draft the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from checkpoint.heads import make_e1
from head_targets import save_head_target

import trtspec
from trtspec.bench.tune_space import Space
from trtspec.draft.policy import AutoPolicy

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SAMPLING = trtspec.SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9] * 4, [17, 3, 60, 3, 17, 3, 61, 3, 17, 3], list(range(3, 20))]
OTHER: dict[str, Any] = {
    "merge": "union",
    "ngram_min": 1,
    "ngram_max": 3,
    "ngram_tokens": 2,
    "ngram_occurrence": "latest",
    "ngram_branches": 3,
    "hybrid_ngram_min": 1,
    "eagle_tokens": 7,
    "eagle_depth": 1,
    "tree_nodes": 4,
}
"""A value of each field that is far from its default; eagle_topk acts wherever there is a head."""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trtspec.Session]:
    directory = tmp_path_factory.mktemp("acting")
    save_head_target(directory / "target")
    make_e1(directory / "head")
    options = {"max_seq_len": 96, "max_batch_size": 1, "max_draft_tokens": 16}
    trtspec.build(directory / "target", directory / "engine", directory / "head", **options)
    with trtspec.Session.open(directory / "engine") as opened:
        yield opened


def drafted(session: trtspec.Session, settings: trtspec.SpeculationConfig) -> list[tuple[int, ...]]:
    """What each prompt's drafts amounted to, by a policy that has learned nothing yet."""
    session._drafters.policy = None
    found = session.generate(PROMPTS, SAMPLING, settings)
    return [(each.stats.steps, each.stats.draft_tokens, each.stats.accepted_tokens) for each in found]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "none"},
        {"method": "ngram"},
        {"method": "eagle"},
        {"method": "eagle", "eagle_topk": 3},
        {"merge": "exclusive"},
        {"merge": "exclusive", "eagle_topk": 3},
        {"merge": "union"},
        {"merge": "union", "eagle_topk": 3},
        {"merge": "auto"},
        {"merge": "auto", "eagle_topk": 3},
    ],
    ids=str,
)
def test_what_is_left_out_does_nothing(
    session: trtspec.Session, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Decisions must not depend on how long passes take here.
    monkeypatch.setattr(AutoPolicy, "clock", lambda *_: None)
    monkeypatch.setattr(AutoPolicy, "clock_head", lambda *_: None)
    made = trtspec.SpeculationConfig(**{"method": "ngram-eagle", **settings})
    space = Space(session.methods, session.limits.max_draft_tokens)
    acting = space.acting(made)
    left_out = [field.name for field in fields(made) if field.name not in {*acting, "method"}]
    expected = drafted(session, made)
    assert left_out
    for name in left_out:
        if name != "eagle_topk":
            assert drafted(session, replace(made, **{name: OTHER[name]})) == expected, name
