"""What a target's and a draft head's decoder layers have in common: sizes, and the weights that follow from them."""

from __future__ import annotations

from typing import Protocol


class LayerConfig(Protocol):
    """The part of a model's configuration that its decoder layers depend on."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads; each serves num_heads / num_kv_heads query heads."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have biases."""

    @property
    def output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""

    @property
    def mlp_bias(self) -> bool:
        """Whether the MLP's projections have biases."""

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head (Qwen3)."""

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of every norm."""


def layer_shapes(config: LayerConfig, *, input_norm: str | None, attended: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's weights, matrices `[out, in]`.

    Args:
        input_norm: name of the norm before attention, None where there is none.
        attended: columns of what the query, key and value projections read.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = {
        "self_attn.q_proj": (query, attended, config.qkv_bias),
        "self_attn.k_proj": (key_value, attended, config.qkv_bias),
        "self_attn.v_proj": (key_value, attended, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {} if input_norm is None else {input_norm: (hidden,)}
    for name, (rows, columns, bias) in linear.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes
