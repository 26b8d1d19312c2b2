"""The demo target with its own EAGLE head: lossless, of use, and nothing of the target twice."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_prompts import PROMPTS
from safetensors import safe_open

import trtspec
from trtspec.bench.datasets import load_dataset
from trtspec.checkpoint.demo import packaged_head

pytestmark = pytest.mark.slow
SAMPLING = trtspec.SamplingParams(max_new_tokens=40, ignore_eos=True)
PLAIN = trtspec.SpeculationConfig(method="none")
CHAIN = trtspec.SpeculationConfig(method="eagle", eagle_tokens=3)
TREE = trtspec.SpeculationConfig(method="eagle", eagle_topk=4, eagle_depth=3, tree_nodes=15)


@pytest.fixture(scope="module")
def session(demo_dir: Path) -> Iterator[trtspec.Session]:
    with trtspec.Session.open(demo_dir) as session:
        yield session


@pytest.fixture(scope="module")
def plain(session: trtspec.Session) -> list[list[int]]:
    return [item.token_ids for item in session.generate([p.prompt for p in PROMPTS], SAMPLING, PLAIN)]


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("batch", [1, 4])
def test_drafting_changes_no_token(
    session: trtspec.Session, plain: list[list[int]], speculation: trtspec.SpeculationConfig, batch: int
) -> None:
    """Alone every eighth prompt and in batches every third one, to save time."""
    numbers = range(0, len(PROMPTS), 8 if batch == 1 else 3)
    accepted = 0
    for at in range(0, len(numbers), batch):
        group = numbers[at : at + batch]
        completions = session.generate([PROMPTS[n].prompt for n in group], SAMPLING, speculation)
        for number, completion in zip(group, completions, strict=True):
            assert completion.token_ids == plain[number], PROMPTS[number].name
            accepted += completion.stats.accepted_tokens
    assert accepted > 16


def test_the_head_is_of_use(session: trtspec.Session) -> None:
    """Figures of prompts that it wasn't trained on; see the model card for the measured ones."""
    prompts = [item.messages for item in load_dataset("chat", 8)]
    lengths = {}
    for name, speculation in (("chain", CHAIN), ("tree", TREE)):
        completions = session.generate(prompts, trtspec.SamplingParams(64), speculation)
        steps = sum(completion.stats.steps for completion in completions)
        lengths[name] = sum(completion.stats.emitted_tokens for completion in completions) / steps
    assert lengths["chain"] > 1.5
    assert lengths["tree"] > lengths["chain"] + 0.1


def test_the_directory_holds_nothing_of_the_target_twice(demo_dir: Path) -> None:
    engine_dir = trtspec.EngineDir.load(demo_dir)
    with safe_open(packaged_head() / "model.safetensors", "pt") as stored:
        sizes = [math.prod(stored.get_slice(name).get_shape()) for name in stored.keys()]  # noqa: SIM118
    head_bytes = 4 * sum(sizes)
    assert engine_dir.draft_head is not None
    assert engine_dir.draft_head.lm_head == "target"
    parts = {name: record.size for name, record in engine_dir.files.items() if "draft" in name}
    assert sum(parts.values()) <= 1.1 * head_bytes
    rest = sum(record.size for name, record in engine_dir.files.items() if name not in parts)
    target_bytes = sum(engine_dir.files[name].size for name in engine_dir.files if name.startswith("weights/"))
    config = engine_dir.target.config
    assert rest < 1.02 * (target_bytes - sum(parts.values())) + 10e6
    assert target_bytes < 1.02 * (4 * 134_515_008 + head_bytes), config


_RESIDENT = """
import sys, trtspec
with trtspec.Session.open(sys.argv[1]) as session:
    speculation = trtspec.SpeculationConfig(method=sys.argv[2])
    session.generate(["The sea"], trtspec.SamplingParams(48, ignore_eos=True), speculation)
    fields = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    print(int(fields["Rss"].split()[0]) * 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps_rollup")
def test_the_process_grows_by_the_head(demo_dir: Path, tmp_path: Path) -> None:
    """Resident memory after the same work without and with a head, each in a process of its own."""
    trtspec.build("demo", tmp_path / "plain", max_seq_len=2048, use_eagle=False)

    def resident(directory: Path, method: str) -> int:
        command = [sys.executable, "-c", _RESIDENT, str(directory), method]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])

    head_bytes = 2 * (packaged_head() / "model.safetensors").stat().st_size
    growth = resident(demo_dir, "eagle") - resident(tmp_path / "plain", "none")
    # ONNX Runtime packs a copy of the weights beside the mapped file; a second copy of the target would be 540 MB.
    assert growth < 3 * head_bytes + 20e6
