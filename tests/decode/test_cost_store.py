"""Costs in an engine directory: kept, shared by machines, and never in the way."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.heads import make_e1
from head_targets import save_head_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trtspec
from trtspec import session as module
from trtspec.decode.cost_store import COSTS_FILE, Costs, load_costs, machine_key, store_costs
from trtspec.draft.costs import PassCosts
from trtspec.engine_dir import EngineDir
from trtspec.session import Session

VERIFY, HEAD = PassCosts({1: {1: 0.03, 8: 0.04}, 4: {1: 0.05, 8: 0.1}}), PassCosts({1: {1: 0.002}})
AUTO = trtspec.SpeculationConfig(method="ngram-eagle")
PLAIN = trtspec.SpeculationConfig(method="none")
SAMPLING = trtspec.SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [17, 3, 60, 44], [33]]


def same(found: Costs | None, expected: Costs) -> bool:
    if found is None or (found.head is None) != (expected.head is None):
        return False
    pairs = [(found.verify, expected.verify)]
    if found.head is not None and expected.head is not None:
        pairs.append((found.head, expected.head))
    widths = np.arange(1, 40)
    return all(np.allclose(one.seconds(3, widths), other.seconds(3, widths)) for one, other in pairs)


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


@pytest.mark.parametrize("head", [HEAD, None], ids=["head", "no-head"])
def test_what_is_stored_comes_back(tmp_path: Path, head: PassCosts | None) -> None:
    assert load_costs(tmp_path, "here") is None
    store_costs(tmp_path, "here", Costs(VERIFY, head))
    assert same(load_costs(tmp_path, "here"), Costs(VERIFY, head))
    assert names(tmp_path) == [COSTS_FILE]


def test_machines_share_a_file(tmp_path: Path) -> None:
    store_costs(tmp_path, "here", Costs(VERIFY, HEAD))
    store_costs(tmp_path, "there", Costs(HEAD, None))
    store_costs(tmp_path, "here", Costs(VERIFY, None))
    assert same(load_costs(tmp_path, "here"), Costs(VERIFY, None))
    assert same(load_costs(tmp_path, "there"), Costs(HEAD, None))
    assert load_costs(tmp_path, "elsewhere") is None


def test_keys_tell_machines_apart() -> None:
    cpu = torch.device("cpu")
    assert machine_key("onnxruntime", cpu) == machine_key("onnxruntime", cpu)
    assert machine_key("onnxruntime", cpu) != machine_key("tensorrt", cpu)
    assert "threads" in machine_key("onnxruntime", cpu)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '"here"',
        '{"here": null}',
        '{"here": {"verify": {}}}',
        '{"here": {"verify": {"1": {"1": 0.1}}}}',
        '{"here": {"verify": {"1": {"1": -1}}, "head": null}}',
        '{"here": {"verify": [1], "head": null}}',
        '{"here": {"verify": {"1": {"1": 1e999}}, "head": null}}',
        '{"here": {"verify": {"1": {"1": NaN}}, "head": null}}',
        b"\xff\xfe\x00",
    ],
    ids=repr,
)
def test_a_file_that_makes_no_sense_is_written_anew(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / COSTS_FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert load_costs(tmp_path, "here") is None
    store_costs(tmp_path, "here", Costs(VERIFY, HEAD))
    assert same(load_costs(tmp_path, "here"), Costs(VERIFY, HEAD))
    assert names(tmp_path) == [COSTS_FILE]


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["verify", "head", "1", "2"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(json_values, st.dictionaries(st.just("here"), json_values)))
def test_no_json_is_in_the_way(tmp_path: Path, data: Any) -> None:
    (tmp_path / COSTS_FILE).write_text(json.dumps(data), encoding="utf-8")
    found = load_costs(tmp_path, "here")
    assert found is None or np.isfinite(found.verify.seconds(2, np.arange(1, 9))).all()
    store_costs(tmp_path, "here", Costs(VERIFY, HEAD))
    assert same(load_costs(tmp_path, "here"), Costs(VERIFY, HEAD))


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("read-only")

    store_costs(tmp_path / "missing", "here", Costs(VERIFY, HEAD))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", refuse)
        store_costs(tmp_path, "here", Costs(VERIFY, HEAD))
    assert names(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        store_costs(tmp_path, "here", Costs(VERIFY, HEAD))
    assert names(tmp_path) == []


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    store_costs(tmp_path, "here", Costs(VERIFY, HEAD))
    done = threading.Event()

    def write() -> None:
        for _ in range(100):
            store_costs(tmp_path, "here", Costs(VERIFY, HEAD))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert load_costs(tmp_path, "here") is not None
    writer.join()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory with a head, in which no session has used `auto`."""
    directory = tmp_path_factory.mktemp("costs")
    save_head_target(directory / "target")
    make_e1(directory / "head")
    limits = {"max_seq_len": 64, "max_batch_size": 3, "max_draft_tokens": 8}
    trtspec.build(directory / "target", directory / "engine", directory / "head", **limits)
    return directory / "engine"


def never(*_: Any) -> PassCosts:
    raise AssertionError("measured again")


def test_a_session_measures_once_for_all_that_follow(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = built / COSTS_FILE
    with Session.open(built) as session:
        expected = [each.token_ids for each in session.generate(PROMPTS, SAMPLING, PLAIN)]
        assert not file.exists()
        assert [each.token_ids for each in session.generate(PROMPTS, SAMPLING, AUTO)] == expected
        first = json.loads(file.read_text(encoding="utf-8"))
        [entry] = first.values()
        assert [*entry["verify"]] == [*entry["head"]] == ["1", "2", "3"]
    EngineDir.load(built).verify(whole=True)
    # What was learned while decoding is kept when the session closes.
    assert json.loads(file.read_text(encoding="utf-8")) != first

    monkeypatch.setattr(module, "measure_target", never)
    monkeypatch.setattr(module, "measure_head", never)
    with Session.open(built) as session:
        found = session.generate(PROMPTS, SAMPLING, AUTO)
        assert [each.token_ids for each in found] == expected
        policy = found[0].metrics["policy"]
        assert sum(policy[f"{name}_steps"] for name in ("plain", "ngram", "eagle", "both")) > 0
    assert not [name for name in names(built) if name.startswith(COSTS_FILE) and name != COSTS_FILE]


def test_measuring_beside_a_stream_changes_nothing_of_it(built: Path) -> None:
    (built / COSTS_FILE).unlink(missing_ok=True)
    eagle = trtspec.SpeculationConfig(method="eagle")
    with Session.open(built) as session:
        expected = [each.token_ids for each in session.generate(PROMPTS, SAMPLING, PLAIN)]
        stream = session.stream(PROMPTS[0], SAMPLING, eagle)
        tokens = [token for _ in range(2) for token in next(stream).token_ids]
        [beside] = session.generate(PROMPTS[1:2], SAMPLING, AUTO)
        tokens += [token for event in stream for token in event.token_ids]
        assert [tokens, beside.token_ids] == expected[:2]
