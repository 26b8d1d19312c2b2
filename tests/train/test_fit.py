"""Training: the loss, the unrolled steps against drafting as it happens, resuming, and that it learns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from train import toy_data

from trtspec.errors import ConfigError
from trtspec.train.fit import LOG, TrainConfig, Trainer
from trtspec.train.head import EagleHead, causal_mask, rotary_tables
from trtspec.train.loss import probabilities, soft_cross_entropy
from trtspec.train.unroll import unroll

CONFIG = TrainConfig(epochs=2, rows_per_step=80, rows_per_pass=40, held_out=4, precision="float32", warmup=0.1)


def test_the_loss_and_its_gradient_are_those_of_plain_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    lm_head = torch.randn(50, 12, generator=generator)
    teacher = torch.randn(2100, 12, generator=generator)
    student = torch.randn(2100, 12, generator=generator, requires_grad=True)
    rows = torch.randperm(2100, generator=generator)
    loss = soft_cross_entropy(student, probabilities(teacher, lm_head), rows, lm_head)
    (found,) = torch.autograd.grad(3 * loss, student)
    plain = torch.nn.functional.cross_entropy(
        student @ lm_head.T, (teacher[rows] @ lm_head.T).softmax(-1), reduction="sum"
    )
    (expected,) = torch.autograd.grad(3 * plain, student)
    # A sum of 2,100 terms in another order.
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, expected)


def test_unrolled_steps_are_drafting_as_it_happens(tmp_path: Path) -> None:
    """From every anchor: true hidden states up to it, then the head's own outputs, each one position further."""
    torch.manual_seed(0)
    head, tables = EagleHead(toy_data.SIZES), toy_data.tables()
    batch = next(iter(toy_data.data(tmp_path).batches(40, 0)))
    steps = list(unroll(head, tables.embedding, batch, 3, batch.hidden.float()))
    length = batch.tokens.shape[1]
    for step in steps:
        assert len(step.anchors)
        for row, anchor in enumerate(step.anchors.tolist()):
            sequence, at = divmod(anchor, length)
            assert batch.answer[sequence, at + step.number]
            expected = _drafted(
                head, tables.embedding, batch.tokens[sequence], batch.hidden[sequence].float(), at, step.number
            )
            torch.testing.assert_close(step.output[row], expected, rtol=1e-4, atol=1e-5)
            assert torch.equal(step.truth[row], batch.hidden[sequence, at + step.number].float())


def _drafted(
    head: EagleHead, embedding: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor, anchor: int, steps: int
) -> torch.Tensor:
    """The head's output at the last of some steps from one anchor, as one plain causal sequence."""
    states = list(hidden[: anchor + 1])
    for _ in range(steps):
        count = len(states)
        embeds = embedding[tokens[1 : count + 1]][None]
        cos, sin = rotary_tables(head.sizes, count)
        mask = causal_mask(count, embeds.device)
        output, _ = head(embeds, torch.stack(states)[None], (cos, sin), [], mask)
        states.append(output[0, -1])
    return states[-1]


def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    data, tables = toy_data.data(tmp_path / "data"), toy_data.tables()
    config = dataclasses.replace(CONFIG, checkpoint_minutes=0.0)
    straight = Trainer(toy_data.SIZES, config, data, tables, tmp_path / "straight")
    straight.run()

    class Interrupted(Exception):
        pass

    def interrupt(done: int, total: int, loss: float) -> None:
        if done == 5:
            raise Interrupted

    first = Trainer(toy_data.SIZES, config, data, tables, tmp_path / "resumed")
    with pytest.raises(Interrupted):
        first.run(interrupt)
    second = Trainer(toy_data.SIZES, config, data, tables, tmp_path / "resumed")
    assert 0 < second.done < second.total_passes
    second.run()
    for name, value in straight.head.state_dict().items():
        assert torch.equal(second.head.state_dict()[name], value), name


def test_other_settings_do_not_resume(tmp_path: Path) -> None:
    data, tables = toy_data.data(tmp_path / "data"), toy_data.tables()
    Trainer(toy_data.SIZES, CONFIG, data, tables, tmp_path / "run").run()
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        Trainer(toy_data.SIZES, dataclasses.replace(CONFIG, seed=1), data, tables, tmp_path / "run")
    other = dataclasses.replace(tables, token_ids=tables.token_ids - 1)
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        Trainer(toy_data.SIZES, CONFIG, data, other, tmp_path / "run")


def test_a_run_starts_from_a_head_and_resumes_only_with_it(tmp_path: Path) -> None:
    data, tables = toy_data.data(tmp_path / "data"), toy_data.tables()
    torch.manual_seed(5)
    start, other = EagleHead(toy_data.SIZES), EagleHead(toy_data.SIZES)
    trainer = Trainer(toy_data.SIZES, CONFIG, data, tables, tmp_path / "run", start)
    assert all(torch.equal(trainer.head.state_dict()[name], value) for name, value in start.state_dict().items())
    trainer.run()
    assert not torch.equal(trainer.head.fc.weight, start.fc.weight)
    assert Trainer(toy_data.SIZES, CONFIG, data, tables, tmp_path / "run", start).done == trainer.done
    for wrong in (other, None):
        with pytest.raises(ConfigError, match="holds a run with other settings"):
            Trainer(toy_data.SIZES, CONFIG, data, tables, tmp_path / "run", wrong)


def test_prompts_that_are_read_are_learned_from(tmp_path: Path) -> None:
    data, tables = toy_data.data(tmp_path / "data"), toy_data.tables()
    config = dataclasses.replace(CONFIG, read_prompts=3)
    trainer = Trainer(toy_data.SIZES, config, data, tables, tmp_path / "run")
    seen: list[int] = []
    trainer._pass = lambda batch: seen.append(int(batch.answer.sum())) or 0.0  # type: ignore[method-assign, func-returns-value]
    trainer.run()
    examples = trainer.training.examples
    whole = [len(e.tokens) if e.prompt_length >= 3 else len(e.tokens) - e.prompt_length + 1 for e in examples]
    assert sum(seen) == CONFIG.epochs * sum(whole)


def test_every_epoch_is_logged_with_loss_and_acceptance(tmp_path: Path) -> None:
    trainer = Trainer(toy_data.SIZES, CONFIG, toy_data.data(tmp_path / "data"), toy_data.tables(), tmp_path / "run")
    trainer.run()
    entries = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert [entry["epoch"] for entry in entries] == [1, 2]
    assert all(entry["loss"] > 0 and len(entry["acceptance"]) == CONFIG.unrolled for entry in entries)
    assert trainer.done == trainer.total_passes


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_it_learns_what_can_be_learned(tmp_path: Path, precision: str) -> None:
    """Random sequences of a small set can be learned by heart."""
    data, tables = toy_data.data(tmp_path / "data"), toy_data.tables(toy_data.VOCAB)
    config = dataclasses.replace(CONFIG, epochs=60, feature_noise=0.0, precision=precision, matrix_learning_rate=2e-2)
    trainer = Trainer(toy_data.SIZES, config, data, tables, tmp_path / "run")
    before = trainer.acceptance(trainer.training)
    trainer.run()
    after = trainer.acceptance(trainer.training)
    assert after[0] > before[0] + 0.3
    assert after == sorted(after, reverse=True)
