"""The canonical record of an EAGLE draft head and the weights it must have, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trtspec.checkpoint.layer import layer_shapes
from trtspec.checkpoint.rope import RopeConfig
from trtspec.errors import ConfigError

EAGLE, EAGLE3 = "eagle", "eagle3"
KINDS = (EAGLE, EAGLE3)
FEATURES = ("post_norm", "boundaries")
FEATURE_NORMS = ("none", "per_feature", "whole")
RESIDUALS = ("raw", "normed")
FEEDBACKS = ("pre_norm", "post_norm")

FC, FC_BIAS = "fc.weight", "fc.bias"
EMBEDDING_NORM, HIDDEN_NORM = "embedding_norm.weight", "hidden_norm.weight"
FEATURE_NORM = "feature_norm.weight"
FIRST_INPUT_NORM, OUTPUT_NORM = "layers.0.input_norm.weight", "norm.weight"
HEAD_EMBEDDING, HEAD_LM_HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class DraftHeadConfig:
    """Everything a graph needs to know of a draft head. e is the token's embedding, f the target's feature.

    An "eagle" head (EAGLE-1 and 2) runs fc([e; f]) through its layers at every step. An "eagle3" head makes its first
    hidden state h = fc(f) and attends over [embedding_norm(e); hidden_norm(h)] in layer 0; at later steps h is what
    it fed back. Boundary b of the target is its residual stream after b layers, before any final norm.
    """

    kind: str
    """One of KINDS."""
    source_format: str
    """Who wrote the file, as far as its names and fields tell."""
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """The target's vocabulary: rows of the embedding, whichever is used."""
    draft_vocab_size: int
    """Rows of the LM head that the draft uses."""
    rms_norm_eps: float
    """Of every norm in the head; the target's may differ."""
    rope: RopeConfig
    max_position_embeddings: int
    """Positions the head was trained for, not the size of its rotary tables."""
    feature: str
    """One of FEATURES: the target's hidden state after its final norm, or its residual stream at `boundaries`."""
    boundaries: tuple[int, ...]
    """Boundaries of the target whose residual streams are concatenated, ascending; empty for "post_norm"."""
    feature_norm: str
    """One of FEATURE_NORMS, before fc: none, one norm per feature, or one over their concatenation."""
    has_fc: bool
    fc_bias: bool
    embedding_norm: bool
    """eagle: a norm on e before fc; eagle3: always, before layer 0's attention."""
    hidden_norm: bool
    """eagle: a norm on f before fc; eagle3: always, on h before layer 0's attention."""
    input_norm: bool
    """eagle: layer 0 has a norm before its attention (later layers always have); eagle3: never."""
    residual: str
    """One of RESIDUALS: what layer 0's attention is added to, h (eagle: its input) or hidden_norm(h)."""
    output_norm: bool
    """A norm before the LM head."""
    feedback: str
    """One of FEEDBACKS: what the next step receives, the last layer's output or that after the output norm."""
    qkv_bias: bool
    qk_norm: bool
    output_bias: bool
    mlp_bias: bool
    own_embedding: bool
    """The head's embedding table is used, not the target's."""
    own_lm_head: bool
    """The head's LM head is used, not the target's (of which `token_ids`, where given, names the rows)."""
    token_ids: tuple[int, ...] | None
    """Target token id of each draft LM head row; None is the identity."""
    double_hidden_norm: bool = False
    """eagle3, experimental: layer 0 attends over hidden_norm(embedding_norm(h)) in place of hidden_norm(h)."""

    def __post_init__(self) -> None:
        """Check the fields against each other.

        Raises:
            ConfigError: a field has an unknown value, or two contradict each other.
        """
        for name, allowed in (
            ("kind", KINDS),
            ("feature", FEATURES),
            ("feature_norm", FEATURE_NORMS),
            ("residual", RESIDUALS),
            ("feedback", FEEDBACKS),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected one of: {', '.join(allowed)}")
        if (self.feature == "boundaries") != bool(self.boundaries):
            raise ConfigError(
                f"feature {self.feature!r} with boundaries {list(self.boundaries)}; give one or the other"
            )
        if self.token_ids is not None and len(self.token_ids) != self.draft_vocab_size:
            raise ConfigError(f"{len(self.token_ids)} token ids for a draft vocabulary of {self.draft_vocab_size}")
        if self.feedback == "post_norm" and not self.output_norm:
            raise ConfigError("feedback post_norm without an output norm; use pre_norm")

    @property
    def num_features(self) -> int:
        """Target hidden states that are concatenated for one row."""
        return len(self.boundaries) or 1

    def kv_bytes_per_token(self, item_size: int) -> int:
        """Bytes of the head's KV cache that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_size

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        ids = None if self.token_ids is None else list(self.token_ids)
        return {**asdict(self), "boundaries": list(self.boundaries), "token_ids": ids, "rope": self.rope.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DraftHeadConfig:
        """Inverse of `to_json`."""
        values = {
            **data,
            "boundaries": tuple(data["boundaries"]),
            "token_ids": None if data["token_ids"] is None else tuple(data["token_ids"]),
            "rope": RopeConfig.from_json(data["rope"]),
        }
        return cls(**values)


def weight_shapes(config: DraftHeadConfig) -> dict[str, tuple[int, ...]]:
    """Every weight's canonical name and shape, matrices `[out, in]`: inputs, layer by layer, output, tables."""
    hidden, target = config.hidden_size, config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.feature_norm == "whole":
        shapes[FEATURE_NORM] = (config.num_features * target,)
    elif config.feature_norm == "per_feature":
        shapes.update({f"feature_norm.{n}.weight": (target,) for n in range(config.num_features)})
    if config.has_fc:
        columns = hidden + target if config.kind == EAGLE else config.num_features * target
        shapes[FC] = (hidden, columns)
    if config.fc_bias:
        shapes[FC_BIAS] = (hidden,)
    if config.embedding_norm:
        shapes[EMBEDDING_NORM] = (hidden,)
    if config.hidden_norm:
        shapes[HIDDEN_NORM] = (hidden,)
    for layer in range(config.num_layers):
        attended = 2 * hidden if config.kind == EAGLE3 and layer == 0 else hidden
        input_norm = "input_norm.weight" if layer > 0 or config.input_norm else None
        layers = layer_shapes(config, input_norm=input_norm, attended=attended)
        shapes.update({f"layers.{layer}.{suffix}": shape for suffix, shape in layers.items()})
    if config.output_norm:
        shapes[OUTPUT_NORM] = (hidden,)
    if config.own_embedding:
        shapes[HEAD_EMBEDDING] = (config.vocab_size, hidden)
    if config.own_lm_head:
        shapes[HEAD_LM_HEAD] = (config.draft_vocab_size, hidden)
    return shapes
