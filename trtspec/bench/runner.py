"""Methods side by side on the same prompts, interleaved prompt by prompt so that drift hits all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any, Protocol

import numpy as np

from trtspec.completion import Completion
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.decode.stats import Stats
from trtspec.prompt import Prompt
from trtspec.sampling import Sampler
from trtspec.session import Session

OUTSIDE_ENGINES = ("ngram", "merge", "accept", "commit", "host")
WARM_UP_TOKENS = 16
"""What a warm-up generates for each prompt at most."""


@dataclass(frozen=True)
class Output:
    """What one method made of one group of prompts: token ids per prompt, and the seconds for all."""

    token_ids: list[list[int]]
    seconds: float
    stats: Stats = field(default_factory=Stats)


class Contender(Protocol):
    """Something that completes a group of tokenized prompts."""

    name: str

    def complete(self, prompts: Seq[list[int]], sampling: SamplingParams) -> Output:
        """Complete the prompts greedily."""
        ...


class SessionMethod:
    """A drafting method of a session."""

    def __init__(self, session: Session, speculation: SpeculationConfig, name: str | None = None) -> None:
        """Called by its method's name, unless another is given."""
        assert speculation.method is not None
        self.name = name or speculation.method
        self._session = session
        self._speculation = speculation

    def complete(self, prompts: Seq[list[int]], sampling: SamplingParams) -> Output:
        """Complete the prompts as one batch."""
        group: Seq[Prompt] = prompts
        completions = self._session.generate(group, sampling, self._speculation)
        stats = Stats()
        for completion in completions:
            stats.add(completion.stats)
        return Output([c.token_ids for c in completions], _wall_seconds(completions), stats)


@dataclass(frozen=True)
class Difference:
    """Where a method's tokens leave the baseline's."""

    method: str
    prompt_id: str
    position: int
    """Index in the generated tokens."""
    expected: int | None
    found: int | None
    logit_gap: float | None
    """How much more the target favours the one token over the other there, penalties, temperature and noise included;
    tiny gaps are rounding."""


@dataclass
class MethodResult:
    """One method's figures over all groups; `seconds` holds each group's median over the repeats."""

    name: str
    seconds: list[float] = field(default_factory=list)
    repeat_seconds: list[float] = field(default_factory=list)
    """Each repeat's seconds over all groups."""
    tokens: int = 0
    """Of one repeat."""
    stats: Stats = field(default_factory=Stats)
    """Of the first repeat."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by the seconds from prompt to last token, prefill included."""
        return self.tokens / sum(self.seconds)

    def add_group(self, runs: Seq[Output]) -> None:
        """Count one group, whose output is the same in each of its repeats."""
        self.seconds.append(statistics.median(run.seconds for run in runs))
        self.repeat_seconds.extend([0.0] * (len(runs) - len(self.repeat_seconds)))
        for repeat, run in enumerate(runs):
            self.repeat_seconds[repeat] += run.seconds
        self.tokens += sum(len(ids) for ids in runs[0].token_ids)
        self.stats.add(runs[0].stats)

    def _repeats(self) -> list[float]:
        """Tokens per second of each repeat."""
        return [self.tokens / seconds for seconds in self.repeat_seconds]

    def to_json(self, baseline: MethodResult) -> dict[str, Any]:
        """The method's row of the report."""
        speedups = [own / base for own, base in zip(self._repeats(), baseline._repeats(), strict=True)]
        metrics = self.stats.metrics()
        outside = sum(metrics["stage_ms"][stage] for stage in OUTSIDE_ENGINES)
        outside += metrics["stage_ms"]["eagle"] - 1000 * self.stats.head_seconds
        step_total = sum(metrics["stage_ms"].values()) - metrics["stage_ms"]["prefill"]
        steps = self.stats.steps
        return {
            "method": self.name,
            "tokens": self.tokens,
            "seconds": sum(self.seconds),
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.tokens_per_second / baseline.tokens_per_second,
            "spread": {"tokens_per_second": _spread(self._repeats()), "speedup": _spread(speedups)},
            "step_ms": step_total / steps if steps else None,
            "outside_engines_ms_per_step": outside / steps if steps else None,
            "outside_engines_share": outside / step_total if step_total else None,
            "metrics": metrics if steps else None,
            "acceptance_per_position_by_source": self.stats.acceptance_by_source() if steps else None,
        }


