"""The target model's configuration and the weights it must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trtspec.checkpoint.layer import layer_shapes
from trtspec.checkpoint.rope import RopeConfig
from trtspec.errors import CheckpointError


@dataclass(frozen=True)
class Architecture:
    """What an architecture adds to the plain layer, which of config.json's options it has, and its own defaults."""

    qkv_bias: bool = False
    qk_norm: bool = False
    attention_bias_optional: bool = False
    mlp_bias_optional: bool = False
    head_dim: int | None = None
    sliding_window: int | None = None


ARCHITECTURES = {
    "llama": Architecture(attention_bias_optional=True, mlp_bias_optional=True),
    "mistral": Architecture(sliding_window=4096),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm=True, attention_bias_optional=True, head_dim=128),
}

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TargetConfig:
    """Everything a graph needs to know of a decoder-only target."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    rope: RopeConfig

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> TargetConfig:
        """Read a Hugging Face config.json (and generation_config.json for the end-of-sequence ids).

        Raises:
            CheckpointError: a field is missing, or names something that isn't supported.
        """
        name = _architecture(config)
        _reject_unsupported(config)
        traits = ARCHITECTURES[name]
        try:
            num_heads = int(config["num_attention_heads"])
            hidden_size = int(config["hidden_size"])
            bias = traits.attention_bias_optional and bool(config.get("attention_bias", False))
            result = cls(
                architecture=name,
                hidden_size=hidden_size,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or traits.head_dim or hidden_size // num_heads),
                vocab_size=int(config["vocab_size"]),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                max_position_embeddings=int(config["max_position_embeddings"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=traits.qkv_bias or bias,
                output_bias=bias,
                mlp_bias=traits.mlp_bias_optional and bool(config.get("mlp_bias", False)),
                qk_norm=traits.qk_norm,
                sliding_window=_sliding_window(name, config),
                eos_token_ids=_eos(config, generation or {}),
                rope=RopeConfig.from_hf(config),
            )
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]!r}; is it a {name} model's?") from None
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"config.json has a field of the wrong kind: {error}") from None
        result.check()
        return result

    def check(self) -> None:
        """Raise CheckpointError where sizes contradict each other."""
        for field in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise CheckpointError(f"config.json: {field} is {getattr(self, field)}, expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {self.num_heads} is no multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim {self.head_dim} is odd; rotary embeddings need it even")
        if len(self.rope.frequency_factors) not in (0, self.head_dim // 2):
            raise CheckpointError(
                f"{len(self.rope.frequency_factors)} rotary frequency factors, expected {self.head_dim // 2}"
            )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {**asdict(self), "eos_token_ids": list(self.eos_token_ids), "rope": self.rope.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TargetConfig:
        """Inverse of `to_json`; raises KeyError or TypeError for what another version of trtspec wrote."""
        values = {
            **data,
            "eos_token_ids": tuple(data["eos_token_ids"]),
            "rope": RopeConfig.from_json(data["rope"]),
        }
        return cls(**values)

    def kv_bytes_per_token(self, item_size: int) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_size

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape, `[out, in]`, embedding first, then layer by layer, LM head last."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        layers = layer_shapes(self, input_norm="input_layernorm.weight", attended=self.hidden_size)
        for layer in range(self.num_layers):
            shapes.update({f"model.layers.{layer}.{suffix}": shape for suffix, shape in layers.items()})
        shapes[FINAL_NORM] = (self.hidden_size,)
        if not self.tied:
            shapes[LM_HEAD] = (self.vocab_size, self.hidden_size)
        return shapes


def _architecture(config: Mapping[str, Any]) -> str:
    name = config.get("model_type")
    if name not in ARCHITECTURES:
        listed = ", ".join(config.get("architectures") or []) or "none listed"
        raise CheckpointError(
            f"model_type {name!r} ({listed}) is not supported as a target; supported: {', '.join(ARCHITECTURES)}"
        )
    return str(name)


def _reject_unsupported(config: Mapping[str, Any]) -> None:
    """Options that change the output and that the graph does not have."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"the weights are quantised ({method}), which is not read; use the unquantised checkpoint or a GGUF file"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {activation!r} is not supported (only silu)")
    for key in ("num_local_experts", "num_experts"):
        if (config.get(key) or 0) > 1:
            raise CheckpointError(f"{key} {config[key]}: mixture-of-experts targets are not supported yet")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            raise CheckpointError(f"{key} {config[key]}: soft-capping is not supported")
    if (config.get("pretraining_tp") or 1) != 1:
        raise CheckpointError(f"pretraining_tp {config['pretraining_tp']} is not supported (only 1)")


def _sliding_window(name: str, config: Mapping[str, Any]) -> int | None:
    """The window where some layer uses one, else None."""
    window = config.get("sliding_window", ARCHITECTURES[name].sliding_window)
    if not window or name == "llama":
        return None
    if name == "mistral":
        return int(window)
    if not config.get("use_sliding_window"):
        return None
    layer_types = config.get("layer_types")
    if layer_types is not None:
        return int(window) if "sliding_attention" in layer_types else None
    return int(window) if config.get("max_window_layers", 28) < config["num_hidden_layers"] else None


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
