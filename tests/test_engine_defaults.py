"""Tuned defaults in engine.json: kept as they are, checked, written in one rename, and used where nothing is asked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.engine_defaults import DefaultsOrigin, TunedDefaults, differing
from trtspec.engine_dir import EngineDir
from trtspec.errors import EngineDirError
from trtspec.session import Session

ORIGIN = DefaultsOrigin(
    dataset="chat",
    prompts=16,
    batch_size=1,
    max_new_tokens=128,
    gain=1.25,
    machine="onnxruntime, some processor, 2 threads",
    date="2026-11-30T12:00:00+00:00",
    trtspec_version="0.1.0",
)
TUNED = TunedDefaults(SpeculationConfig(method="ngram", ngram_tokens=3, ngram_max=8), ORIGIN)
PROMPT = "one two three four one two three four one two three four one two"


@pytest.fixture
def directory(tiny_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny engine directory."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "engine"))


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file's bytes and time of change, engine.json left out."""
    files = (file for file in directory.rglob("*") if file.is_file() and file.name != "engine.json")
    return {str(file.relative_to(directory)): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def sign(directory: Path, **fields: Any) -> None:
    """Set fields of engine.json, with a checksum that fits."""
    file = directory / "engine.json"
    data = {**json.loads(file.read_text(encoding="utf-8")), **fields}
    data.pop("checksum", None)
    checksum = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({**data, "checksum": checksum}), encoding="utf-8")


def changed(path: str, value: Any) -> dict[str, Any]:
    """The JSON of TUNED with another value at a path such as "origin/gain"; None removes it."""
    data = TUNED.to_json()
    *parents, key = path.split("/")
    place = data
    for parent in parents:
        place = place[parent]
    if value is None:
        del place[key]
    else:
        place[key] = value
    return data


def test_round_trip_touches_no_other_file(directory: Path) -> None:
    before, loaded = contents(directory), EngineDir.load(directory)
    assert loaded.defaults is None
    stored = loaded.store_defaults(TUNED)
    assert stored.defaults == TUNED
    found = EngineDir.load(directory)
    assert found == stored
    found.verify(whole=True)
    assert contents(directory) == before
    assert found.store_defaults(None) == loaded
    assert EngineDir.load(directory) == loaded
    assert contents(directory) == before


def test_removing_defaults_leaves_the_manifest_as_it_was(directory: Path) -> None:
    before = (directory / "engine.json").read_bytes()
    EngineDir.load(directory).store_defaults(TUNED)
    assert (directory / "engine.json").read_bytes() != before
    EngineDir.load(directory).store_defaults(None)
    assert (directory / "engine.json").read_bytes() == before


def test_only_what_differs_is_written(directory: Path) -> None:
    EngineDir.load(directory).store_defaults(TUNED)
    data = json.loads((directory / "engine.json").read_text(encoding="utf-8"))
    assert data["defaults"] == {
        "speculation": {"method": "ngram", "ngram_tokens": 3, "ngram_max": 8},
        "origin": dataclasses.asdict(ORIGIN),
    }
    assert differing(SpeculationConfig(method="none")) == {"method": "none"}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("speculation", [], "speculation is []; expected an object"),
        ("speculation", None, "defaults lacks speculation"),
        ("origin", None, "defaults lacks origin"),
        ("extra", 1, "defaults has the unknown field extra"),
        ("speculation/method", None, "speculation lacks method"),
        ("speculation/method", "eagle", "method 'eagle' is none of: none, ngram"),
        ("speculation/method", "telepathy", "method 'telepathy'"),
        ("speculation/method", ["ngram"], "method ['ngram']"),
        ("speculation/ngram_length", 3, "speculation has the unknown field ngram_length"),
        ("speculation/ngram_tokens", 0, "ngram_tokens is 0"),
        ("speculation/ngram_tokens", "three", "ngram_tokens is 'three'"),
        ("speculation/ngram_max", 1, "ngram_max 1 is less than ngram_min 2"),
        ("speculation/merge", "mix", "merge 'mix' is unknown"),
        ("speculation/merge", ["auto"], "merge ['auto'] is unknown"),
        ("origin/gain", "much", "origin.gain is 'much'; expected float"),
        ("origin/gain", -1.0, "origin.gain is -1.0; expected a number above 0"),
        ("origin/gain", float("inf"), "origin.gain is inf"),
        ("origin/prompts", True, "origin.prompts is True; expected int"),
        ("origin/batch_size", 0, "origin holds a count below 1"),
        ("origin/machine", None, "origin lacks machine"),
        ("origin/weather", "fine", "origin has the unknown field weather"),
    ],
)
def test_values_that_cannot_be_used(directory: Path, path: str, value: Any, words: str) -> None:
    bare = EngineDir.load(directory)
    sign(directory, defaults=changed(path, value))
    with pytest.raises(EngineDirError) as raised:
        EngineDir.load(directory)
    assert words in str(raised.value)
    assert f"remove them with: trtspec tune {directory} --reset" in str(raised.value)
    without = EngineDir.load(directory, with_defaults=False)
    assert without == bare
    without.store_defaults(None)
    assert EngineDir.load(directory) == bare


@pytest.mark.parametrize("value", [3, [], "ngram", True])
def test_other_json_is_no_defaults(directory: Path, value: Any) -> None:
    sign(directory, defaults=value)
    with pytest.raises(EngineDirError, match="expected an object"):
        EngineDir.load(directory)


def test_edited_defaults_are_noticed(directory: Path) -> None:
    EngineDir.load(directory).store_defaults(TUNED)
    file = directory / "engine.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"ngram_tokens": 3', '"ngram_tokens": 4'))
    with pytest.raises(EngineDirError, match="its checksum differs"):
        EngineDir.load(directory)


def test_a_directory_built_anew_meanwhile_is_left_alone(directory: Path) -> None:
    loaded = EngineDir.load(directory)
    sign(directory, trtspec_version="9.9")
    before = (directory / "engine.json").read_bytes()
    with pytest.raises(EngineDirError, match="was built anew meanwhile"):
        loaded.store_defaults(TUNED)
    assert (directory / "engine.json").read_bytes() == before


def test_defaults_stored_by_another_meanwhile_are_replaced(directory: Path) -> None:
    loaded = EngineDir.load(directory)
    loaded.store_defaults(dataclasses.replace(TUNED, origin=dataclasses.replace(ORIGIN, dataset="edit")))
    loaded.store_defaults(TUNED)
    assert EngineDir.load(directory).defaults == TUNED


def test_a_write_that_fails_leaves_the_old_manifest(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, before = EngineDir.load(directory), (directory / "engine.json").read_bytes()
    names = sorted(file.name for file in directory.iterdir())

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(EngineDirError, match="can't be written \\(No space left on device\\)"):
        loaded.store_defaults(TUNED)
    assert (directory / "engine.json").read_bytes() == before
    assert sorted(file.name for file in directory.iterdir()) == names


def test_default_speculation(directory: Path) -> None:
    loaded = EngineDir.load(directory)
    assert loaded.default_speculation == SpeculationConfig(method="ngram")
    assert loaded.store_defaults(TUNED).default_speculation == TUNED.speculation


def test_a_session_uses_them_where_nothing_is_asked(directory: Path) -> None:
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    EngineDir.load(directory).store_defaults(TUNED)
    with Session.open(directory) as session:
        assert (session.default_speculation, session.default_method) == (TUNED.speculation, "ngram")
        assert session.machine.startswith("onnxruntime, ")
        expected = session.generate([PROMPT], sampling, TUNED.speculation)[0]
        plain = session.generate([PROMPT], sampling, SpeculationConfig(method="ngram"))[0]
        found = session.generate([PROMPT], sampling)[0]
        assert found.token_ids == plain.token_ids
        assert found.stats.draft_tokens == expected.stats.draft_tokens != plain.stats.draft_tokens
        *_, last = session.stream(PROMPT, sampling)
        assert last.completion is not None
        assert last.completion.stats.draft_tokens == expected.stats.draft_tokens
        generation = session.submit(PROMPT, sampling)
        while not generation.finished:
            session.step()
        assert generation.stats.draft_tokens == expected.stats.draft_tokens


def test_a_method_alone_is_the_tuned_one(directory: Path) -> None:
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    none = TunedDefaults(SpeculationConfig(method="none"), ORIGIN)
    EngineDir.load(directory).store_defaults(none)
    with Session.open(directory) as session:
        assert session.default_method == "none"
        [found] = session.generate([PROMPT], sampling, SpeculationConfig(ngram_tokens=5))
        assert found.stats.drafts == 0
