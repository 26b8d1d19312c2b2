"""Every graph input and output, declared once: name, dtype and named axes.

The graph builders, the engine builders, the engine runtimes and the checks read these declarations; nobody else
spells a tensor name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SERVING_DTYPES = ("float32", "float16", "bfloat16")
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}

INPUTS_EMBEDS = "inputs_embeds"
POSITION_IDS = "position_ids"
CACHE_LENGTH = "cache_length"
TREE_MASK = "tree_mask"
HIDDEN_STATES = "hidden_states"
AUX_HIDDEN_STATES = "aux_hidden_states"
HIDDEN_ROWS = "hidden_rows"
LOGITS = "logits"
LM_HEAD_WEIGHT = "lm_head.weight"
HIDDEN_INPUT = "hidden_input"
FEEDBACK = "feedback"
LOGIT_HIDDEN = "logit_hidden"
FEATURES = "features"
FUSED = "fused"
HISTORY = "history"
LENGTHS = "lengths"
EAGLE_TOKENS = "eagle_tokens"
EAGLE_PARENTS = "eagle_parents"
EAGLE_COUNTS = "eagle_counts"
ROOM = "room"
NGRAM_LIMITS = "ngram_limits"
DRAFT_TOKENS = "draft_tokens"
DRAFT_PARENTS = "draft_parents"
DRAFT_DEPTHS = "draft_depths"
DRAFT_SOURCES = "draft_sources"
DRAFT_COUNTS = "draft_counts"
MATCH_LENGTHS = "match_lengths"


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output; an axis is a size, or the name of a dynamic axis."""

    name: str
    dtype: str
    axes: tuple[int | str, ...]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The concrete shape with each named axis replaced by its size."""
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)


@dataclass(frozen=True)
class WeightRef:
    """Where a weight lies: a byte range of a file, `location` relative to the engine directory."""

    location: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GraphSpec:
    """The inputs and outputs of one graph; `aliases` maps an output to the input whose memory it updates in place."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)


def past_name(layer: int, kind: str) -> str:
    """Name of the KV cache input of a layer; `kind` is "key" or "value"."""
    return f"past_key_values.{layer}.{kind}"


def present_name(layer: int, kind: str) -> str:
    """Name of the KV cache output of a layer; `kind` is "key" or "value"."""
    return f"present.{layer}.{kind}"


def cache_names(num_layers: int) -> list[tuple[str, str]]:
    """(input name, output name) of every KV cache tensor, layer by layer, key before value."""
    return [(past_name(n, kind), present_name(n, kind)) for n in range(num_layers) for kind in ("key", "value")]


def target_spec(
    *,
    hidden_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    cache_rows: int,
    dtype: str,
    num_taps: int = 0,
) -> GraphSpec:
    """The decoder body: embeddings in, hidden states after the final norm out, KV cache updated in place.

    Args:
        cache_rows: length of the cache's sequence axis (static: TensorScatter's KV layer in TensorRT requires it).
        num_taps: residual streams that are concatenated into a second output, for EAGLE-3.
    """
    cache_axes: tuple[int | str, ...] = ("batch", num_kv_heads, cache_rows, head_dim)
    names = cache_names(num_layers)
    taps = (TensorSpec(AUX_HIDDEN_STATES, dtype, ("batch", "width", num_taps * hidden_size)),) if num_taps else ()
    return GraphSpec(
        name="target",
        inputs=(
            TensorSpec(INPUTS_EMBEDS, dtype, ("batch", "width", hidden_size)),
            TensorSpec(POSITION_IDS, "int64", ("batch", "width")),
            TensorSpec(CACHE_LENGTH, "int64", ("batch",)),
            TensorSpec(TREE_MASK, "bool", ("batch", 1, "width", "live_len")),
            *(TensorSpec(past, dtype, cache_axes) for past, _ in names),
        ),
        outputs=(
            TensorSpec(HIDDEN_STATES, dtype, ("batch", "width", hidden_size)),
            *taps,
            *(TensorSpec(present, dtype, cache_axes) for _, present in names),
        ),
        aliases={present: past for past, present in names},
    )