@dataclass(frozen=True)
class Comparison:
    """All methods' results, the first of `methods` being the baseline that the others are compared with."""

    methods: list[MethodResult]
    differences: list[Difference]
    num_prompts: int
    settings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `trtspec bench --json`."""
        return {
            "settings": dict(self.settings),
            "prompts": self.num_prompts,
            "baseline": self.methods[0].name,
            "lossless": not self.differences,
            "methods": [result.to_json(self.methods[0]) for result in self.methods],
            "differences": [vars(difference) for difference in self.differences],
        }


def compare(
    session: Session,
    contenders: Seq[Contender],
    prompts: Seq[tuple[str, list[int]]],
    sampling: SamplingParams,
    *,
    batch_size: int = 1,
    repeats: int = 1,
    warmup: int = 1,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Run every contender on every group of prompts, `repeats` times, after `warmup` untimed groups.

    Args:
        session: answers what the target thinks of two tokens where outputs differ.
        contenders: the first is the baseline.
        prompts: (id, token ids).
        settings: what else the report should name.
        progress: called with groups done and all groups.
    """
    groups = [prompts[at : at + batch_size] for at in range(0, len(prompts), batch_size)]
    results = [MethodResult(contender.name) for contender in contenders]
    differences: list[Difference] = []
    short = replace(sampling, max_new_tokens=min(WARM_UP_TOKENS, sampling.max_new_tokens))
    for group in islice(cycle(groups), warmup):
        for contender in contenders:
            contender.complete([ids for _, ids in group], short)
    for done, group in enumerate(groups):
        outputs = _run_group(contenders, [ids for _, ids in group], sampling, repeats, first=done)
        for result, runs in zip(results, outputs, strict=True):
            result.add_group(runs)
            for run in _distinct(runs):
                differences += _differences(session, result.name, group, sampling, outputs[0][0], run)
        if progress:
            progress(done + 1, len(groups))
    used = {"batch_size": batch_size, "repeats": repeats, "warmup": warmup}
    used["max_new_tokens"] = sampling.max_new_tokens
    return Comparison(results, differences, len(prompts), {**(settings or {}), **used})


def _run_group(
    contenders: Seq[Contender], prompts: list[list[int]], sampling: SamplingParams, repeats: int, first: int
) -> list[list[Output]]:
    """Each contender's outputs; the order rotates, so that none always runs on what another left in the caches."""
    outputs: list[list[Output]] = [[] for _ in contenders]
    for repeat in range(repeats):
        for turn in range(len(contenders)):
            index = (first + repeat + turn) % len(contenders)
            outputs[index].append(contenders[index].complete(prompts, sampling))
    return outputs


def _differences(
    session: Session,
    method: str,
    group: Seq[tuple[str, list[int]]],
    sampling: SamplingParams,
    expected: Output,
    found: Output,
) -> list[Difference]:
    differences = []
    for (prompt_id, prompt), left, right in zip(group, expected.token_ids, found.token_ids, strict=True):
        if left == right:
            continue
        position = next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
        )
        a = left[position] if position < len(left) else None
        b = right[position] if position < len(right) else None
        gap = None
        if a is not None and b is not None:
            logits = session.next_logits(prompt + left[:position]).float().cpu().numpy()
            sampler = Sampler(sampling, np.array(prompt), len(logits))
            sampler.commit(left[:position])
            scores = sampler.scores(logits)
            gap = float(scores[a] - scores[b])
        differences.append(Difference(method, prompt_id, position, a, b, gap))
    return differences


def _distinct(runs: Seq[Output]) -> list[Output]:
    """One of each output: a repeat that gives other tokens than the first is worth a line, the same ones are not."""
    return list({str(run.token_ids): run for run in runs}.values())


def _spread(values: Seq[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _wall_seconds(completions: list[Completion]) -> float:
    """From the first request's start to the last one's end; they start together."""
    return max(completion.seconds for completion in completions)
