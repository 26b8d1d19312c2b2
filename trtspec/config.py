"""What a user can set, as frozen dataclasses; field names are the CLI's options with underscores.

Environment variables: TRTSPEC_CACHE moves the directory in which the demo target is kept.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trtspec.errors import ConfigError

METHODS = ("none", "ngram", "eagle", "ngram-eagle")
"""Drafting methods."""
HEAD_METHODS = ("eagle", "ngram-eagle")
"""Those that need a draft head."""
AUTO, EXCLUSIVE = "auto", "exclusive"
MERGES = (AUTO, EXCLUSIVE, "union")
"""How ngram-eagle combines its two drafters."""
OCCURRENCES = ("earliest", "latest")
RUNTIMES = ("onnxruntime", "tensorrt-rtx", "tensorrt")
HEAD_CHUNK = 128
"""Rows that a draft head takes in one pass over one sequence, and cache rows kept free for its draft tokens."""
HEAD_WIDTH = 32
"""Rows per sequence that a draft head takes in one pass over a batch."""
MAX_LOGPROBS = 20
MAX_QUEUED = 128
"""Requests that may wait for a slot where a server runs."""
SAMPLING_RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""The least and the most that the numbers in SamplingParams may be."""


def _at_least(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} is {value!r}; give an integer of at least {minimum}")


def _number(name: str, value: float, lowest: float, highest: float) -> float:
    """The value as a float. NaN is in no range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
        raise ConfigError(f"{name} is {value!r}; give a number from {lowest:g} to {highest:g}")
    return float(value)


def _integer_or_none(name: str, value: int | None, highest: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= highest):
        raise ConfigError(f"{name} is {value!r}; give an integer from 0 to {highest}, or None")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when a sequence ends.

    Penalties change the logits first, then temperature, top_k, top_p and min_p act, in this order.
    """

    max_new_tokens: int = 256
    """Tokens to generate at most."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the text is cut before the first one that appears."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    temperature: float = 0.0
    """What the logits are divided by; 0 is greedy: each token is the most probable one."""
    top_k: int = 0
    """Sample from this many most probable tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest most probable tokens that have at least this probability together."""
    min_p: float = 0.0
    """Sample from tokens of at least this probability relative to the most probable one's."""
    repetition_penalty: float = 1.0
    """What a positive logit of a token of prompt or output is divided by, and a negative one multiplied by."""
    presence_penalty: float = 0.0
    """What is taken off the logit of each token of the output."""
    frequency_penalty: float = 0.0
    """What is taken off the logit of a token for each time it occurs in the output."""
    seed: int | None = None
    """The same seed gives the same output whatever drafts; None: one is drawn for each prompt."""
    logprobs: int | None = None
    """Report each token's log-probability and this many most probable alternatives; None: no log-probabilities."""

    def __post_init__(self) -> None:
        _at_least("max_new_tokens", self.max_new_tokens, 1)
        if not isinstance(self.stop, tuple | list):
            raise ConfigError(f"stop is {self.stop!r}; give a tuple of strings")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos is {self.ignore_eos!r}; give True or False")
        object.__setattr__(self, "stop", tuple(self.stop))
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ConfigError("stop holds an empty string or something that is no string; give non-empty strings")
        self._check_choice()

    def _check_choice(self) -> None:
        """What decides which token is chosen, kept to ranges in which float32 logits neither overflow nor vanish."""
        _at_least("top_k", self.top_k, 0)
        _integer_or_none("seed", self.seed, 2**64 - 1)
        _integer_or_none("logprobs", self.logprobs, MAX_LOGPROBS)
        for name, (lowest, highest) in SAMPLING_RANGES.items():
            object.__setattr__(self, name, _number(name, getattr(self, name), lowest, highest))
        if 0 < self.temperature < 1e-6:
            raise ConfigError(f"temperature is {self.temperature!r}; give 0, which is greedy, or at least 1e-06")
        if self.top_p == 0:
            raise ConfigError("top_p is 0.0; give a number above 0, or temperature 0 for the most probable token")

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most probable one, penalties applied."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_plain(self) -> bool:
        """Whether each token is the target's own most probable one."""
        return self.is_greedy and not self.has_penalties


