"""A session: engines, KV cache and drafters in memory, serving sequences."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType

import torch

from trtspec.checkpoint.target import TargetConfig
from trtspec.completion import Completion, StreamEvent, event_of
from trtspec.config import AUTO, SamplingParams, SpeculationConfig
from trtspec.decode.cost_store import COSTS_FILE, Costs, load_costs, machine_key, store_costs
from trtspec.decode.detokenize import TextStream
from trtspec.decode.generation import Generation
from trtspec.decode.profile import CONTEXT, measure_head, measure_target
from trtspec.decode.scheduler import Scheduler
from trtspec.decode.step import prompt_features, prompt_logits
from trtspec.draft.choose_lookup import choose_lookup
from trtspec.draft.eagle import EagleDrafter
from trtspec.draft.policy import AutoPolicy
from trtspec.draft.proposer import Drafters
from trtspec.engine.base import TORCH_DTYPES
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.loading import choose_runtime, load_draft_head, load_proposal, load_target
from trtspec.engine_dir import TOKENIZER_DIR, EngineDir
from trtspec.errors import ConfigError, EngineDirError, PromptError, UserError
from trtspec.prompt import Prompt, check_prompts, prompt_ids
from trtspec.sequence import Sequence
from trtspec.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Session:
    """Engines in memory. Not thread-safe: one thread uses it at a time."""

    def __init__(self, engine_dir: EngineDir, runtime: str, tokenizer: Tokenizer) -> None:
        """Use `Session.open`."""
        self.engine_dir = engine_dir
        self.runtime = runtime
        self.tokenizer = tokenizer
        self.limits = engine_dir.limits
        self._config = _target_config(engine_dir)
        self._target, device = load_target(engine_dir, runtime, self._config)
        self._cache = KVCache(
            num_layers=self._config.num_layers,
            slots=self.limits.max_batch_size,
            num_kv_heads=self._config.num_kv_heads,
            rows=self.limits.cache_rows,
            head_dim=self._config.head_dim,
            dtype=TORCH_DTYPES[engine_dir.dtype],
            device=device,
        )
        self._eagle: EagleDrafter | None = None
        try:
            if engine_dir.draft_head is not None:
                self._eagle = EagleDrafter(*load_draft_head(engine_dir, runtime, self._target))
            lookup = choose_lookup(device, self.limits, load_proposal(engine_dir, runtime))
        except BaseException:
            self._target.close()
            raise
        self._drafters = Drafters(lookup, self._eagle)
        self._scheduler = Scheduler(self._target, self._cache, self.limits, self._drafters)
        self._machine = machine_key(runtime, device)
        self._eos = frozenset(self._config.eos_token_ids)
        self._closed = False

    @classmethod
    def open(cls, path: str | Path, runtime: str | None = None, threads: int | None = None) -> Session:
        """Open an engine directory.

        Args:
            runtime: one that the directory was built for; None takes the first that is usable on this machine.
            threads: CPU threads of ONNX Runtime, fixed for the process by its first session.

        Raises:
            EngineDirError: the directory is missing, damaged or altered.
            UserError: the runtime is not in the directory or not usable here, or memory does not suffice.
            EngineError: an engine could not be loaded.
        """
        engine_dir = EngineDir.load(path)
        chosen = choose_runtime(engine_dir, runtime, threads)
        # Hashing reads every file once; beside the loading of the engines, which reads the same files, it costs little.
        check = _Check(engine_dir)
        session = None
        try:
            session = cls(engine_dir, chosen, Tokenizer(engine_dir.path / TOKENIZER_DIR))
        finally:
            try:
                check.join()
            except BaseException:
                if session is not None:
                    session.close()
                raise
        return session

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free the engines; nothing can be generated afterwards."""
        if not self._closed:
            self._closed = True
            if self._drafters.policy is not None:
                policy = self._drafters.policy
                store_costs(self.engine_dir.path, self._machine, Costs(policy.verify, policy.head))
            self._target.close()
            self._drafters.ngram.close()
            if self._eagle is not None:
                self._eagle.head.close()

    @property
    def methods(self) -> tuple[str, ...]:
        """Drafting methods that this directory supports."""
        return self.engine_dir.methods

    @property
    def default_speculation(self) -> SpeculationConfig:
        """How drafts are made where no SpeculationConfig is given: as `trtspec tune` left it in the directory."""
        return self.engine_dir.default_speculation

    @property
    def default_method(self) -> str:
        """The method where none is asked for: the tuned one, else "ngram-eagle" where there is a head, else "ngram"."""
        method = self.default_speculation.method
        assert method is not None
        return method

    @property
    def machine(self) -> str:
        """What measurements of this session hold for: runtime, processor, threads."""
        return self._machine

    def generate(
        self,
        prompts: Seq[Prompt],
        sampling: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> list[Completion]:
        """Complete the prompts, as many at once as the directory has slots; results in the order of the prompts.

        Args:
            prompts: raw text, token ids, or chat messages (for the chat template).
            speculation: None takes `default_speculation`.

        Raises:
            PromptError: a prompt is empty, too long, or holds ids that are not in the vocabulary.
            ConfigError: the directory doesn't support the method.
        """
        done: dict[int, Completion] = {}
        for event in self._run(self._prepare(prompts, sampling, speculation), whole=True):
            if event.completion is not None:
                done[event.index] = event.completion
        return [done[index] for index in range(len(prompts))]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, speculation: SpeculationConfig | None = None
    ) -> Iterator[StreamEvent]:
        """Complete one prompt, yielding text as it grows; closing the iterator cancels."""
        return self.stream_batch([prompt], sampling, speculation)

    def stream_batch(
        self,
        prompts: Seq[Prompt],
        sampling: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> Iterator[StreamEvent]:
        """Complete the prompts, yielding each one's text as it grows; closing the iterator cancels them all."""
        return self._run(self._prepare(prompts, sampling, speculation), whole=False)

    def prepare(self) -> None:
        """Measure now what passes cost where the engine directory doesn't know it: later the first prompt would wait.

        Only the `auto` merge asks for that; without a draft head this does nothing.
        """
        if self._eagle is not None:
            self._prepare_policy()

    def submit(
        self, prompt: Prompt, sampling: SamplingParams | None = None, speculation: SpeculationConfig | None = None
    ) -> Generation:
        """Queue one prompt, for a caller that steps the session itself; `generate` and `stream` step it for theirs.

        Raises:
            PromptError, ConfigError: as for `generate`.
        """
        [generation] = self._prepare([prompt], sampling, speculation)
        self._add(generation)
        return generation

    def step(self) -> list[Generation]:
        """Read prompts that are due, a chunk's tokens at most, and run one decode step.

        Returns:
            The sequences that got tokens; `completion.event_of` tells them.

        Raises:
            EngineError: an engine failed; cancel what is running, since its KV may be half-written.
        """
        return self._scheduler.step()

    def cancel(self, generation: Generation) -> None:
        """End a sequence with reason "cancelled" and free its slot at once; a finished one is left as it is."""
        self._scheduler.cancel(generation)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return self._scheduler.num_waiting

    @property
    def running(self) -> list[Generation]:
        """Sequences with a slot."""
        return self._scheduler.running

    def _add(self, generation: Generation) -> None:
        generation.started = time.perf_counter()
        self._scheduler.add(generation)

    def _prepare(
        self, prompts: Seq[Prompt], sampling: SamplingParams | None, speculation: SpeculationConfig | None
    ) -> list[Generation]:
        """Check all prompts before any is begun."""
        if self._closed:
            raise UserError("the session is closed; open the engine directory again")
        sampling, speculation = sampling or SamplingParams(), speculation or self.default_speculation
        check_prompts(prompts)
        if not isinstance(sampling, SamplingParams) or not isinstance(speculation, SpeculationConfig):
            raise ConfigError("sampling must be a SamplingParams and speculation a SpeculationConfig")
        if speculation.method is None:
            speculation = dataclasses.replace(speculation, method=self.default_method)
        if speculation.method not in self.methods:
            raise ConfigError(
                f"method {speculation.method} needs a draft head, which {self.engine_dir.path} has not: build it with "
                f"--eagle HEAD, or choose one of: {', '.join(self.methods)}"
            )
        generations = [self._generation(i, prompt, sampling, speculation) for i, prompt in enumerate(prompts)]
        if speculation.method == "ngram-eagle" and speculation.merge == AUTO:
            self._prepare_policy()
        return generations

    def _prepare_policy(self) -> None:
        """Know what passes cost: from the engine directory, or measured now, which takes some seconds."""
        if self._drafters.policy is not None:
            return
        assert self._eagle is not None
        costs = load_costs(self.engine_dir.path, self._machine)
        if costs is None:
            logger.info("measuring pass times, once for this directory and machine (takes some seconds)")
            # Behind everything that sequences under way have in their slots.
            row = max(min(CONTEXT, self.limits.max_seq_len - 1), self._scheduler.longest)
            costs = Costs(
                measure_target(self._target, self._cache, row, self.limits.max_width),
                measure_head(self._eagle.head, self._eagle.cache, row),
            )
            if not store_costs(self.engine_dir.path, self._machine, costs):
                logger.warning(
                    "%s can't be written, so each session measures pass times anew; make the directory writable once",
                    self.engine_dir.path / COSTS_FILE,
                )
        widths = [self._target.buckets.width(rows) for rows in range(1, self.limits.max_width + 1)]
        self._drafters.policy = AutoPolicy(costs.verify, costs.head, widths)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            PromptError: as for `generate`.
        """
        ids = prompt_ids(prompt, self.tokenizer)
        if len(ids) >= self.limits.max_seq_len:
            raise PromptError(
                f"the prompt has {len(ids)} tokens and the engine directory holds {self.limits.max_seq_len} per "
                "sequence, output included; shorten it or build with a larger --max-seq-len"
            )
        if min(ids) < 0 or max(ids) >= self._config.vocab_size:
            raise PromptError(f"token ids must lie in 0..{self._config.vocab_size - 1}, found {min(ids)}..{max(ids)}")
        return ids

    def next_logits(self, token_ids: Seq[int]) -> torch.Tensor:
        """The target's logits after these tokens, `[vocab]`; nothing may be generating meanwhile."""
        sequence = self._prompt_only(token_ids)
        return prompt_logits(sequence, self._target, self._cache.view(0, 1), self.limits.prefill_chunk).clone()

    def features(self, token_ids: Seq[int]) -> torch.Tensor:
        """What a draft head takes for each of these tokens, `[tokens, features]`; nothing may be generating meanwhile.

        The target's hidden states after its final norm, or the residual streams that the directory's EAGLE-3 head is
        for.
        """
        sequence = self._prompt_only(token_ids)
        return prompt_features(sequence, self._target, self._cache.view(0, 1), self.limits.prefill_chunk)

    def _prompt_only(self, token_ids: Seq[int]) -> Sequence:
        ids = self.encode(token_ids)
        return Sequence.start(0, ids, self.limits.max_seq_len, SamplingParams(), SpeculationConfig())

    def _generation(
        self, index: int, prompt: Prompt, sampling: SamplingParams, speculation: SpeculationConfig
    ) -> Generation:
        if not sampling.is_greedy and sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(63))
        sequence = Sequence.start(index, self.encode(prompt), self.limits.max_seq_len, sampling, speculation)
        return Generation(sequence, TextStream(self.tokenizer, sampling.stop), self._eos)

    def _run(self, generations: list[Generation], whole: bool) -> Iterator[StreamEvent]:
        """Step the scheduler while any of these is unfinished; other streams' sequences advance with them.

        With `whole`, each sequence yields one event, when it is finished: no text is decoded on the way.
        """
        try:
            for generation in generations:
                self._add(generation)
            pending = list(generations)
            while pending:
                ready = [g for g in pending if g.has_news and (g.finished or not whole)]
                if not ready:
                    self._scheduler.step()
                for generation in ready:
                    yield event_of(generation)
                pending = [generation for generation in pending if not generation.finished or generation.has_news]
        finally:
            for generation in generations:
                self._scheduler.cancel(generation)


def _target_config(engine_dir: EngineDir) -> TargetConfig:
    try:
        return TargetConfig.from_json(engine_dir.target.config)
    except (KeyError, TypeError) as error:
        raise EngineDirError(
            f"{engine_dir.path} describes its target in terms that this trtspec doesn't know ({error}); build it again"
        ) from None


class _Check(threading.Thread):
    """Verifies an engine directory in the background."""

    def __init__(self, engine_dir: EngineDir) -> None:
        super().__init__(name="trtspec-verify", daemon=True)
        self._engine_dir = engine_dir
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._engine_dir.verify()
        except (EngineDirError, OSError) as error:
            self._error = error

    def join(self, timeout: float | None = None) -> None:
        """Wait for the result, and raise what was found."""
        super().join(timeout)
        if self._error:
            raise self._error
