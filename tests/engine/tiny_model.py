"""A two-layer Llama with random weights, exported as graphs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch

from trtspec.checkpoint.target import TargetConfig
from trtspec.engine.onnxruntime_engine import TORCH_DTYPES
from trtspec.graph.target import lm_head_graph, target_graph, target_spec
from trtspec.tensors import GraphSpec, WeightRef, lm_head_spec

CACHE_ROWS = 64
HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 2, 4, 2, 256


@dataclass(frozen=True)
class TinyModel:
    """Exported graphs and their declarations."""

    config: TargetConfig
    directory: Path
    dtype: str

    @property
    def target(self) -> Path:
        return self.directory / "target.onnx"

    @property
    def lm_head(self) -> Path:
        return self.directory / "lm_head.onnx"

    @property
    def target_spec(self) -> GraphSpec:
        return target_spec(self.config, CACHE_ROWS, self.dtype)

    def lm_head_spec(self, weight_as_input: bool) -> GraphSpec:
        return lm_head_spec(hidden_size=HIDDEN, vocab_size=VOCAB, dtype=self.dtype, weight_as_input=weight_as_input)


def export(directory: Path, dtype: str, head_dim: int = 16, lm_head_weight_as_input: bool = True) -> TinyModel:
    """Write weights and both graphs to a directory."""
    config = TargetConfig.from_hf(
        {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": 128,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": head_dim,
            "vocab_size": VOCAB,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "rope_theta": 10000.0,
        }
    )
    weights = write_weights(config, directory / "weights.bin", dtype)
    graph = target_graph(config, weights, directory, cache_rows=CACHE_ROWS, dtype=dtype)
    ir.save(graph, directory / "target.onnx")
    graph = lm_head_graph(config, weights, directory, dtype=dtype, weight_as_input=lm_head_weight_as_input)
    ir.save(graph, directory / "lm_head.onnx")
    return TinyModel(config, directory, dtype)


def write_weights(config: TargetConfig, path: Path, dtype: str) -> dict[str, WeightRef]:
    """Random matrices and norms of 1, one behind the other."""
    generator = torch.Generator().manual_seed(0)
    refs: dict[str, WeightRef] = {}
    with path.open("wb") as file:
        for name, shape in config.weight_shapes().items():
            scale = 0.3 * shape[-1] ** -0.5 if len(shape) > 1 else 0.0
            base = 0.0 if len(shape) > 1 else 1.0
            values = (base + scale * torch.randn(shape, generator=generator)).to(TORCH_DTYPES[dtype])
            data = values.view(torch.uint8).numpy().tobytes()
            refs[name] = WeightRef(path.name, file.tell(), len(data), dtype, shape)
            file.write(data)
    return refs
