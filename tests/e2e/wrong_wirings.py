"""The demo head wired right and in the ways it is usually got wrong, and what each does to the acceptance length.

    python tests/e2e/wrong_wirings.py FILE.jsonl ... --limit 20

prints the table of docs/eagle-wiring.md for prompt sets.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import trtspec
from trtspec.bench.datasets import load_dataset
from trtspec.checkpoint.demo import packaged_head
from trtspec.checkpoint.source import open_checkpoint
from trtspec.checkpoint.target import FINAL_NORM
from trtspec.decode.step import Drafters
from trtspec.draft import eagle
from trtspec.draft.eagle import EagleDrafter
from trtspec.draft.expansion import expand_chains
from trtspec.draft.ngram import NgramDrafter
from trtspec.engine_build import plan_build, run_plan

Tensors = dict[str, torch.Tensor]


class KeepsDraftKv(EagleDrafter):
    """Keeps the KV of accepted draft tokens as the expansion wrote it, from guessed hidden states."""

    def _refresh(self, drafts: Any, states: Any) -> Any:
        for draft in drafts:
            written = getattr(draft.state, "written", 0)
            if kept := min(written, draft.state.queued - 1):
                draft.state.take(kept)
            draft.state.written = draft.growths
        return super()._refresh(drafts, states)


class PairsOwnTokens(EagleDrafter):
    """Gives the head hidden state i with token i, as other decoder layers have it, in place of token i + 1."""

    def _refresh_pass(self, parts: Any, *arguments: Any) -> Any:
        shifted = [part._replace(sequence=Shifted(np.append(0, part.sequence.tokens))) for part in parts]
        return super()._refresh_pass(shifted, *arguments)


class Shifted(NamedTuple):
    """A sequence whose token i stands at place i + 1."""

    tokens: np.ndarray


class ShiftedHead:
    """A head whose rows stand one position too far."""

    def __init__(self, head: Any) -> None:
        self._head = head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def forward(self, rows: Any, hidden: torch.Tensor, cache: Any) -> Any:
        return self._head.forward(rows._replace(positions=rows.positions + 1), hidden, cache)


def shifted_chains(head: Any, *arguments: Any) -> Any:
    """Drafted tokens one position too far from the committed ones."""
    return expand_chains(ShiftedHead(head), *arguments)


def _with_norm(name: str) -> Callable[[Tensors], None]:
    """A norm at its initial weight, as runtimes that build the layer of the target's class make it."""

    def change(tensors: Tensors) -> None:
        tensors[name] = torch.ones(tensors["fc.weight"].shape[0], dtype=tensors["fc.weight"].dtype)

    return change


def _with_target_norm(tensors: Tensors) -> None:
    """The target's final norm once more, as runtimes that end every model with one do."""
    tensors["norm.weight"] = open_checkpoint("demo").tensors.load(FINAL_NORM).to(tensors["fc.weight"].dtype)


def _swap(tensors: Tensors) -> None:
    embedding, hidden = tensors["fc.weight"].chunk(2, dim=1)
    tensors["fc.weight"] = torch.cat([hidden, embedding], dim=1).contiguous()


@dataclass(frozen=True)
class Wiring:
    """One way to wire the head."""

    name: str
    change: Callable[[Tensors], None] = lambda tensors: None
    options: tuple[tuple[str, str], ...] = ()
    pre_norm: bool = False
    drafter: type[EagleDrafter] = EagleDrafter
    chains: Callable[..., Any] = expand_chains


RIGHT = Wiring("as trtspec wires it")
COSTLY = (
    Wiring("norm before the first attention", _with_norm("layers.0.input_layernorm.weight"), (("input_norm", "true"),)),
    Wiring(
        "the target's final norm before the LM head",
        _with_target_norm,
        (("output_norm", "true"), ("norm_output", "false")),
    ),
    Wiring("the target's hidden state before its final norm", pre_norm=True),
    Wiring("hidden state before embedding in fc's input", _swap),
    Wiring("hidden state i with token i, one position off", drafter=PairsOwnTokens),
)
"""Wrong wirings that lower the acceptance length of the demo head."""
HARMLESS = (
    Wiring("a norm of weight 1 before the LM head", _with_norm("norm.weight"), (("output_norm", "true"),)),
    Wiring("draft tokens one position too far", chains=shifted_chains),
    Wiring("KV of accepted draft tokens kept", drafter=KeepsDraftKv),
)
"""Those that make no difference to this head, or a smaller one than a few prompts would show."""


def build_wiring(wiring: Wiring, output: Path) -> None:
    """The demo's engine directory with its head changed."""
    with tempfile.TemporaryDirectory() as temporary:
        head = Path(temporary) / "head"
        shutil.copytree(packaged_head(), head)
        tensors = load_file(head / "model.safetensors")
        wiring.change(tensors)
        save_file(tensors, head / "model.safetensors")
        plan = plan_build("demo", eagle=head, eagle_options=dict(wiring.options), max_seq_len=2048)
        if wiring.pre_norm:
            assert plan.head is not None
            last = (plan.config.num_layers,)
            config = replace(plan.head.head.config, feature="boundaries", boundaries=last)
            plan = replace(plan, head=replace(plan.head, head=replace(plan.head.head, config=config)))
        run_plan(plan, output)


@contextmanager
def open_wiring(wiring: Wiring, directory: Path) -> Iterator[trtspec.Session]:
    """A session that drafts as the wiring says."""
    with trtspec.Session.open(directory) as session, mock.patch.object(eagle, "expand_chains", wiring.chains):
        if wiring.drafter is not EagleDrafter:
            right = session._eagle
            drafter = wiring.drafter(right.head, right.cache)
            session._eagle = drafter
            session._scheduler._drafters = Drafters(NgramDrafter(), drafter)
        yield session


def acceptance_length(session: trtspec.Session, prompts: Sequence[Any], max_new_tokens: int) -> float:
    """Tokens per step of a chain of 3, over all prompts."""
    sampling = trtspec.SamplingParams(max_new_tokens)
    completions = session.generate(prompts, sampling, trtspec.SpeculationConfig(method="eagle", eagle_tokens=3))
    steps = sum(completion.stats.steps for completion in completions)
    return sum(completion.stats.emitted_tokens for completion in completions) / steps


def measure(wiring: Wiring, sets: Sequence[Sequence[Any]], max_new_tokens: int) -> list[float]:
    """The acceptance length on each prompt set."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "engines"
        build_wiring(wiring, directory)
        with open_wiring(wiring, directory) as session:
            return [acceptance_length(session, prompts, max_new_tokens) for prompts in sets]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--only", default="", help="wirings whose names hold this")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()
    sets = [[item.messages or item.text for item in load_dataset(name, options.limit)] for name in options.datasets]
    for wiring in (RIGHT, *COSTLY, *HARMLESS):
        if options.only not in wiring.name:
            continue
        lengths = measure(wiring, sets, options.max_new_tokens)
        print(
            json.dumps({"wiring": wiring.name, "acceptance_length": [round(value, 3) for value in lengths]}), flush=True
        )


if __name__ == "__main__":
    main()
