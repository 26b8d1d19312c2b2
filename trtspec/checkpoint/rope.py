"""Rotary position embedding parameters and the cos/sin tables of each supported kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trtspec.errors import CheckpointError

KINDS = ("default", "linear", "llama3", "yarn")
# Fields that config.json spells as RopeConfig does.
OPTIONS = (
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of a model; fields that a kind doesn't use stay at their defaults.

    `frequency_factors` divides the inverse frequencies one by one (GGUF files store llama3 scaling that way).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read all three spellings: rope_theta and rope_scaling at top level, or rope_parameters.

        Raises:
            CheckpointError: the kind, or a partial rotary factor, is not supported.
        """
        scaling: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if any(isinstance(value, Mapping) for value in scaling.values()):
            raise CheckpointError(f"rotary embeddings that differ by layer ({sorted(scaling)}) are not supported")
        if kind not in KINDS:
            raise CheckpointError(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
        partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise CheckpointError(f"partial_rotary_factor {partial} is not supported (only 1.0)")
        theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
        original = config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
        factor = scaling.get("factor")
        if kind != "default" and not factor:
            if kind != "yarn" or not original:
                raise CheckpointError(f"rope type {kind!r} without a factor; add it to rope_parameters in config.json")
            factor = config["max_position_embeddings"] / original
        own = {key: scaling[key] for key in OPTIONS if scaling.get(key) is not None}
        return cls(
            kind=kind,
            theta=float(theta),
            factor=float(factor or 1.0),
            original_max_position_embeddings=int(original or config.get("max_position_embeddings") or 0),
            frequency_factors=tuple(scaling.get("frequency_factors", ())),
            **own,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {**asdict(self), "frequency_factors": list(self.frequency_factors)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RopeConfig:
        """Inverse of `to_json`."""
        return cls(**{**data, "frequency_factors": tuple(data["frequency_factors"])})

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Inverse frequencies, float64 `[head_dim / 2]`."""
        base: np.ndarray = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.frequency_factors:
            base = base / np.asarray(self.frequency_factors, dtype=np.float64)
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            return self._llama3(base)
        if self.kind == "yarn":
            return self._yarn(base, head_dim)
        return base

    def cos_sin(self, head_dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin tables, float32 `[positions, head_dim / 2]`, the attention factor multiplied in."""
        # Angles in float32, as transformers computes them: at long positions the rounding is part of the model.
        inverse = self.inverse_frequencies(head_dim).astype(np.float32)
        angles = np.arange(positions, dtype=np.float32)[:, None] * inverse[None, :]
        scale = np.float32(self._attention_scale())
        return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)

    def _llama3(self, base: np.ndarray) -> np.ndarray:
        """Llama 3.1 scaling: long wavelengths divided by the factor, short ones kept, a smooth ramp between."""
        original = self.original_max_position_embeddings
        wavelength = 2 * math.pi / base
        smooth = (original / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ramp = (1 - smooth) * base / self.factor + smooth * base
        scaled = np.where(wavelength > original / self.low_freq_factor, base / self.factor, ramp)
        return np.where(wavelength < original / self.high_freq_factor, base, scaled)

    def _yarn(self, base: np.ndarray, head_dim: int) -> np.ndarray:
        """YaRN (arXiv 2309.00071): interpolate the low dimensions' rotations, keep the high ones', ramp between."""

        def dimension_of(rotations: float) -> float:
            span = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return head_dim * math.log(span) / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = high - low or 0.001
        ramp = np.clip((np.arange(head_dim // 2) - low) / span, 0, 1)
        scaled: np.ndarray = base / self.factor * ramp + base * (1 - ramp)
        return scaled

    def _attention_scale(self) -> float:
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def mscale(weight: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return mscale(self.mscale) / mscale(self.mscale_all_dim)
        return mscale(1.0)