def draft_head_spec(
    *,
    hidden_size: int,
    input_hidden_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    cache_rows: int,
    dtype: str,
    separate_logit_hidden: bool,
) -> GraphSpec:
    """An EAGLE draft head: embeddings and hidden states in; what is fed back, and what the LM head reads, out.

    Args:
        input_hidden_size: width of the hidden states that it takes.
        separate_logit_hidden: whether the LM head reads something else than what is fed back.
    """
    cache_axes: tuple[int | str, ...] = ("batch", num_kv_heads, cache_rows, head_dim)
    names = cache_names(num_layers)
    rows: tuple[int | str, ...] = ("batch", "width", hidden_size)
    logit_hidden = (TensorSpec(LOGIT_HIDDEN, dtype, rows),) if separate_logit_hidden else ()
    return GraphSpec(
        name="draft_head",
        inputs=(
            TensorSpec(INPUTS_EMBEDS, dtype, rows),
            TensorSpec(HIDDEN_INPUT, dtype, ("batch", "width", input_hidden_size)),
            TensorSpec(POSITION_IDS, "int64", ("batch", "width")),
            TensorSpec(CACHE_LENGTH, "int64", ("batch",)),
            TensorSpec(TREE_MASK, "bool", ("batch", 1, "width", "live_len")),
            *(TensorSpec(past, dtype, cache_axes) for past, _ in names),
        ),
        outputs=(
            TensorSpec(FEEDBACK, dtype, rows),
            *logit_hidden,
            *(TensorSpec(present, dtype, cache_axes) for _, present in names),
        ),
        aliases={present: past for past, present in names},
    )


def fuse_spec(*, feature_size: int, hidden_size: int, dtype: str) -> GraphSpec:
    """EAGLE-3's fc over the target's concatenated features, once per refreshed row."""
    return GraphSpec(
        name="fuse",
        inputs=(TensorSpec(FEATURES, dtype, ("rows", feature_size)),),
        outputs=(TensorSpec(FUSED, dtype, ("rows", hidden_size)),),
    )


def lm_head_spec(
    *, hidden_size: int, vocab_size: int, dtype: str, weight_as_input: bool, name: str = "lm_head"
) -> GraphSpec:
    """An LM head on chosen rows; with `weight_as_input` the weight is bound at run time and so can be shared.

    Args:
        name: "lm_head", or "draft_lm_head" for the one that drafting uses.
    """
    weight = (TensorSpec(LM_HEAD_WEIGHT, dtype, (vocab_size, hidden_size)),) if weight_as_input else ()
    return GraphSpec(
        name=name,
        inputs=(TensorSpec(HIDDEN_ROWS, dtype, ("rows", hidden_size)), *weight),
        outputs=(TensorSpec(LOGITS, dtype, ("rows", vocab_size)),),
    )


def proposal_spec(*, max_len: int, branches: int, eagle_nodes: int, size: int) -> GraphSpec:
    """A sequence's committed tokens and EAGLE's tree in, one draft tree out; all int32.

    `room` is the nodes of a sequence's tree at most, `ngram_limits` the tokens of each of its n-gram matches at most.

    Args:
        max_len: length of the history's axis; what lies behind a sequence's length is undefined.
        branches: n-gram matches per sequence.
        eagle_nodes: room for EAGLE's nodes.
        size: room for the nodes of the tree.
    """

    def tensor(name: str, *axes: int) -> TensorSpec:
        return TensorSpec(name, "int32", ("batch", *axes))

    return GraphSpec(
        name="proposal",
        inputs=(
            tensor(HISTORY, max_len),
            tensor(LENGTHS),
            tensor(EAGLE_TOKENS, eagle_nodes),
            tensor(EAGLE_PARENTS, eagle_nodes),
            tensor(EAGLE_COUNTS),
            tensor(ROOM),
            tensor(NGRAM_LIMITS, 1),
        ),
        outputs=(
            tensor(DRAFT_TOKENS, size),
            tensor(DRAFT_PARENTS, size),
            tensor(DRAFT_DEPTHS, size),
            tensor(DRAFT_SOURCES, size),
            tensor(DRAFT_COUNTS),
            tensor(MATCH_LENGTHS, branches),
        ),
    )
