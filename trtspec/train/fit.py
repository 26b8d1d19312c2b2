"""Training an EAGLE-1 head: unrolled steps, soft cross-entropy over a part of the vocabulary, resumable."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from trtspec.errors import ConfigError
from trtspec.train.head import EagleHead, HeadSizes
from trtspec.train.loss import probabilities, soft_cross_entropy
from trtspec.train.store import Batch, TrainingData
from trtspec.train.unroll import unroll

logger = logging.getLogger(__name__)

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"


@dataclass(frozen=True)
class TrainConfig:
    """How to train; equal values give the same run on the same machine."""

    epochs: int = 3
    rows_per_step: int = 4096
    """Padded rows of an optimizer step."""
    rows_per_pass: int = 4096
    """Padded rows in memory at once; gradients add up to `rows_per_step`."""
    unrolled: int = 3
    """Draft steps that are trained."""
    step_decay: float = 0.8
    """Weight of each draft step's loss relative to the one before."""
    feature_weight: float = 1.0
    """Weight of the smooth L1 loss on hidden states (scaled to unit size) beside the cross-entropy."""
    feature_noise: float = 0.1
    """Half-width of the uniform noise on the hidden states read, in units of their root mean square."""
    learning_rate: float = 1e-3
    matrix_learning_rate: float = 3e-3
    """Of Muon, which moves the matrices."""
    weight_decay: float = 0.01
    warmup: float = 0.03
    """Part of the steps in which the rates rise; afterwards they fall to zero along a cosine."""
    read_prompts: int | None = None
    """Prompts of at least so many tokens are learned from like answers."""
    held_out: int = 128
    """Sequences kept for measuring acceptance."""
    seed: int = 0
    precision: str = "bfloat16"
    """Dtype of matrix products; weights and sums stay in float32."""
    checkpoint_minutes: float = 3.0


@dataclass(frozen=True)
class TargetTables:
    """What the head shares with its target, both float32 `[vocab, hidden]`, and the tokens that the loss looks at."""

    embedding: torch.Tensor
    lm_head: torch.Tensor
    token_ids: torch.Tensor
    """int64 `[loss_vocab]`, ascending."""


