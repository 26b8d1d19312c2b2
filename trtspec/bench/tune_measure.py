"""What `trtspec tune` measures with: a session, whose tokens are checked on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq

from trtspec.bench.tune_race import Measured
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.errors import EngineError
from trtspec.prompt import Prompt
from trtspec.session import Session

WARM_UP_TOKENS = 16
"""What settings generate untimed before their first measurement, at most."""

_PLAIN = SpeculationConfig(method="none")


class SessionMeasure:
    """Completes groups of prompts greedily, and compares every token with what plain decoding gives."""

    def __init__(
        self,
        session: Session,
        groups: Seq[Seq[tuple[str, list[int]]]],
        sampling: SamplingParams,
        label: Callable[[SpeculationConfig], str],
    ) -> None:
        """
        Args:
            groups: (id, token ids) of the prompts that are completed at once.
            label: how messages call settings.
        """
        self._session = session
        self._groups = groups
        self._sampling = sampling
        self._label = label
        self._expected: dict[int, list[list[int]]] = {}
        self._plain: tuple[int, Measured] | None = None
        """The group for which the expected tokens were found last, and what that took."""
        self._warm: set[SpeculationConfig] = set()

    def __call__(self, settings: SpeculationConfig, group: int) -> Measured:
        """Complete a group. What plain decoding gives is found when the group is first asked for.

        Raises:
            EngineError: other tokens than plain decoding's came; the message names prompt and position.
        """
        if group not in self._expected:
            self._expected[group], measured = self._complete(_PLAIN, group)
            self._plain = (group, measured)
        if settings.method == _PLAIN.method and self._plain is not None and self._plain[0] == group:
            # Run a moment ago. It counts once: another time it would be another moment's.
            measured, self._plain = self._plain[1], None
            return measured
        found, measured = self._complete(settings, group)
        self._check(settings, group, found)
        return measured

    def _complete(self, settings: SpeculationConfig, group: int) -> tuple[list[list[int]], Measured]:
        """The tokens of a group's prompts, and what they took; the settings are run in before their first time."""
        prompts: Seq[Prompt] = [ids for _, ids in self._groups[group]]
        if settings not in self._warm:
            self._warm.add(settings)
            tokens = min(WARM_UP_TOKENS, self._sampling.max_new_tokens)
            self._session.generate(prompts, dataclasses.replace(self._sampling, max_new_tokens=tokens), settings)
        completions = self._session.generate(prompts, self._sampling, settings)
        found = [completion.token_ids for completion in completions]
        # They start together.
        return found, Measured(sum(map(len, found)), max(completion.seconds for completion in completions))

    def _check(self, settings: SpeculationConfig, group: int, found: Seq[list[int]]) -> None:
        for (prompt_id, prompt), expected, own in zip(self._groups[group], self._expected[group], found, strict=True):
            if own == expected:
                continue
            pairs = zip(expected, own, strict=False)
            shorter = min(len(expected), len(own))
            at = next((position for position, (a, b) in enumerate(pairs) if a != b), shorter)
            gap = self._gap(prompt, expected, own, at) if at < shorter else "one of them ends there"
            raise EngineError(
                f"{self._label(settings)} gave other tokens than none: prompt {prompt_id}, token {at}, "
                f"{own[at] if at < len(own) else 'nothing'} instead of "
                f"{expected[at] if at < len(expected) else 'nothing'} ({gap}); nothing was written"
            )

    def _gap(self, prompt: list[int], expected: Seq[int], found: Seq[int], at: int) -> str:
        """How much the target prefers the one token to the other: rounding, or an error."""
        logits = self._session.next_logits([*prompt, *expected[:at]]).float()
        return f"logit gap {float(logits[expected[at]] - logits[found[at]]):.2e}"
