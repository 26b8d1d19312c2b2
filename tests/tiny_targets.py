"""Tiny Hugging Face targets with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


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
    model.save_pretrained(directory, safe_serialization=True)


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
