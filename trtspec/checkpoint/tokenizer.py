"""Saving a checkpoint's tokenizer so that it loads without the checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from trtspec.errors import CheckpointError

logger = logging.getLogger(__name__)

_LONGEST_REASON = 300

# transformers leaves GPT-2's splitting where it doesn't know a GGUF file's `tokenizer.ggml.pre`. These kinds are
# GPT-2's too, after every digit was split off; "default" and "gpt-2" are GPT-2's itself.
DIGIT_KINDS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
GPT2_KINDS = ("default", "gpt-2", "gpt2")


def save_tokenizer(source: Path, gguf_file: str | None, pre_tokenizer: str | None, directory: Path) -> None:
    """Load the tokenizer of a model directory, or of a GGUF file in it, and save it into another directory.

    Args:
        gguf_file: the file's name, None for a model directory.
        pre_tokenizer: the GGUF file's `tokenizer.ggml.pre`.

    Raises:
        CheckpointError: there is no tokenizer, transformers cannot read it, or it cannot be written.
    """
    from transformers import AutoTokenizer

    place = source / gguf_file if gguf_file else source
    options = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, **options)
    except Exception as error:  # transformers raises many kinds, its parsers more
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{place} has no tokenizer that transformers can read; expected tokenizer.json or tokenizer.model beside "
            f"config.json (transformers says: {reason[:_LONGEST_REASON]})"
        ) from None
    # Without tokenizer files, transformers makes an empty tokenizer of the kind that config.json suggests.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise CheckpointError(
            f"{place} has no tokenizer; expected tokenizer.json or tokenizer.model beside config.json"
        )
    if gguf_file:
        _restore_splitting(tokenizer, pre_tokenizer, place)
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:  # the tokenizers package raises plain Exception for a full disk
        raise CheckpointError(f"the tokenizer cannot be written to {directory}: {error}") from None


def _restore_splitting(tokenizer: Any, kind: str | None, place: Path) -> None:
    """Split digits where the GGUF file says so and transformers didn't; warn of a kind neither knows."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) or kind in GPT2_KINDS:
        return
    if kind in DIGIT_KINDS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        return
    logger.warning(
        "%s: pre-tokenizer %r is not known and text is split as for GPT-2; some prompts may be tokenized otherwise "
        "than the model was trained with",
        place,
        kind,
    )
