"""Answer prompts in large batches in bfloat16, for training data: tokens and hidden states from one pass.

A CPU with bfloat16 matrix units, or a GPU, answers several times as many prompts a second this way as an engine of
few slots. The target is written out in plain PyTorch: Llama layers without biases or norms in the attention.

    trtspec build demo --output demo-plain --no-eagle --runtime onnxruntime
    python build_scripts/bulk_answers.py demo-plain --output data --generated-prompts 20000

Articles that the target makes up, and its summaries of them:

    python build_scripts/bulk_answers.py demo-plain --output articles --generated-prompts 500 --mix report \\
        --temperature 1 --max-new-tokens 512 --batch-size 128
    python build_scripts/bulk_answers.py demo-plain --output summaries --articles articles --max-prompt 1200 \\
        --batch-size 64

Goes on where it was interrupted when the same command is given again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch.nn import functional
from tqdm import tqdm

from trtspec.checkpoint.shards import SafetensorsSource
from trtspec.checkpoint.target import EMBEDDING, FINAL_NORM, LM_HEAD, TargetConfig
from trtspec.cli.main import main as run_command
from trtspec.cli.options import DirectoryPath
from trtspec.engine_dir import TOKENIZER_DIR, EngineDir
from trtspec.errors import ConfigError
from trtspec.prompt import prompt_ids
from trtspec.tokenizer import Tokenizer
from trtspec.train.prompts import MIXES, generate_prompts, reading_prompts
from trtspec.train.store import Example, TrainingData, begin_collection, shard_files, write_shard

PREFILL_ROWS = 2048
SORTED_BATCHES = 16
"""Batches whose prompts are sorted by length together."""
SHORTEST_ARTICLE = 250
"""Tokens of a stored answer that is read as an article."""
COMPACT_BELOW = 0.85
"""Finished sequences leave the batch when fewer than this part is unfinished."""

COUNT = click.IntRange(min=1)
Cache = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Sampling:
    """How answers are chosen."""

    temperature: float = 0.0
    """0 takes the most probable token."""
    generator: torch.Generator | None = None


class PlainTarget:
    """A Llama-like target's forward pass over left-padded batches."""

    def __init__(self, engine_dir: EngineDir, device: torch.device, positions: int) -> None:
        self.config = config = TargetConfig.from_json(engine_dir.target.config)
        if config.qkv_bias or config.qk_norm or config.mlp_bias or config.output_bias:
            raise ConfigError(f"{config.architecture} has biases or head norms; collect with train_eagle.py collect")
        self.device = device
        source = SafetensorsSource(engine_dir.target_weight_files)
        self.weights = {name: source.load(name).to(device, torch.bfloat16) for name in source.tensors}
        self.lm_head = self.weights[EMBEDDING if config.tied else LM_HEAD]
        tables = [torch.from_numpy(table).float() for table in config.rope.cos_sin(config.head_dim, positions)]
        self._cos, self._sin = (torch.cat([table] * 2, -1).to(device, torch.bfloat16) for table in tables)

    def cache(self, batch: int, rows: int) -> Cache:
        """Zeros for every layer, `[batch, kv_heads, rows, head_dim]`."""
        shape = (batch, self.config.num_kv_heads, rows, self.config.head_dim)
        return [
            tuple(torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in "kv")  # type: ignore[misc]
            for _ in range(self.config.num_layers)
        ]

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Cache, start: int
    ) -> torch.Tensor:
        """Hidden states after the final norm, `[batch, width, hidden]`; KV goes to cache columns start and on.

        Args:
            mask: additive; for prompts (start 0) `[batch, 1, width, width]`, later `[batch, 1, 1, cache columns]`.
        """
        x = self.weights[EMBEDDING][tokens]
        rotary = self._cos[positions][:, None], self._sin[positions][:, None]
        for layer, (keys, values) in enumerate(cache):
            name = f"model.layers.{layer}"
            mixed = self._attend(
                self._norm(x, f"{name}.input_layernorm.weight"), name, rotary, mask, keys, values, start
            )
            x = x + self._linear(mixed, f"{name}.self_attn.o_proj")
            normed = self._norm(x, f"{name}.post_attention_layernorm.weight")
            gate = functional.silu(self._linear(normed, f"{name}.mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(normed, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        return self._norm(x, FINAL_NORM)

    def choose(self, hidden: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """The most probable token behind each row, or one drawn at a temperature."""
        logits = functional.linear(hidden, self.lm_head)
        if not sampling.temperature:
            return logits.argmax(-1)
        # Inverse of the distribution function: torch.multinomial draws a random number for every token there is.
        reached = (logits.float() / sampling.temperature).softmax(-1).cumsum(-1)
        drawn = torch.rand(len(reached), 1, generator=sampling.generator, device=reached.device) * reached[:, -1:]
        return torch.searchsorted(reached, drawn)[:, 0].clamp(max=reached.shape[-1] - 1)

    def _attend(
        self,
        x: torch.Tensor,
        name: str,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int,
    ) -> torch.Tensor:
        config, (batch, width, _) = self.config, x.shape
        queries, new_keys, new_values = (
            self._linear(x, f"{name}.self_attn.{kind}_proj").view(batch, width, -1, config.head_dim).transpose(1, 2)
            for kind in "qkv"
        )
        queries, new_keys = _rotate(queries, rotary) * config.head_dim**-0.5, _rotate(new_keys, rotary)
        keys[:, :, start : start + width], values[:, :, start : start + width] = new_keys, new_values
        # Prompts see themselves alone, and single rows the whole cache: parts of it would be copied in each layer.
        seen = (new_keys, new_values) if start == 0 else (keys, values)
        seen_keys, seen_values = (part.contiguous().flatten(0, 1) for part in seen)
        # The query heads of one KV head as its rows: nothing of the cache is repeated. The fused kernel takes more than
        # twice as long on a CPU.
        grouped = queries.reshape(batch * config.num_kv_heads, -1, config.head_dim)
        scores = torch.bmm(grouped, seen_keys.transpose(-1, -2)).view(batch, config.num_heads, width, -1) + mask
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype).view(*grouped.shape[:2], -1)
        mixed = torch.bmm(weights, seen_values)
        return mixed.reshape(batch, config.num_heads, width, config.head_dim).transpose(1, 2).flatten(2)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[name], self.config.rms_norm_eps)


@dataclass
class Batch:
    """Prompts padded on the left, and what has become of them."""

    prompts: list[list[int]]
    max_new_tokens: int

    def __post_init__(self) -> None:
        self.length = max(map(len, self.prompts))
        self.answers: list[list[int]] = [[] for _ in self.prompts]
        self.unfinished = [True] * len(self.prompts)

    def add(self, rows: list[int], tokens: list[int], eos: frozenset[int]) -> None:
        """Append a token to each unfinished row."""
        for row, token in zip(rows, tokens, strict=True):
            if self.unfinished[row]:
                self.answers[row].append(token)
                self.unfinished[row] = token not in eos and len(self.answers[row]) < self.max_new_tokens


@torch.inference_mode()
def answer(
    target: PlainTarget, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling = Sampling()
) -> list[Example]:
    """Answers with hidden states; the last token of each, behind which nothing is computed, is left out."""
    batch = Batch(prompts, max_new_tokens)
    length, size = batch.length, len(prompts)
    pads = torch.tensor([length - len(prompt) for prompt in prompts], device=target.device)
    hidden = torch.zeros(size, length + max_new_tokens, target.config.hidden_size, dtype=torch.float16)
    cache = target.cache(size, length + max_new_tokens)
    rows, eos = list(range(size)), frozenset(target.config.eos_token_ids)
    last = _prefill(target, batch, pads, cache, hidden, sampling)
    batch.add(rows, last.tolist(), eos)
    for column in range(length, length + max_new_tokens - 1):
        alive = [at for at, row in enumerate(rows) if batch.unfinished[row]]
        if not alive:
            break
        if len(alive) < COMPACT_BELOW * len(rows):
            index = torch.tensor(alive, device=target.device)
            rows, last, pads = [rows[at] for at in alive], last[index], pads[index]
            cache[:] = [(keys[index], values[index]) for keys, values in cache]
        columns = torch.arange(length + max_new_tokens, device=target.device)
        mask = _blocked((columns < pads[:, None]) | (columns > column))[:, None, None]
        states = target.forward(last[:, None], (column - pads)[:, None], mask, cache, column)[:, 0]
        hidden[torch.tensor(rows), column] = states.to("cpu", torch.float16)
        last = target.choose(states, sampling)
        batch.add(rows, last.tolist(), eos)
    return [_example(batch, hidden, row) for row in range(size)]


def _prefill(
    target: PlainTarget, batch: Batch, pads: torch.Tensor, cache: Cache, hidden: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Run the prompts, a few at a time; returns the first token of each answer."""
    length, chosen = batch.length, []
    tokens = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in batch.prompts], device=target.device)
    count = max(1, PREFILL_ROWS // length)
    for at in range(0, len(tokens), count):
        part = slice(at, at + count)
        # Columns that are padding in all of these rows are left out.
        first = int(pads[part].min())
        own, columns = pads[part] - first, torch.arange(length - first, device=target.device)
        before = columns[None, None] < own[:, None, None]
        later = columns[None] > columns[:, None]
        # A padding row sees itself: a softmax over nothing would be NaN.
        itself = torch.eye(length - first, dtype=torch.bool, device=target.device)
        mask = _blocked((before | later) & ~itself)[:, None]
        positions = (columns[None] - own[:, None]).clamp(min=0)
        views = [(keys[part, :, first:], values[part, :, first:]) for keys, values in cache]
        states = target.forward(tokens[part, first:], positions, mask, views, 0)
        hidden[part, first:length] = states.to("cpu", torch.float16)
        chosen.append(target.choose(states[:, -1], sampling))
    return torch.cat(chosen)


def _example(batch: Batch, hidden: torch.Tensor, row: int) -> Example:
    prompt = batch.prompts[row]
    tokens, start = [*prompt, *batch.answers[row]][:-1], batch.length - len(prompt)
    return Example(torch.tensor(tokens, dtype=torch.int32), hidden[row, start : start + len(tokens)], len(prompt))


def _blocked(where: torch.Tensor) -> torch.Tensor:
    """An additive mask."""
    return torch.zeros(where.shape, dtype=torch.bfloat16, device=where.device).masked_fill(where, -torch.inf)


def _rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat([-second, first], dim=-1) * rotary[1]


def plan_batches(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    """Batches of similar lengths, in an order that mixes them; the same ones each time."""
    batches = []
    for at in range(0, len(prompts), size * SORTED_BATCHES):
        window = sorted(prompts[at : at + size * SORTED_BATCHES], key=len)
        part = [window[i : i + size] for i in range(0, len(window), size)]
        random.Random(at).shuffle(part)
        batches += part
    return batches


@click.command(help=__doc__)
@click.argument("engine_dir", type=DirectoryPath())
@click.option("--output", required=True, type=DirectoryPath(), help="Directory for the shards, one per batch.")
@click.option("--generated-prompts", type=COUNT, help="Answer this many prompts of trtspec's own making.")
@click.option("--mix", type=click.Choice([*MIXES]), default="short", show_default=True, help="Which prompts to make.")
@click.option("--articles", type=DirectoryPath(), help="Ask for summaries of the answers stored here instead.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--batch-size", type=COUNT, default=320, show_default=True)
@click.option("--max-prompt", type=COUNT, default=320, show_default=True, help="Tokens; longer prompts are left out.")
@click.option("--max-new-tokens", type=COUNT, default=160, show_default=True, help="Tokens of an answer at most.")
@click.option("--seed", default=0, show_default=True, help="Of the generated prompts.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
def main(
    engine_dir: Path,
    output: Path,
    generated_prompts: int | None,
    mix: str,
    articles: Path | None,
    temperature: float,
    batch_size: int,
    max_prompt: int,
    max_new_tokens: int,
    seed: int,
    device: str,
) -> None:
    if (generated_prompts is None) == (articles is None):
        raise click.UsageError("give one of --generated-prompts and --articles")
    directory = EngineDir.load(engine_dir)
    tokenizer = Tokenizer(directory.path / TOKENIZER_DIR)
    target = PlainTarget(directory, torch.device(device), max_prompt + max_new_tokens)
    if articles is None:
        made = generate_prompts(generated_prompts or 0, seed, MIXES[mix])
    else:
        made = reading_prompts(_stored_answers(articles, tokenizer), seed)
    prompts = [prompt_ids([{"role": "user", "content": prompt.text}], tokenizer) for prompt in made]
    batches = plan_batches([prompt for prompt in prompts if len(prompt) <= max_prompt], batch_size)
    settings = {"bulk": batches, "max_new_tokens": max_new_tokens}
    if temperature:
        settings.update(temperature=temperature, seed=seed)
    done = begin_collection(output, settings)
    for number in tqdm(range(done, len(batches)), initial=done, total=len(batches), disable=None, unit="batch"):
        generator = torch.Generator(target.device).manual_seed(seed + number)
        write_shard(output, number, answer(target, batches[number], max_new_tokens, Sampling(temperature, generator)))


def _stored_answers(directory: Path, tokenizer: Tokenizer) -> list[str]:
    """The answers of a collection that are long enough to be read."""
    answers = [example.tokens[example.prompt_length :] for example in TrainingData(shard_files(directory)).examples]
    return [tokenizer.decode(answer.tolist()) for answer in answers if len(answer) >= SHORTEST_ARTICLE]


if __name__ == "__main__":
    run_command(main, "bulk_answers.py")
