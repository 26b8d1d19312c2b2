"""Hugging Face generate on an engine directory's own weights, for comparison."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

import torch

from trtspec.bench.runner import Output
from trtspec.checkpoint.shards import SafetensorsSource
from trtspec.config import SamplingParams
from trtspec.engine_dir import EngineDir
from trtspec.errors import EngineDirError


class HuggingFaceMethod:
    """transformers' `generate`, one prompt after the other, plain or with prompt lookup."""

    def __init__(self, model: Any, eos_token_ids: Seq[int], lookup_tokens: int | None) -> None:
        self.name = f"hf-lookup-{lookup_tokens}" if lookup_tokens else "hf"
        self._model = model
        self._eos = list(eos_token_ids)
        self._lookup = lookup_tokens

    def complete(self, prompts: Seq[list[int]], sampling: SamplingParams) -> Output:
        """Complete the prompts greedily."""
        options: dict[str, Any] = {"prompt_lookup_num_tokens": self._lookup} if self._lookup else {}
        if self._eos and not sampling.ignore_eos:
            options.update(eos_token_id=self._eos, pad_token_id=self._eos[0])
        outputs, start = [], time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            result = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,
                **options,
            )
            outputs.append(result[0, len(prompt) :].tolist())
        return Output(outputs, time.perf_counter() - start)


def load_huggingface(engine_dir: EngineDir) -> Any:
    """The target as a transformers model in float32 over the directory's weight files.

    Raises:
        EngineDirError: the directory doesn't hold all weights (built for TensorRT alone).
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    hf_config = dict(engine_dir.target.hf_config)
    config = AutoConfig.for_model(hf_config.pop("model_type"), **hf_config)
    source = SafetensorsSource(engine_dir.target_weight_files)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: source.load(name).float() for name in source.tensors}
    missing = model.load_state_dict(weights, strict=False, assign=True).missing_keys
    model.tie_weights()
    if set(missing) - {"lm_head.weight"}:
        raise EngineDirError(f"{engine_dir.path} lacks the weights {sorted(missing)}; build it again")
    _materialise_buffers(model, config)
    model.generation_config.eos_token_id = None
    return model.eval()


def _materialise_buffers(model: Any, config: Any) -> None:
    """Rotary tables are computed, not loaded: make them anew outside the meta device."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config)