class Trainer:
    """A training run in a directory, which a later Trainer with the same settings goes on with."""

    def __init__(
        self,
        sizes: HeadSizes,
        config: TrainConfig,
        data: TrainingData,
        tables: TargetTables,
        directory: Path,
        start: EagleHead | None = None,
    ) -> None:
        """Start, or resume from the directory's checkpoint.

        Args:
            start: a head of these sizes to go on from; by default, one that hands hidden states through.

        Raises:
            ConfigError: the directory holds a run with other settings.
        """
        self.config, self.directory, self.tables = config, directory, tables
        self.device = tables.embedding.device
        self.training, self.held_out = data.split(config.held_out, config.seed)
        self._scale = self.training.feature_scale()
        self._dtype = getattr(torch, config.precision)
        self._rows = tables.lm_head[tables.token_ids]
        self._lm_head = self._rows.to(self._dtype)
        torch.manual_seed(config.seed)
        self.head = EagleHead(sizes).to(self.device)
        if start is not None:
            self.head.load_state_dict(start.state_dict())
        self._start = "" if start is None else weights_digest(start)
        matrices = [p for p in self.head.parameters() if p.ndim == 2]
        others = [p for p in self.head.parameters() if p.ndim != 2]
        self._optimizers = [
            torch.optim.Muon(
                matrices,
                lr=config.matrix_learning_rate,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._rates = [config.matrix_learning_rate, config.learning_rate]
        # Passes behind the end of each epoch: epochs differ a little in their number of batches.
        counts = [self.training.num_batches(config.rows_per_pass, self._seed_of(n)) for n in range(config.epochs)]
        self._epoch_ends = list(itertools.accumulate(counts))
        self.passes_per_step = max(1, round(config.rows_per_step / config.rows_per_pass))
        self.total_passes = self._epoch_ends[-1]
        self.done = 0
        """Passes (forward and backward) behind us."""
        self.seconds = 0.0
        directory.mkdir(parents=True, exist_ok=True)
        self._resume()

    def run(self, progress: Callable[[int, int, float], None] | None = None) -> None:
        """Train to the end; `progress` gets passes done, passes in all, and the loss per token."""
        last_saved = last = time.monotonic()
        for epoch in range(bisect.bisect_right(self._epoch_ends, self.done), self.config.epochs):
            begun, end = (self._epoch_ends[epoch - 1] if epoch else 0), self._epoch_ends[epoch]
            losses = []
            rows, seed, prompts = self.config.rows_per_pass, self._seed_of(epoch), self.config.read_prompts
            for batch in self.training.batches(rows, seed, self.done - begun, prompts):
                losses.append(self._pass(batch))
                self.done += 1
                stepped = (self.done - begun) % self.passes_per_step == 0 or self.done == end
                if stepped:
                    self._step()
                now = time.monotonic()
                self.seconds, last = self.seconds + now - last, now
                if progress:
                    progress(self.done, self.total_passes, losses[-1])
                if stepped and self.done < end and now - last_saved > 60 * self.config.checkpoint_minutes:
                    self._save()
                    last_saved = now
            self._report(epoch, sum(losses) / len(losses))
            self._save()

    def _seed_of(self, epoch: int) -> int:
        return self.config.seed + 1 + epoch

    def acceptance(self, data: TrainingData | None = None) -> list[float]:
        """Held-out acceptance: for each draft step, the part of the anchors where this and all before are right.

        Right is what the target would choose of its whole vocabulary from the true hidden state.
        """
        right = torch.zeros(self.config.unrolled)
        count = torch.zeros(self.config.unrolled)
        self.head.eval()
        with torch.no_grad():
            for batch in (data or self.held_out).batches(self.config.rows_per_pass, 0):
                hits = self._hits(self.to_device(batch))
                right += torch.tensor([float(hit.sum()) for hit in hits])
                count += torch.tensor([float(len(hit)) for hit in hits])
        self.head.train()
        return (right / count.clamp(min=1)).tolist()

    def _hits(self, batch: Batch) -> list[torch.Tensor]:
        """Per draft step, bool over the anchors of an answer that reach that far: whether all so far were right."""
        good = torch.ones(batch.tokens.numel(), dtype=torch.bool, device=self.device)
        hits = []
        for step in unroll(self.head, self.tables.embedding, batch, self.config.unrolled, batch.hidden.float()):
            ours = self.tables.token_ids[(step.output @ self._rows.T).argmax(-1)]
            theirs = (step.truth @ self.tables.lm_head.T).argmax(-1)
            good[step.anchors] &= ours == theirs
            hits.append(good[step.anchors])
        return hits

    def _pass(self, batch: Batch) -> float:
        """Forward and backward of one batch; the mean loss per predicted token of the first step."""
        config = self.config
        batch = self.to_device(batch)
        features = batch.hidden.to(self._dtype)
        if config.feature_noise:
            generator = torch.Generator(self.device).manual_seed(
                random.Random(f"{config.seed} {self.done}").getrandbits(60)
            )
            noise = torch.rand(features.shape, generator=generator, device=self.device).sub_(0.5)
            features = features + (noise * (2 * config.feature_noise * self._scale)).to(features.dtype)
        rows = config.rows_per_step * 0.5
        answer = batch.answer.flatten()
        targets = probabilities(batch.hidden.flatten(0, 1)[answer], self._lm_head)
        target_of = answer.long().cumsum(0) - 1
        first = 0.0
        total = torch.zeros((), device=self.device)
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            for step in unroll(self.head, self.tables.embedding, batch, config.unrolled, features):
                wanted = target_of[step.anchors + step.number]
                loss = soft_cross_entropy(step.output, targets, wanted, self._lm_head)
                if config.feature_weight:
                    ours, theirs = step.output.float() / self._scale, step.truth.float() / self._scale
                    distance = functional.smooth_l1_loss(ours, theirs, reduction="sum") / ours.shape[-1]
                    total = total + config.step_decay ** (step.number - 1) * config.feature_weight * distance / rows
                total = total + config.step_decay ** (step.number - 1) * loss / rows
                if step.number == 1:
                    first = float(loss.detach()) / max(len(step.output), 1)
        total.backward()
        return first

    def to_device(self, batch: Batch) -> Batch:
        """The batch where the head is."""
        return Batch(*[part.to(self.device) for part in (batch.tokens, batch.hidden, batch.answer)])

    def _step(self) -> None:
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * self._rate_factor()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _rate_factor(self) -> float:
        part = self.done / self.total_passes
        if part < self.config.warmup:
            return part / self.config.warmup
        return 0.5 * (1 + math.cos(math.pi * (part - self.config.warmup) / (1 - self.config.warmup)))

    def _report(self, epoch: int, loss: float) -> None:
        accepted = self.acceptance()
        entry = {
            "epoch": epoch + 1,
            "loss": round(loss, 4),
            "minutes": round(self.seconds / 60, 1),
            "acceptance": [round(value, 4) for value in accepted],
            "acceptance_length": round(1 + sum(accepted), 4),
        }
        with (self.directory / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
        logger.info("epoch %d: loss %.3f, held-out acceptance %s", epoch + 1, loss, entry["acceptance"])

    def _save(self) -> None:
        state: dict[str, Any] = {
            "settings": self._settings(),
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "done": self.done,
            "seconds": self.seconds,
        }
        partial = self.directory / f"{CHECKPOINT}.partial"
        torch.save(state, partial)
        partial.replace(self.directory / CHECKPOINT)

    def _resume(self) -> None:
        file = self.directory / CHECKPOINT
        if not file.exists():
            return
        state = torch.load(file, map_location=self.device, weights_only=True)
        if state["settings"] != self._settings():
            raise ConfigError(
                f"{self.directory} holds a run with other settings or data; choose another --run directory"
            )
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.done, self.seconds = state["done"], state["seconds"]

    def _settings(self) -> dict[str, Any]:
        return {
            "config": asdict(self.config),
            "sizes": asdict(self.head.sizes),
            "sequences": len(self.training),
            "tokens": self.training.num_tokens,
            "start": self._start,
            "loss_vocab": hashlib.sha256(self.tables.token_ids.cpu().numpy().tobytes()).hexdigest(),
        }


def weights_digest(head: EagleHead) -> str:
    """A hash of a head's weights."""
    digest = hashlib.sha256()
    for value in head.state_dict().values():
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