@dataclass(frozen=True)
class SpeculationConfig:
    """How draft tokens are made."""

    method: str | None = None
    """One of METHODS; None takes `Session.default_method`."""
    merge: str = AUTO
    """How ngram-eagle drafts: `auto` sizes drafts from both by measured cost, `exclusive` takes EAGLE where no lookup
    matches, `union` verifies both in one pass."""
    ngram_min: int = 2
    """Shortest match of the last tokens that gives a draft."""
    ngram_max: int = 5
    """Longest match that is looked for; the longest one found wins."""
    ngram_tokens: int = 10
    """Draft tokens a lookup gives at most."""
    ngram_occurrence: str = "earliest"
    """Which of several equally long matches is continued: the earliest or the latest."""
    ngram_branches: int = 1
    """Continuations with different first tokens that a lookup gives at most."""
    hybrid_ngram_min: int = 4
    """Shortest match for which ngram-eagle's `exclusive` merge leaves the head out, and shortest one of a lookup behind
    the head's own path (`union`, `auto`)."""
    eagle_tokens: int = 3
    """Draft tokens of an EAGLE chain, which is what eagle_topk 1 makes."""
    eagle_topk: int = 1
    """Tokens that the head proposes behind each node, and nodes that it goes on from; more than 1 makes a tree."""
    eagle_depth: int = 3
    """Times that an EAGLE tree is grown by a level after its first one."""
    tree_nodes: int = 15
    """Draft tokens of an EAGLE tree, the root not counted: the most probable of all that were proposed."""

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise ConfigError(f"method {self.method!r} is unknown; choose one of: {', '.join(METHODS)}")
        if self.merge not in MERGES:
            raise ConfigError(f"merge {self.merge!r} is unknown; choose one of: {', '.join(MERGES)}")
        if self.ngram_occurrence not in OCCURRENCES:
            choices = ", ".join(OCCURRENCES)
            raise ConfigError(f"ngram_occurrence {self.ngram_occurrence!r} is unknown; choose one of: {choices}")
        _at_least("ngram_min", self.ngram_min, 1)
        _at_least("ngram_tokens", self.ngram_tokens, 1)
        _at_least("ngram_max", self.ngram_max, 1)
        if self.ngram_max < self.ngram_min:
            raise ConfigError(f"ngram_max {self.ngram_max} is less than ngram_min {self.ngram_min}")
        _at_least("ngram_branches", self.ngram_branches, 1)
        _at_least("hybrid_ngram_min", self.hybrid_ngram_min, 1)
        self._check_eagle()

    def _check_eagle(self) -> None:
        """What a head's passes and its spare cache rows have room for."""
        _at_least("eagle_tokens", self.eagle_tokens, 1)
        _at_least("eagle_topk", self.eagle_topk, 1)
        _at_least("eagle_depth", self.eagle_depth, 0)
        _at_least("tree_nodes", self.tree_nodes, 1)
        if self.eagle_tokens > HEAD_CHUNK:
            raise ConfigError(f"eagle_tokens is {self.eagle_tokens}; give at most {HEAD_CHUNK}")
        if self.eagle_topk > HEAD_WIDTH:
            raise ConfigError(f"eagle_topk is {self.eagle_topk}; give at most {HEAD_WIDTH}")
        if self.eagle_topk * self.eagle_depth > HEAD_CHUNK:
            raise ConfigError(
                f"eagle_topk {self.eagle_topk} times eagle_depth {self.eagle_depth} is more than {HEAD_CHUNK}; "
                "lower one of them"
            )


@dataclass(frozen=True)
class Limits:
    """The sizes that an engine directory is built for."""

    max_seq_len: int
    """Tokens of prompt and output together."""
    max_batch_size: int = 8
    """Sequences decoded at once: KV cache slots."""
    max_draft_tokens: int = 32
    """Draft tree nodes of one sequence, without the root."""
    prefill_chunk: int = 256
    """Prompt tokens that one prefill pass takes at most."""

    def __post_init__(self) -> None:
        _at_least("max_seq_len", self.max_seq_len, 2)
        _at_least("max_batch_size", self.max_batch_size, 1)
        _at_least("max_draft_tokens", self.max_draft_tokens, 0)
        _at_least("prefill_chunk", self.prefill_chunk, 1)

    @property
    def max_width(self) -> int:
        """Rows of one sequence in a verification: the root and its draft tokens."""
        return self.max_draft_tokens + 1

    @property
    def cache_rows(self) -> int:
        """KV cache rows of a slot: a pass as wide as the batch's widest tree may start at the last position."""
        return self.max_seq_len + self.max_width

    @property
    def head_cache_rows(self) -> int:
        """KV cache rows of a draft head's slot: a refresh or an expansion may start at the last position."""
        return self.max_seq_len + HEAD_CHUNK

    def to_json(self) -> dict[str, Any]:
        """A JSON object: the fields by name."""
        return asdict(self)
