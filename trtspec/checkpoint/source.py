"""Opening whatever the user names as a model: a directory, a GGUF file, a hub id, or the demo target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.checkpoint.demo import fetch_demo
from trtspec.checkpoint.gguf import QUANTISED_TYPES, GgufSource, open_gguf
from trtspec.checkpoint.gguf_config import gguf_config
from trtspec.checkpoint.hub import download, is_hub_id
from trtspec.checkpoint.shards import TensorInfo, TensorSource, open_tensors, read_json
from trtspec.checkpoint.target import LM_HEAD, TargetConfig
from trtspec.checkpoint.tokenizer import save_tokenizer
from trtspec.errors import CheckpointError
from trtspec.tensors import SERVING_DTYPES

DEMO = "demo"
WEIGHT_DTYPES = (*SERVING_DTYPES, *QUANTISED_TYPES)


@dataclass(frozen=True)
class Checkpoint:
    """A model's configuration, weights and tokenizer, opened but not loaded.

    `origin` is what the user gave: an absolute path, a hub id, or "demo". `gguf_file` names the file in
    `tokenizer_directory` that holds the tokenizer, and `pre_tokenizer` how it says text is split; both are None
    unless the checkpoint is a GGUF file.
    """

    name: str
    origin: str
    hf_config: Mapping[str, Any] = field(repr=False)
    generation_config: Mapping[str, Any] = field(repr=False)
    tensors: TensorSource = field(repr=False)
    tokenizer_directory: Path
    gguf_file: str | None = None
    pre_tokenizer: str | None = None

    def save_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer into a directory, so that AutoTokenizer loads it from there.

        Raises:
            CheckpointError: the checkpoint has no tokenizer that transformers can read.
        """
        save_tokenizer(self.tokenizer_directory, self.gguf_file, self.pre_tokenizer, directory)


def open_checkpoint(target: str) -> Checkpoint:
    """Open "demo", a directory, a .gguf file, or a hub id (owner/name); a path that exists is never a hub id.

    Raises:
        CheckpointError: there is no such model, it can't be fetched, or it is damaged or not supported.
    """
    if not target:
        raise CheckpointError("the target is empty; expected a directory, a .gguf file, a hub id owner/name, or demo")
    if target == DEMO:
        return _open_gguf_file(fetch_demo(), DEMO)
    path = Path(target).expanduser()
    if path.is_dir():
        return _open_directory(path.absolute(), path.absolute().name, str(path.absolute()))
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{target} is a file but no .gguf; give the directory that holds config.json")
        return _open_gguf_file(path.absolute(), str(path.absolute()))
    if is_hub_id(target):
        return _open_directory(download(target), target, target)
    raise CheckpointError(f"{target} does not exist; expected a directory, a .gguf file, a hub id owner/name, or demo")


def check_weights(config: TargetConfig, tensors: TensorSource) -> list[str]:
    """Check that the weights are the ones the configuration asks for, and return warnings.

    Raises:
        CheckpointError: a weight is missing, has another shape or no supported dtype, or isn't part of the model.
    """
    expected = config.weight_shapes()
    for name, shape in expected.items():
        if name not in tensors.tensors:
            raise CheckpointError(
                f"the checkpoint has no tensor {name}, expected {list(shape)}; is config.json this model's?"
            )
        _check_weight(name, tensors.tensors[name], shape)
    warnings = []
    for name in tensors.tensors:
        if name in expected or name.endswith("rotary_emb.inv_freq"):
            continue
        if name == LM_HEAD and config.tied:
            warnings.append(f"{LM_HEAD} is ignored: config.json says that the LM head is the embedding table")
            continue
        raise CheckpointError(
            f"the checkpoint has a tensor {name}, which a {config.architecture} model has not; "
            "leaving it out would change the output"
        )
    return warnings


def _check_weight(name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise CheckpointError(
            f"tensor {name} has shape {list(info.shape)}, expected {list(shape)}; is config.json this model's?"
        )
    if info.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(
            f"tensor {name} has dtype {info.dtype}; supported: {', '.join(WEIGHT_DTYPES)}: use an unquantised "
            "checkpoint or a GGUF file"
        )


def _open_gguf_file(path: Path, origin: str) -> Checkpoint:
    reader = open_gguf(path)
    config = gguf_config(reader)
    pre_tokenizer = reader.get_field("tokenizer.ggml.pre")
    return Checkpoint(
        name=path.stem,
        origin=origin,
        hf_config=config,
        generation_config={"eos_token_id": config["eos_token_id"]},
        tensors=GgufSource(reader, path),
        tokenizer_directory=path.parent,
        gguf_file=path.name,
        pre_tokenizer=None if pre_tokenizer is None else str(pre_tokenizer.contents()),
    )


def _open_directory(directory: Path, name: str, origin: str) -> Checkpoint:
    config_path, generation_path = directory / "config.json", directory / "generation_config.json"
    if not config_path.is_file():
        found = sorted(path.name for path in directory.glob("*.gguf"))
        hint = f"give the path of {found[0]}" if found else "expected a Hugging Face model directory"
        # What a higher layer calls MANIFEST.
        if (directory / "engine.json").is_file():
            hint = "it is an engine directory, built already; give what it was built from"
        raise CheckpointError(f"{origin} has no config.json; {hint}")
    return Checkpoint(
        name=name,
        origin=origin,
        hf_config=read_json(config_path),
        generation_config=read_json(generation_path) if generation_path.is_file() else {},
        tensors=open_tensors(directory),
        tokenizer_directory=directory,
    )
