"""EAGLE draft heads in plain torch: all rows at once, no cache, in float64.

Shares no code with the graphs, nor with the reader of checkpoints: it opens a head's files by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class Switches:
    """What can be got wrong in a head; None is what the file says."""

    swap_concat: bool = False
    first_input_norm: bool | None = None
    final_norm: bool | None = None
    feed_post_norm: bool | None = None
    norm_before_residual: bool | None = None
    double_hidden_norm: bool = False
    theta: float | None = None
    eps: float | None = None


class Outputs(NamedTuple):
    """Of some rows: what is fed back, what the LM head reads, and its logits."""

    feedback: torch.Tensor
    logit_hidden: torch.Tensor
    logits: torch.Tensor


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Tensors in float64 (integers as they are) by name without prefixes; the first layer is called layers.0."""
    file = directory / "model.safetensors"
    stored = load_file(file) if file.exists() else torch.load(directory / "pytorch_model.bin", weights_only=True)
    weights = {}
    for name, tensor in stored.items():
        short = name.replace("model.", "").replace("midlayer.", "layers.0.")
        weights[short] = tensor.double() if tensor.is_floating_point() else tensor
    return weights


def read_fields(directory: Path) -> dict[str, Any]:
    """config.json with what is nested in it on one level."""
    fields: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for key in ("model", "transformer_layer_config", "eagle_config", "rope_parameters"):
        fields |= fields.get(key) or {}
    return fields


