"""An EAGLE-1 draft head as a PyTorch module, in the wiring of the SafeAILab/EAGLE reference code.

fc([embedding; hidden]), then one Llama layer without a norm before its attention; no norm before the LM head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from trtspec.checkpoint.rope import RopeConfig

KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class HeadSizes:
    """Sizes and constants of a head."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class EagleHead(nn.Module):
    """Weights have the official names: `fc`, `layers.0.self_attn`, `layers.0.mlp`, ..."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(2 * sizes.hidden_size, sizes.hidden_size)
        self.layers = nn.ModuleList([_Layer(sizes)])
        self._start_as_identity()

    def _start_as_identity(self) -> None:
        """At first the head hands the hidden state through: the layer adds nothing, fc ignores the embedding."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        size = self.sizes.hidden_size
        with torch.no_grad():
            self.fc.weight[:, size:] += torch.eye(size)
            self.fc.bias.zero_()

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        rotary: KeysValues,
        earlier: list[KeysValues],
        mask: torch.Tensor,
    ) -> tuple[torch.Tensor, KeysValues]:
        """One unrolled step for every anchor of a batch at once.

        Args:
            embeds: the next token's embedding `[batch, length, hidden]`.
            hidden: the target's hidden states at step 1, the previous step's output later, of the same shape.
            rotary: cos and sin `[length, head_dim]` of this step's positions.
            earlier: keys and values of the earlier steps, as this returned them. An anchor sees those of step 1 at
                itself and at earlier anchors (true hidden states), and only its own of the steps since.
            mask: additive `[length, length]`, for step 1's keys.

        Returns:
            The output, an estimate of the target's next hidden state, and this step's keys and values.
        """
        x = self.fc(torch.cat([embeds, hidden], dim=-1))
        output, keys_values = self.layers[0](x, rotary, earlier, mask)
        return output, keys_values


class _Layer(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.self_attn = _Attention(sizes)
        self.mlp = _Mlp(sizes)
        self.post_attention_layernorm = _RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, rotary: KeysValues, earlier: list[KeysValues], mask: torch.Tensor
    ) -> tuple[torch.Tensor, KeysValues]:
        mixed, keys_values = self.self_attn(x, rotary, earlier, mask)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), keys_values


class _RmsNorm(nn.Module):
    """In float32 whatever the matrix products are in."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon)


class _Mlp(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Attention(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = sizes
        inner = sizes.num_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(sizes.hidden_size, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(sizes.hidden_size, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(inner, sizes.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, rotary: KeysValues, earlier: list[KeysValues], mask: torch.Tensor
    ) -> tuple[torch.Tensor, KeysValues]:
        sizes = self.sizes
        queries = rotated(self._heads(self.q_proj(x), sizes.num_heads), rotary)
        repeats = sizes.num_heads // sizes.num_kv_heads
        keys = rotated(self._heads(self.k_proj(x), sizes.num_kv_heads), rotary).repeat_interleave(repeats, dim=1)
        values = self._heads(self.v_proj(x), sizes.num_kv_heads).repeat_interleave(repeats, dim=1)
        steps = [*earlier, (keys, values)]
        mixed = _attend(queries, steps, mask, sizes.head_dim**-0.5)
        rows = mixed.transpose(1, 2).flatten(2)
        output: torch.Tensor = self.o_proj(rows)
        return output, (keys, values)

    def _heads(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """`[batch, length, count * head_dim]` to `[batch, count, length, head_dim]`."""
        batch, length, _ = rows.shape
        return rows.view(batch, length, count, self.sizes.head_dim).transpose(1, 2)


def rotary_tables(sizes: HeadSizes, positions: int) -> KeysValues:
    """cos and sin `[positions, head_dim]` in float32."""
    cos, sin = RopeConfig("default", sizes.rope_theta).cos_sin(sizes.head_dim, positions)
    halves = [torch.from_numpy(table).float() for table in (cos, sin)]
    return torch.cat([halves[0]] * 2, dim=-1), torch.cat([halves[1]] * 2, dim=-1)


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """Additive `[length, length]`: an anchor sees itself and those before it."""
    hidden = torch.full((length, length), torch.finfo(torch.float32).min, device=device)
    return hidden.triu(1)


def _attend(queries: torch.Tensor, steps: list[KeysValues], mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax over step 1's keys (masked) and, of each later step, the anchor's own key."""
    keys, values = steps[0]
    scores = [(queries @ keys.transpose(-1, -2)).float() * scale + mask]
    scores += [(queries * own).sum(-1, keepdim=True).float() * scale for own, _ in steps[1:]]
    weights = torch.cat(scores, dim=-1).softmax(-1).to(values.dtype)
    length = keys.shape[2]
    mixed = weights[..., :length] @ values
    for at, (_, own) in enumerate(steps[1:], start=length):
        mixed = mixed + weights[..., at : at + 1] * own
    return mixed


def rotated(x: torch.Tensor, rotary: KeysValues) -> torch.Tensor:
    """Queries or keys `[..., length, head_dim]` turned by their positions' cos and sin."""
    cos, sin = rotary[0].to(x.dtype), rotary[1].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
