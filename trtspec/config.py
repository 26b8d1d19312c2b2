"""What a user can set, as frozen dataclasses; field names are the CLI's options with underscores.

Environment variables: TRTSPEC_CACHE moves the directory in which the demo target is kept.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trtspec.errors import ConfigError

METHODS = ("none", "ngram", "eagle")
"""Drafting methods."""
HEAD_METHODS = ("eagle",)
"""Those that need a draft head."""
OCCURRENCES = ("earliest", "latest")
RUNTIMES = ("onnxruntime", "tensorrt-rtx", "tensorrt")
HEAD_CHUNK = 128
"""Rows that a draft head takes in one pass over one sequence, and cache rows kept free for its draft tokens."""
HEAD_WIDTH = 32
"""Rows per sequence that a draft head takes in one pass over a batch."""


def _at_least(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} is {value!r}; give an integer of at least {minimum}")


@dataclass(frozen=True)
class SamplingParams:
    """When a sequence ends. Decoding is greedy: each token is the target's most probable one."""

    max_new_tokens: int = 256
    """Tokens to generate at most."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the text is cut before the first one that appears."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""

    def __post_init__(self) -> None:
        _at_least("max_new_tokens", self.max_new_tokens, 1)
        if not isinstance(self.stop, tuple | list):
            raise ConfigError(f"stop is {self.stop!r}; give a tuple of strings")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos is {self.ignore_eos!r}; give True or False")
        object.__setattr__(self, "stop", tuple(self.stop))
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ConfigError("stop holds an empty string or something that is no string; give non-empty strings")


@dataclass(frozen=True)
class SpeculationConfig:
    """How draft tokens are made."""

    method: str | None = None
    """One of METHODS; None takes `Session.default_method`."""
    ngram_min: int = 2
    """Shortest match of the last tokens that gives a draft."""
    ngram_max: int = 5
    """Longest match that is looked for; the longest one found wins."""
    ngram_tokens: int = 10
    """Draft tokens a lookup gives at most."""
    ngram_occurrence: str = "earliest"
    """Which of several equally long matches is continued: the earliest or the latest."""
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
        if self.ngram_occurrence not in OCCURRENCES:
            choices = ", ".join(OCCURRENCES)
            raise ConfigError(f"ngram_occurrence {self.ngram_occurrence!r} is unknown; choose one of: {choices}")
        _at_least("ngram_min", self.ngram_min, 1)
        _at_least("ngram_tokens", self.ngram_tokens, 1)
        _at_least("ngram_max", self.ngram_max, 1)
        if self.ngram_max < self.ngram_min:
            raise ConfigError(f"ngram_max {self.ngram_max} is less than ngram_min {self.ngram_min}")
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
