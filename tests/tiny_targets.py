"""Tiny Hugging Face targets with random weights, and their graphs in ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from trtspec.checkpoint.convert import place_weights
from trtspec.checkpoint.shards import open_tensors, read_json
from trtspec.checkpoint.source import check_weights
from trtspec.checkpoint.target import EMBEDDING, LM_HEAD, TargetConfig
from trtspec.engine.base import TORCH_DTYPES
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.onnxruntime_engine import OnnxRuntimeEngine
from trtspec.engine.target import LmHead, Target, map_weight
from trtspec.graph.target import lm_head_graph, lm_head_spec, target_graph, target_spec
from trtspec.tensors import GraphSpec

CACHE_ROWS = 96
VOCAB = 211
HEADS = 4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
# Original lengths are short, so that the scaled frequencies matter at the tests' positions.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn": YARN,
    "yarn_mscale": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn_factor": {**YARN, "attention_factor": 0.8, "truncate": False},
}
# Hugging Face model type and configuration of each architecture and its variants; default heads are grouped, 4 to 2.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_size": 64, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama_untied": ("llama", {"hidden_size": 64, "num_key_value_heads": HEADS, "tie_word_embeddings": False}),
    "llama_biased": (
        "llama",
        {
            "hidden_size": 64,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral": ("mistral", {"hidden_size": 96, "num_key_value_heads": 2, "head_dim": 16}),
    "qwen2": ("qwen2", {"hidden_size": 64, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"hidden_size": 48, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}),
}
EXTRA: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_biased": ("qwen3", {**ARCHITECTURES["qwen3"][1], "head_dim": 8, "attention_bias": True}),
    "qwen2_untied": ("qwen2", {"hidden_size": 64, "num_key_value_heads": HEADS, "tie_word_embeddings": False}),
}


@dataclass(frozen=True)
class Case:
    """One kind of target: a name in ARCHITECTURES or EXTRA, one in ROPES, and how config.json spells the rope."""

    architecture: str
    rope: str
    old_spelling: bool = False

    @property
    def name(self) -> str:
        """The test id."""
        return f"{self.architecture}-{self.rope}{'-old' if self.old_spelling else ''}"


CASES = [
    *(Case(architecture, rope) for architecture in ARCHITECTURES for rope in ("default", "linear", "llama3", "yarn")),
    *(Case(architecture, "default") for architecture in EXTRA),
    Case("llama", "yarn_mscale"),
    Case("qwen3", "yarn_factor"),
    Case("llama", "linear", old_spelling=True),
    Case("llama_untied", "llama3", old_spelling=True),
    Case("mistral", "default", old_spelling=True),
    Case("qwen2", "yarn", old_spelling=True),
]


def save_case(case: Case, directory: Path) -> None:
    """Write a case's Hugging Face directory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = {**ARCHITECTURES, **EXTRA}[case.architecture]
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        max_position_embeddings=128,
        rope_parameters=dict(ROPES[case.rope]),
        rms_norm_eps=1e-3,
        **options,
    )
    save_random(AutoModelForCausalLM.from_config(config, dtype=torch.float32), directory)
    if case.old_spelling:
        use_old_spelling(directory / "config.json")


def save_tiny_llama(directory: Path) -> None:
    """A two-layer Llama with the vocabulary size and the special tokens of the demo target's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    save_random(LlamaForCausalLM(config), directory)


def save_random(model: Any, directory: Path) -> None:
    """Give a model random weights, biases and norms and save it in float32 safetensors."""
    randomise(model)
    model.save_pretrained(directory)


def randomise(model: Any, seed: int = 0) -> None:
    """Random values in every parameter, so that none can be left out or swapped without a difference.

    Matrices keep the size of activations about constant; norms lie around 1, biases around 0.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1 + 0.3 * noise)


def use_old_spelling(config_json: Path) -> None:
    """Rewrite rope_parameters as transformers 4 wrote them: rope_theta and rope_scaling with `type`."""
    config = json.loads(config_json.read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config_json.write_text(json.dumps(config), encoding="utf-8")


class TinyTarget:
    """A Hugging Face directory and the graphs made of it, one folder per dtype."""

    def __init__(self, hf_dir: Path, directory: Path) -> None:
        self.hf_dir = hf_dir
        self.directory = directory
        self.config = TargetConfig.from_hf(read_json(hf_dir / "config.json"))
        self.tensors = open_tensors(hf_dir)
        assert not check_weights(self.config, self.tensors)

    @cached_property
    def hf(self) -> Any:
        """The model as transformers loads it from the directory."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.hf_dir, dtype=torch.float32).eval()

    def expected(self, tokens: Sequence[int]) -> torch.Tensor:
        """What transformers computes: logits behind every token, `[length, vocab]`."""
        with torch.no_grad():
            logits: torch.Tensor = self.hf(torch.tensor([list(tokens)])).logits[0]
        return logits

    def expected_last(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """What transformers computes behind the last token of each sequence, `[sequences, vocab]`."""
        ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
        for row, tokens in enumerate(sequences):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        # No attention mask: the padding lies behind the tokens, where a causal model doesn't look.
        with torch.no_grad():
            logits: torch.Tensor = self.hf(ids).logits
        return logits[torch.arange(len(sequences)), torch.tensor([len(tokens) - 1 for tokens in sequences])]

    def export(self, dtype: str, *, lm_head_weight_as_input: bool = False) -> Path:
        """Place the weights and write target.onnx and lm_head.onnx; returns their folder."""
        folder = self.directory / f"{dtype}-{'input' if lm_head_weight_as_input else 'packed'}"
        if not folder.exists():
            weights = place_weights(
                self.tensors, self.config.weight_shapes(), folder, "weights", "w.safetensors", dtype
            )
            body = target_graph(self.config, weights, folder, cache_rows=CACHE_ROWS, dtype=dtype)
            ir.save(body, folder / "target.onnx")
            as_input = lm_head_weight_as_input
            head = lm_head_graph(self.config, weights, folder, dtype=dtype, weight_as_input=as_input)
            ir.save(head, folder / "lm_head.onnx")
            self._embeddings[dtype] = map_weight(folder, weights[EMBEDDING])
            assert (LM_HEAD in weights) != self.config.tied
        return folder

    def spec(self, dtype: str) -> GraphSpec:
        """The body's declaration."""
        return target_spec(self.config, CACHE_ROWS, dtype)

    def load(self, dtype: str = "float32") -> Target:
        """A running target of its own."""
        folder = self.export(dtype)
        body = OnnxRuntimeEngine(folder / "target.onnx", self.spec(dtype))
        head_spec = lm_head_spec(self.config, dtype, weight_as_input=False)
        return Target(self._embeddings[dtype], body, LmHead(OnnxRuntimeEngine(folder / "lm_head.onnx", head_spec)))

    def new_cache(self, slots: int, dtype: str = "float32") -> KVCache:
        """An empty KV cache."""
        return KVCache(
            num_layers=self.config.num_layers,
            slots=slots,
            num_kv_heads=self.config.num_kv_heads,
            rows=CACHE_ROWS,
            head_dim=self.config.head_dim,
            dtype=TORCH_DTYPES[dtype],
            device=torch.device("cpu"),
        )

    @cached_property
    def _embeddings(self) -> dict[str, torch.Tensor]:
        return {}
