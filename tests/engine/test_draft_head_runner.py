"""Running a draft head's engines: what comes out is the oracle's, shared engines are shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from draft.real_heads import Shelf
from graph.head_graphs import HeadGraphs, features, refresh

from trtspec.config import Limits
from trtspec.engine.base import CacheView
from trtspec.engine.draft_head import DraftHeadRunner, HeadOutput
from trtspec.engine.embedding import Embedding
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.target import LmHead, Rows

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LIMITS = Limits(max_seq_len=32, max_batch_size=2)
TOKENS = [17, 3, 60, 44, 9]

some_heads = pytest.mark.parametrize("name", ["e1", "e1_eagle_norms", "e2_token_map", "e3", "e3_narrow", "e4_fc_norm"])


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(LIMITS, tmp_path_factory)


def causal_rows(tokens: list[int], start: int = 0) -> Rows:
    """A pass over one sequence's next tokens."""
    new = len(tokens)
    return Rows(
        torch.tensor([tokens], dtype=torch.int32),
        torch.arange(start, start + new)[None],
        torch.tensor([start]),
        torch.ones(new, start + new, dtype=torch.bool).tril(start)[None, None],
    )


def read(runner: DraftHeadRunner, cache: KVCache, graphs: HeadGraphs) -> HeadOutput:
    """TOKENS with features of the target's."""
    hidden = runner.first_hidden(features(graphs, len(TOKENS), seed=1))
    return runner.forward(causal_rows(TOKENS), hidden[None].clone(), cache.view(0, 1))


def close_to(found: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((found.double() - right.double()).abs().max() <= 1e-5 * right.double().std() + 1e-6)


@some_heads
def test_outputs_are_the_oracles(shelf: Shelf, name: str) -> None:
    head = shelf[name]
    runner, cache = head.load()
    output = read(runner, cache, head.graphs)
    right = refresh(head.graphs.oracle(), TOKENS, features(head.graphs, len(TOKENS), seed=1))
    assert output.feedback.shape == output.logit_hidden.shape == (1, len(TOKENS), head.graphs.config.hidden_size)
    assert close_to(output.feedback[0], right.feedback)
    assert close_to(output.logit_hidden[0], right.logit_hidden)
    runner.close()


@some_heads
def test_tokens_are_the_targets_by_the_heads_own_probabilities(shelf: Shelf, name: str) -> None:
    head = shelf[name]
    runner, cache = head.load()
    rows = read(runner, cache, head.graphs).logit_hidden[0]
    right = refresh(head.graphs.oracle(), TOKENS, features(head.graphs, len(TOKENS), seed=1)).logits
    ids = torch.tensor(head.graphs.oracle_head().token_ids())
    log_probs, order = torch.log_softmax(right, dim=1).topk(4, dim=1)
    tokens, found = runner.top_tokens(rows, 4)
    assert tokens.tolist() == ids[order].tolist()
    assert found == pytest.approx(log_probs.numpy(), abs=1e-4)
    assert runner.best_tokens(rows).tolist() == ids[order[:, 0]].tolist()
    runner.close()


class FakeEngine:
    """Gives out chosen logits in a buffer that it uses again, and notes what it was given."""

    device = torch.device("cpu")

    def __init__(self, logits: torch.Tensor | None = None) -> None:
        self.logits = logits
        self.inputs: dict[str, torch.Tensor] = {}
        self.closed = 0

    def run(self, inputs: dict[str, torch.Tensor], cache: CacheView | None = None) -> dict[str, torch.Tensor]:
        assert self.logits is not None
        self.inputs = dict(inputs)
        return {"logits": self.logits.clone()}

    def close(self) -> None:
        self.closed += 1


def fake_runner(
    lm_head: FakeEngine, weight: torch.Tensor | None = None, **options: Any
) -> tuple[DraftHeadRunner, FakeEngine]:
    body = FakeEngine()
    config: Any = None
    return DraftHeadRunner(config, Embedding(torch.zeros(3, 2)), body, LmHead(lm_head, weight), **options), body  # type: ignore[arg-type]


def test_equal_tokens_come_in_the_order_of_the_lm_heads_rows() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 2.0, 1.0], [0.0] * 6])
    ids = torch.tensor([50, 40, 30, 20, 10, 0], dtype=torch.int32)
    runner, _ = fake_runner(FakeEngine(logits), token_ids=ids)
    tokens, log_probs = runner.top_tokens(torch.zeros(2, 2), 5)
    assert tokens.tolist() == [[40, 20, 10, 50, 30], [50, 40, 30, 20, 10]]
    assert log_probs[1] == pytest.approx(np.full(5, -np.log(6)), rel=1e-6)
    assert runner.best_tokens(torch.zeros(2, 2)).tolist() == [40, 50]


def test_the_lm_heads_weight_is_an_input_where_it_is_given() -> None:
    weight, lm_head = torch.zeros(6, 2), FakeEngine(torch.zeros(1, 6))
    runner, _ = fake_runner(lm_head, weight)
    runner.best_tokens(torch.zeros(1, 2))
    assert lm_head.inputs["lm_head.weight"] is weight
    without, _ = fake_runner(lm_head)
    without.best_tokens(torch.zeros(1, 2))
    assert set(lm_head.inputs) == {"hidden_rows"}


@pytest.mark.parametrize("owns", [True, False])
def test_closing_frees_the_heads_own_engines(owns: bool) -> None:
    lm_head, fuse = FakeEngine(), FakeEngine()
    runner, body = fake_runner(lm_head, fuse=fuse, owns_lm_head=owns)
    runner.close()
    assert (body.closed, fuse.closed, lm_head.closed) == (1, 1, int(owns))


def test_engine_seconds_count_every_engine(shelf: Shelf) -> None:
    head = shelf["e3"]
    runner, cache = head.load()
    seconds = [runner.engine_seconds]
    runner.first_hidden(features(head.graphs, 2, seed=1))
    seconds.append(runner.engine_seconds)
    rows = read(runner, cache, head.graphs).logit_hidden[0]
    seconds.append(runner.engine_seconds)
    runner.best_tokens(rows)
    seconds.append(runner.engine_seconds)
    runner.top_tokens(rows, 2)
    seconds.append(runner.engine_seconds)
    assert sorted(set(seconds)) == seconds
    runner.close()
