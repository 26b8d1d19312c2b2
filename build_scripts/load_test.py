"""Put an open-loop load on a running Triton Inference Server that serves a trtspec model, and report what users saw.

    trtspec triton-repo DIR --output models && tritonserver --model-repository models ...
    python build_scripts/load_test.py http://localhost:8000 --dataset chat --dataset edit --load 0.9 --load 1.5

Requests arrive at random times (a Poisson process) whether or not earlier ones have been answered, as users' do. Loads
are fractions of the capacity, the requests a second that `--clients` busy clients get; it is measured first unless
`--capacity` says it. With `--reference DIR` each answer is compared with the one that the engine directory gives alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click
import numpy as np

from trtspec.bench.datasets import load_dataset
from trtspec.cli.main import main as run_command
from trtspec.cli.options import DirectoryPath
from trtspec.config import METHODS, SamplingParams, SpeculationConfig
from trtspec.errors import ConfigError, EngineError
from trtspec.session import Session

PERCENTILES = (50, 90, 99)
QUEUE_FULL = "requests wait already"
"""What the server says where its queue is full."""


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: str
    max_tokens: int
    method: str | None

    def body(self) -> dict[str, Any]:
        """The JSON object of the generate endpoints."""
        method = {} if self.method is None else {"method": self.method}
        return {"text_input": self.prompt, "max_tokens": self.max_tokens, "stream": True, **method}


@dataclass
class Answer:
    """What became of a request; times in seconds."""

    ask: Ask
    begun: float
    first: float | None = None
    ended: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    error: str | None = None

    @property
    def to_first_token(self) -> float:
        """Seconds until the first token."""
        return (self.first or self.ended) - self.begun

    @property
    def per_token(self) -> float | None:
        """Seconds for each token behind the first; None where there is no other."""
        rest = len(self.token_ids) - 1
        return None if rest < 1 or self.first is None else (self.ended - self.first) / rest


async def ask_server(session: aiohttp.ClientSession, url: str, ask: Ask) -> Answer:
    """Send one request and read its stream to the end."""
    answer = Answer(ask, time.perf_counter())
    try:
        async with session.post(url, json=ask.body()) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text()).strip()}"
            else:
                async for event in _events(response):
                    _take(answer, event)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    if answer.error is None and not answer.finish_reason:
        answer.error = "the stream ended without a finish reason"
    return answer


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    async for line in response.content:
        if line.startswith(b"data:"):
            yield json.loads(line[5:])


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = str(event["error"])
        return
    answer.first = answer.first or time.perf_counter()
    ids = event["output_ids"]
    answer.token_ids += ids if isinstance(ids, list) else [ids]
    answer.text += event["text_output"]
    answer.finish_reason = event["finish_reason"]


async def closed_loop(url: str, asks: Sequence[Ask], clients: int) -> tuple[list[Answer], float]:
    """All requests, as fast as so many clients that each wait for their answer send them; answers and seconds."""
    waiting = list(reversed(asks))
    answers: list[Answer] = []

    async def client(session: aiohttp.ClientSession) -> None:
        while waiting:
            answers.append(await ask_server(session, url, waiting.pop()))

    begun = time.perf_counter()
    async with _client_session() as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return answers, time.perf_counter() - begun


async def open_loop(
    url: str, asks: Sequence[Ask], rate: float, seconds: float, rng: random.Random
) -> tuple[list[Answer], float]:
    """Requests at random times, `rate` a second on average; answers, and seconds until the last of them."""
    tasks = []
    begun = time.perf_counter()
    due = rng.expovariate(rate)
    async with _client_session() as session:
        while due < seconds:
            await asyncio.sleep(max(begun + due - time.perf_counter(), 0.0))
            tasks.append(asyncio.create_task(ask_server(session, url, rng.choice(asks))))
            due += rng.expovariate(rate)
        answers = list(await asyncio.gather(*tasks))
    return answers, time.perf_counter() - begun


def _client_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=300)
    )


@dataclass(frozen=True)
class Report:
    """The figures of one load."""

    load: float | None
    rate: float | None
    requests: int
    completed: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    first_token_ms: dict[str, float]
    token_ms: dict[str, float]
    queue_full: int
    errors: dict[str, int]
    wrong: int | None

    def row(self) -> str:
        """A line of the table."""
        first, each = (
            " / ".join(f"{times[f'p{p}']:.0f}" if times else "-" for p in PERCENTILES)
            for times in (self.first_token_ms, self.token_ms)
        )
        load = "closed" if self.load is None else f"{self.load:.0%}"
        wrong = "-" if self.wrong is None else str(self.wrong)
        other = sum(self.errors.values())
        return (
            f"| {load} | {self.requests} | {self.completed} | {self.requests_per_second:.2f} "
            f"| {self.tokens_per_second:.1f} | {first} | {each} | {self.queue_full} | {other} | {wrong} |"
        )


HEADER = (
    "| load | requests | answered | requests/s | tokens/s | first token ms (p50 / p90 / p99) "
    "| per further token ms (p50 / p90 / p99) | queue full | other errors | wrong answers |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def report(
    answers: Sequence[Answer],
    seconds: float,
    references: dict[tuple[str, int], list[int]] | None,
    load: float | None = None,
    rate: float | None = None,
) -> Report:
    """Sum up the answers to one load."""
    good = [answer for answer in answers if answer.error is None]
    full = sum(QUEUE_FULL in (answer.error or "") for answer in answers)
    errors = Counter(answer.error for answer in answers if answer.error and QUEUE_FULL not in answer.error)
    wrong = None
    if references is not None:
        wrong = sum(answer.token_ids != references[answer.ask.prompt, answer.ask.max_tokens] for answer in good)
    return Report(
        load=load,
        rate=rate,
        requests=len(answers),
        completed=len(good),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        tokens_per_second=sum(len(answer.token_ids) for answer in good) / seconds,
        first_token_ms=_percentiles([answer.to_first_token for answer in good]),
        token_ms=_percentiles([each for answer in good if (each := answer.per_token) is not None]),
        queue_full=full,
        errors=dict(errors),
        wrong=wrong,
    )


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{p}": 1000 * float(np.percentile(seconds, p)) for p in PERCENTILES}


def make_asks(
    datasets: Sequence[str], lengths: Sequence[int], methods: Sequence[str], limit: int | None, seed: int
) -> list[Ask]:
    """A mix: each prompt with a length and a method drawn for it."""
    rng = random.Random(seed)
    prompts = []
    for name in datasets:
        for prompt in load_dataset(name, limit):
            if prompt.messages is not None and len(prompt.messages) != 1:
                raise ConfigError(f"{name}: prompt {prompt.id} has several messages; the server takes one text")
            prompts.append(prompt.text if prompt.messages is None else prompt.messages[0]["content"])
    return [Ask(str(text), rng.choice(lengths), rng.choice(methods) if methods else None) for text in prompts]


def reference_answers(directory: Path, asks: Sequence[Ask], threads: int | None) -> dict[tuple[str, int], list[int]]:
    """What the target alone answers."""
    found = {}
    with Session.open(directory, threads=threads) as session:
        for length in sorted({ask.max_tokens for ask in asks}):
            texts = sorted({ask.prompt for ask in asks if ask.max_tokens == length})
            chats = [[{"role": "user", "content": text}] for text in texts]
            prompts = chats if session.tokenizer.has_chat_template else texts
            answers = session.generate(prompts, SamplingParams(length), SpeculationConfig(method="none"))
            found.update({(text, length): answer.token_ids for text, answer in zip(texts, answers, strict=True)})
    return found


@click.command(help=__doc__)
@click.argument("url")
@click.option("--model", default="trtspec", show_default=True, help="The model's name.")
@click.option("--dataset", "datasets", multiple=True, default=("chat", "edit"), show_default=True)
@click.option("--limit", type=click.IntRange(min=1), help="Prompts of each dataset.  [default: all]")
@click.option("--max-tokens", "lengths", multiple=True, type=click.IntRange(min=1), default=(32, 64, 128))
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), help="[default: the server's]")
@click.option("--load", "loads", multiple=True, type=click.FloatRange(min=0, min_open=True), default=(0.5, 0.9, 1.5))
@click.option("--capacity", type=click.FloatRange(min=0, min_open=True), help="Requests a second.  [default: measured]")
@click.option("--clients", type=click.IntRange(min=1), default=8, show_default=True, help="For measuring the capacity.")
@click.option("--closed", is_flag=True, help="Measure the capacity only.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--reference", type=DirectoryPath(), help="Engine directory that knows the right answers (greedy).")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads for the reference.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures to this file.")
def main(
    url: str,
    model: str,
    datasets: tuple[str, ...],
    limit: int | None,
    lengths: tuple[int, ...],
    methods: tuple[str, ...],
    loads: tuple[float, ...],
    capacity: float | None,
    clients: int,
    closed: bool,
    seconds: float,
    seed: int,
    reference: Path | None,
    threads: int | None,
    json_file: Path | None,
) -> None:
    asks = make_asks(datasets, lengths, methods, limit, seed)
    references = None if reference is None else reference_answers(reference, asks, threads)
    endpoint = f"{url.rstrip('/')}/v2/models/{model}/generate_stream"
    reports = []
    click.echo(HEADER)
    if capacity is None or closed:
        answers, took = asyncio.run(closed_loop(endpoint, asks, clients))
        reports.append(report(answers, took, references))
        click.echo(reports[-1].row())
        capacity = reports[-1].requests_per_second
        if not capacity:
            raise EngineError(f"no request was answered: {answers[0].error}")
    for load in () if closed else loads:
        rate = load * capacity
        answers, took = asyncio.run(open_loop(endpoint, asks, rate, seconds, random.Random(seed)))
        reports.append(report(answers, took, references, load, rate))
        click.echo(reports[-1].row())
        for error, count in reports[-1].errors.items():
            click.echo(f"{count} times: {error}", err=True)
    if json_file:
        json_file.write_text(json.dumps([dataclasses.asdict(each) for each in reports], indent=1) + "\n")
    if any(each.wrong or each.errors for each in reports):
        sys.exit(1)


if __name__ == "__main__":
    run_command(main, "load_test.py")
