"""Fetching a model from the Hugging Face hub into its cache."""

from __future__ import annotations

import re
from pathlib import Path

from trtspec.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
HUB_BIN_FILES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]


def is_hub_id(text: str) -> bool:
    """Whether the text can be a hub id (owner/name) and not the path of a file."""
    return HUB_ID.fullmatch(text) is not None and not text.endswith(".gguf")


def download(hub_id: str) -> Path:
    """The hub's snapshot of a model in the hub cache: configuration, tokenizer, weights.

    Raises:
        CheckpointError: there is no such model, it is gated, or the hub can't be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    def fetch(files: list[str]) -> Path:
        return Path(snapshot_download(hub_id, allow_patterns=files, ignore_patterns=["*/*", "consolidated*"]))

    try:
        directory = fetch(HUB_FILES)
        return directory if any(directory.glob("*.safetensors")) else fetch([*HUB_FILES, *HUB_BIN_FILES])
    except GatedRepoError:
        raise CheckpointError(
            f"{hub_id} is gated on the Hugging Face hub; accept its licence there and log in with: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{hub_id} is neither a directory here nor a model on the Hugging Face hub") from None
    except Exception as error:  # the hub client raises its HTTP library's errors besides its own
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{hub_id} is no directory here, and the Hugging Face hub can't be reached "
            f"({reason[0] if reason else type(error).__name__}); give a local directory"
        ) from None