class HeadOracle:
    """A head's directory, and the target's tables for what the head has none of."""

    def __init__(
        self, directory: Path, embedding: torch.Tensor, lm_head: torch.Tensor, switches: Switches | None = None
    ) -> None:
        self.weights = read_weights(directory)
        self.fields = read_fields(directory)
        self._switches = switches or Switches()
        self._target_embedding, self._target_lm_head = embedding.double(), lm_head.double()
        self.eagle3 = "layers.0.hidden_norm.weight" in self.weights
        self._eps = self._switches.eps or self.fields["rms_norm_eps"]
        self._theta, self._stretch = self._rope()
        self._heads = self.fields["num_attention_heads"]
        self._head_dim = self.weights["layers.0.self_attn.q_proj.weight"].shape[0] // self._heads

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Embedding rows `[tokens, hidden]`."""
        return self.weights.get("embed_tokens.weight", self._target_embedding)[list(tokens)]

    def token_ids(self) -> list[int]:
        """The target's id of each logit."""
        if "token_map" in self.weights:
            return [int(token) for token in self.weights["token_map"]]
        if "d2t" in self.weights:
            return [row + int(offset) for row, offset in enumerate(self.weights["d2t"])]
        return list(range(self._target_lm_head.shape[0]))

    def first_hidden(self, features: torch.Tensor) -> torch.Tensor:
        """EAGLE-1: the target's hidden states themselves. EAGLE-3: fc of them, perhaps normed."""
        if not self.eagle3 or "fc.weight" not in self.weights:
            return features.double()
        x = features.double()
        if self.fields.get("norm_before_fc"):
            x = self._norm(x, "input_norm.weight")
        if self.fields.get("fc_norm"):
            size = self.weights["fc_norm.0.weight"].shape[0]
            x = torch.cat([self._norm(part, f"fc_norm.{n}.weight") for n, part in enumerate(x.split(size, dim=1))], 1)
        return self._linear(x, "fc")

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> Outputs:
        """All rows of a sequence; visible `[rows, rows]` says which rows (across) a row (down) attends to."""
        residual, attended = (self._enter_eagle3 if self.eagle3 else self._enter_eagle)(embeds, hidden)
        x = self._layer(0, residual, attended, positions, visible)
        for layer in range(1, self._layers()):
            norm = f"layers.{layer}.input_layernorm.weight"
            x = self._layer(layer, x, self._norm(x, norm), positions, visible)
        normed = self._final_norm(x)
        feedback = normed if self._feeds_post_norm() else x
        return Outputs(feedback, normed, normed @ self._lm_head().T)

    def _enter_eagle(self, embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fields.get("add_para_norm"):
            embeds, hidden = self._norm(embeds, "enorm.weight"), self._norm(hidden, "hnorm.weight")
        if "embed_layernorm.weight" in self.weights:
            embeds = self._norm(embeds, "embed_layernorm.weight")
        x = self._linear(self._concat(embeds, hidden), "fc")
        if "hidden_layernorm.weight" in self.weights:
            return x, self._norm(x, "hidden_layernorm.weight")
        if self._flag("first_input_norm", not self.fields.get("skip_prenorm", True)):
            return x, self._norm(x, "layers.0.input_layernorm.weight")
        return x, x

    def _enter_eagle3(self, embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self._norm(hidden, "layers.0.input_layernorm.weight") if self._switches.double_hidden_norm else hidden
        normed = self._norm(inner, "layers.0.hidden_norm.weight")
        attended = self._concat(self._norm(embeds, "layers.0.input_layernorm.weight"), normed)
        normed_residual = self._flag("norm_before_residual", bool(self.fields.get("norm_before_residual", False)))
        return (normed if normed_residual else hidden), attended

    def _layer(
        self, layer: int, residual: torch.Tensor, attended: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        prefix = f"layers.{layer}"
        y = residual + self._attention(f"{prefix}.self_attn", attended, positions, visible)
        x = self._norm(y, f"{prefix}.post_attention_layernorm.weight")
        gate = self._linear(x, f"{prefix}.mlp.gate_proj")
        gated = gate / (1 + torch.exp(-gate)) * self._linear(x, f"{prefix}.mlp.up_proj")
        return y + self._linear(gated, f"{prefix}.mlp.down_proj")

    def _attention(self, prefix: str, x: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            self._linear(x, f"{prefix}.{kind}_proj").unflatten(1, (-1, self._head_dim)) for kind in "qkv"
        )
        if f"{prefix}.q_norm.weight" in self.weights:
            queries, keys = self._norm(queries, f"{prefix}.q_norm.weight"), self._norm(keys, f"{prefix}.k_norm.weight")
        queries, keys = self._rotate(queries, positions), self._rotate(keys, positions)
        group = self._heads // keys.shape[1]
        mixed = []
        for head in range(self._heads):
            scores = queries[:, head] @ keys[:, head // group].T / self._head_dim**0.5
            scores = torch.where(visible, scores, torch.full_like(scores, -torch.inf))
            mixed.append(torch.softmax(scores, dim=1) @ values[:, head // group])
        return self._linear(torch.cat(mixed, dim=1), f"{prefix}.o_proj")

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x `[rows, heads, head_dim]`; dimension i turns with dimension i + head_dim / 2."""
        frequencies = self._theta ** (-torch.arange(0, self._head_dim, 2, dtype=torch.float64) / self._head_dim)
        angles = (positions.double() / self._stretch)[:, None, None] * frequencies
        low, high = x.chunk(2, dim=2)
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=2)

    def _rope(self) -> tuple[float, float]:
        """Base, and the factor positions are divided by; the official scaled variants drop the base."""
        scaling = self.fields.get("rope_scaling")
        if scaling:
            assert set(scaling) == {"type", "factor"}
            assert scaling["type"] == "linear"
            return 10000.0, scaling["factor"]
        return self._switches.theta or self.fields.get("rope_theta", 10000.0), 1.0

    def _final_norm(self, x: torch.Tensor) -> torch.Tensor:
        if "lm_head_layernorm.weight" in self.weights:
            return self._norm(x, "lm_head_layernorm.weight")
        usual = "norm.weight" in self.weights if self.eagle3 else not self.fields.get("skip_output_norm", True)
        return self._norm(x, "norm.weight") if self._flag("final_norm", usual) else x

    def _feeds_post_norm(self) -> bool:
        """vLLM's EAGLE-1 norm is part of the head; EAGLE-1's lm_head_layernorm and EAGLE-3's norm are the LM head's."""
        if self.eagle3:
            usual = self.fields.get("norm_output") or self.fields.get("return_hidden_post_norm") or False
        else:
            usual = "lm_head_layernorm.weight" not in self.weights
        return self._flag("feed_post_norm", usual)

    def _lm_head(self) -> torch.Tensor:
        rows = self.weights.get("lm_head.weight", self._target_lm_head)
        if "token_map" in self.weights and rows.shape[0] > len(self.weights["token_map"]):
            return rows[self.weights["token_map"]]
        return rows

    def _layers(self) -> int:
        return len([name for name in self.weights if name.endswith(".self_attn.q_proj.weight")])

    def _concat(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden, embeds] if self._switches.swap_concat else [embeds, hidden], dim=1)

    def _flag(self, name: str, usual: bool) -> bool:
        value: bool | None = getattr(self._switches, name)
        return usual if value is None else value

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.weights[name] * (x / ((x * x).mean(dim=-1, keepdim=True) + self._eps).sqrt())


class OracleSession:
    """A sequence that grows row by row; every call computes all its rows anew."""

    def __init__(self, oracle: HeadOracle) -> None:
        self._oracle = oracle
        self.embed, self.first_hidden = oracle.embed, oracle.first_hidden
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._visible = torch.zeros(0, 0, dtype=torch.bool)

    @property
    def rows(self) -> int:
        """Rows so far."""
        return self._visible.shape[0]

    def add(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> Outputs:
        """Append rows; visible `[new rows, all rows]`."""
        start, new = self.rows, (embeds, hidden, positions)
        self._inputs = tuple(map(torch.cat, zip(self._inputs, new, strict=True))) if self._inputs else new
        before = torch.nn.functional.pad(self._visible, (0, visible.shape[0]))
        self._visible = torch.cat([before, visible])
        every_embeds, every_hidden, every_position = self._inputs
        every = self._oracle.forward(every_embeds, every_hidden, every_position, self._visible)
        return Outputs(*(value[start:] for value in every))

    def drop(self, rows: int) -> None:
        """Forget all but the first rows."""
        self._inputs = tuple(value[:rows] for value in self._inputs)
        self._visible = self._visible[:rows, :rows]
