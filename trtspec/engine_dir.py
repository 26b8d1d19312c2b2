"""The engine directory: everything a session needs, described by engine.json and checked on opening."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trtspec.config import HEAD_METHODS, METHODS, RUNTIMES, Limits, SpeculationConfig
from trtspec.engine_defaults import TunedDefaults
from trtspec.errors import ConfigError, EngineDirError
from trtspec.tensors import SERVING_DTYPES, WeightRef

MANIFEST = "engine.json"
FORMAT_VERSION = 1
TOKENIZER_DIR = "tokenizer"
WEIGHTS_DIR = "weights"
# The target's weights lie in WEIGHTS_DIR under the names of its own files, which may be the head's, too.
HEAD_DIR = f"{WEIGHTS_DIR}/draft_head"
DRAFT_LM_HEAD_FILE = f"{WEIGHTS_DIR}/draft_lm_head.safetensors"
# Files up to this size are hashed whole on opening; of larger ones, samples (`trtspec inspect --verify` reads all).
WHOLE_HASH_BYTES = 1 << 30
DRAFT_LM_HEADS = ("target", "own", "reduced", "int4")
"""The target's engine; the head's own; chosen rows of either; rows of either with 4-bit weights."""
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and hashes of one file."""

    size: int
    sha256: str
    sample_sha256: str


@dataclass(frozen=True)
class TargetRecord:
    """The target: display name, where it came from, its TargetConfig and its Hugging Face config, as JSON."""

    name: str
    origin: str
    config: Mapping[str, Any]
    hf_config: Mapping[str, Any]


@dataclass(frozen=True)
class DraftHeadRecord:
    """An EAGLE draft head as it was built in."""

    name: str
    origin: str
    config: Mapping[str, Any]
    """Its DraftHeadConfig as JSON, with the draft vocabulary's size; the ids are not in it but in `token_ids` below."""
    decisions: Mapping[str, Mapping[str, Any]]
    """How it was wired: value, origin and perhaps a note of every decision, by name."""
    lm_head: str
    """One of DRAFT_LM_HEADS: which LM head drafting uses."""
    embedding: WeightRef | None = None
    """Its own embedding table; None: the target's."""
    lm_head_weight: WeightRef | None = None
    """Rows of the LM head `[draft_vocab, hidden]`, an input of compiled engines; None: "target" and "int4"."""
    token_ids: WeightRef | None = None
    """int32 `[draft_vocab]`: target token id of each row of the draft LM head; None: the identity."""


@dataclass(frozen=True)
class RuntimeRecord:
    """The files of one runtime, by graph name, and what they were made for."""

    graphs: Mapping[str, str]
    compute_capabilities: tuple[int, ...] = ()
    """Of TensorRT-RTX engines."""
    proposal: Mapping[str, int] | None = None
    """The ProposalConfig of the graph `proposal` as JSON; None where there is no such graph."""


@dataclass(frozen=True)
class EngineDir:
    """An engine directory as engine.json describes it."""

    path: Path
    trtspec_version: str
    dtype: str
    limits: Limits
    target: TargetRecord
    embedding: WeightRef
    lm_head: WeightRef
    runtimes: Mapping[str, RuntimeRecord]
    files: Mapping[str, FileRecord]
    draft_head: DraftHeadRecord | None = None
    defaults: TunedDefaults | None = None
    """Drafting settings of `trtspec tune`; None: SpeculationConfig's."""

    @classmethod
    def load(cls, path: Path | str, *, with_defaults: bool = True) -> EngineDir:
        """Read and validate engine.json; sizes of all files are checked, hashes by `verify`.

        Args:
            with_defaults: read `defaults`, too; without, what cannot be used of them is no error.

        Raises:
            EngineDirError: no engine directory, an unknown version, a changed manifest, a missing or cut file.
        """
        if not isinstance(path, str | Path) or not str(path):
            raise EngineDirError(f"{path!r} is no path; give an engine directory")
        directory = Path(path)
        data = _read_manifest(directory)
        defaults = data.pop("defaults", None)
        try:
            result = _from_json(directory, data)
        except (AttributeError, KeyError, TypeError, ValueError, ConfigError) as error:
            raise EngineDirError(
                f"{directory / MANIFEST} does not fit format {FORMAT_VERSION} ({error}); {_REBUILD}"
            ) from None
        for name, record in result.files.items():
            file = directory / name
            if not file.is_file():
                raise EngineDirError(f"{directory} lacks its part {name}; {_REBUILD}")
            if file.stat().st_size != record.size:
                raise EngineDirError(
                    f"{file} has {file.stat().st_size} bytes, engine.json says {record.size}; {_REBUILD}"
                )
        return result._with_defaults(defaults) if with_defaults and defaults is not None else result

    @property
    def methods(self) -> tuple[str, ...]:
        """Drafting methods that it supports."""
        return tuple(method for method in METHODS if self.draft_head is not None or method not in HEAD_METHODS)

    @property
    def default_speculation(self) -> SpeculationConfig:
        """How drafts are made where nothing is asked for, method included: as tuned, else SpeculationConfig's defaults
        with both drafters where there is a head, and lookups where there is none."""
        return SpeculationConfig(method=self.methods[-1]) if self.defaults is None else self.defaults.speculation

    @property
    def target_weight_files(self) -> list[Path]:
        """The files that hold the target's weights, all of them.

        Raises:
            EngineDirError: it keeps no weights of its own (built for TensorRT alone).
        """
        if "onnxruntime" not in self.runtimes:
            raise EngineDirError(f"{self.path} keeps no weights of its target; build it with --runtime onnxruntime")
        names = [name for name in self.files if name.startswith(f"{WEIGHTS_DIR}/") and name.endswith(".safetensors")]
        return [
            self.path / name for name in names if not name.startswith(f"{HEAD_DIR}/") and name != DRAFT_LM_HEAD_FILE
        ]

    def verify(self, *, whole: bool = False) -> None:
        """Compare every file's hash with engine.json: files over 1 GiB by samples unless `whole`.

        Raises:
            EngineDirError: a file was changed after the build.
        """
        for name, record in self.files.items():
            file = self.path / name
            if whole or record.size <= WHOLE_HASH_BYTES:
                same = file_sha256(file) == record.sha256
            else:
                same = sample_sha256(file) == record.sample_sha256
            if not same:
                raise EngineDirError(f"{file} was changed after the build (its hash differs); {_REBUILD}")

    def write_manifest(self) -> None:
        """Write engine.json into `path`, in one rename: who opens the directory finds the old one or the new one."""
        body = self._json()
        text = json.dumps({**body, "checksum": _checksum(body)}, indent=1, ensure_ascii=False)
        scratch = self.path / f"{MANIFEST}.{os.getpid()}"
        try:
            scratch.write_text(text + "\n", encoding="utf-8")
            scratch.replace(self.path / MANIFEST)
        finally:
            scratch.unlink(missing_ok=True)

    def store_defaults(self, defaults: TunedDefaults | None) -> EngineDir:
        """Write other defaults into engine.json; None removes them. No other file changes.

        Returns:
            The directory as it is then.

        Raises:
            EngineDirError: it was built anew since it was loaded, or engine.json can't be written.
        """
        bare = dataclasses.replace(self, defaults=None)
        if EngineDir.load(self.path, with_defaults=False) != bare:
            raise EngineDirError(
                f"{self.path} was built anew meanwhile, so its defaults are left as they are; try again"
            )
        result = dataclasses.replace(self, defaults=defaults)
        try:
            result.write_manifest()
        except OSError as error:
            raise EngineDirError(
                f"{self.path / MANIFEST} can't be written ({error.strerror}); make the directory writable"
            ) from None
        return result

    def _with_defaults(self, data: Any) -> EngineDir:
        try:
            return dataclasses.replace(self, defaults=TunedDefaults.from_json(data, self.methods))
        except (ValueError, ConfigError) as error:
            raise EngineDirError(
                f"the defaults in {self.path / MANIFEST} cannot be used ({error}); "
                f"remove them with: trtspec tune {self.path} --reset"
            ) from None

    def _json(self) -> dict[str, Any]:
        left_out = {"path", "defaults"}
        data = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}
        data.update(
            limits=asdict(self.limits),
            target=asdict(self.target),
            embedding=_ref_json(self.embedding),
            lm_head=_ref_json(self.lm_head),
            runtimes={name: _runtime_json(record) for name, record in self.runtimes.items()},
            files={name: asdict(record) for name, record in self.files.items()},
            draft_head=None if self.draft_head is None else _draft_head_json(self.draft_head),
        )
        if self.defaults is not None:
            data["defaults"] = self.defaults.to_json()
        return {"format_version": FORMAT_VERSION, **data}


_REBUILD = "build it again with trtspec build"


def record_files(directory: Path) -> dict[str, FileRecord]:
    """Size and hashes of every file below `directory`, engine.json left out, by relative POSIX name."""
    files = sorted(file for file in directory.rglob("*") if file.is_file() and file.name != MANIFEST)
    return {
        file.relative_to(directory).as_posix(): FileRecord(file.stat().st_size, file_sha256(file), sample_sha256(file))
        for file in files
    }


def file_sha256(file: Path) -> str:
    """SHA-256 of the whole file, read in blocks."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sample_sha256(file: Path) -> str:
    """SHA-256 over evenly spaced blocks, the file's first and last among them: 4 MiB at most."""
    size = file.stat().st_size
    step = max((size - _SAMPLE_BYTES) / (_SAMPLES - 1), _SAMPLE_BYTES)
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for i in range(_SAMPLES):
            offset = int(i * step)
            if offset >= size:
                break
            stream.seek(offset)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _read_manifest(directory: Path) -> dict[str, Any]:
    manifest = directory / MANIFEST
    if not directory.is_dir():
        raise EngineDirError(
            f"there is no engine directory {directory}; make one with: trtspec build TARGET --output {directory}"
        )
    if not manifest.is_file():
        raise EngineDirError(f"{directory} is no engine directory (it has no {MANIFEST}); make one with trtspec build")
    try:
        data = json.loads(manifest.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EngineDirError(f"{manifest} is damaged ({error}); {_REBUILD}") from None
    if not isinstance(data, dict) or "format_version" not in data:
        raise EngineDirError(f"{manifest} has no format_version; {_REBUILD}")
    if data["format_version"] != FORMAT_VERSION:
        raise EngineDirError(
            f"{manifest} has format_version {data['format_version']!r}, this trtspec reads {FORMAT_VERSION}; "
            "build it again or use the trtspec version that built it"
        )
    checksum = data.pop("checksum", None)
    if checksum != _checksum(data):
        raise EngineDirError(f"{manifest} was changed after the build (its checksum differs); {_REBUILD}")
    return data


def _from_json(directory: Path, data: Mapping[str, Any]) -> EngineDir:
    rest = {key: value for key, value in data.items() if key != "format_version"}
    if rest["dtype"] not in SERVING_DTYPES:
        raise ValueError(f"dtype {rest['dtype']!r}")
    if not rest["runtimes"] or set(rest["runtimes"]) - set(RUNTIMES):
        raise ValueError(f"runtimes {sorted(rest['runtimes'])}")
    rest.update(
        limits=Limits(**rest["limits"]),
        target=TargetRecord(**rest["target"]),
        embedding=_ref(rest["embedding"]),
        lm_head=_ref(rest["lm_head"]),
        runtimes={name: _runtime(record) for name, record in rest["runtimes"].items()},
        files={name: FileRecord(**record) for name, record in rest["files"].items()},
        draft_head=_draft_head(rest.get("draft_head")),
    )
    for name in rest["files"]:
        if name.startswith("/") or ".." in Path(name).parts:
            raise ValueError(f"file name {name!r} leaves the directory")
    parts = [file for record in rest["runtimes"].values() for file in record.graphs.values()]
    refs = [rest["embedding"], rest["lm_head"], *_draft_head_refs(rest["draft_head"])]
    for name in (*[ref.location for ref in refs], *parts):
        if name not in rest["files"]:
            raise ValueError(f"part {name!r} is none of its files")
    return EngineDir(path=directory, **rest)


def _ref_json(ref: WeightRef) -> dict[str, Any]:
    return {**asdict(ref), "shape": list(ref.shape)}


def _ref(data: Mapping[str, Any]) -> WeightRef:
    return WeightRef(**{**data, "shape": tuple(data["shape"])})


def _draft_head_refs(record: DraftHeadRecord | None) -> list[WeightRef]:
    refs = [record.embedding, record.lm_head_weight, record.token_ids] if record else []
    return [ref for ref in refs if ref is not None]


def _draft_head_json(record: DraftHeadRecord) -> dict[str, Any]:
    refs = {name: getattr(record, name) for name in _DRAFT_HEAD_REFS}
    return {
        **{field.name: getattr(record, field.name) for field in fields(record)},
        **{name: None if ref is None else _ref_json(ref) for name, ref in refs.items()},
    }


def _draft_head(data: Mapping[str, Any] | None) -> DraftHeadRecord | None:
    if data is None:
        return None
    if data["lm_head"] not in DRAFT_LM_HEADS:
        raise ValueError(f"draft LM head {data['lm_head']!r}")
    refs = {name: None if data[name] is None else _ref(data[name]) for name in _DRAFT_HEAD_REFS}
    return DraftHeadRecord(**{**data, "decisions": dict(data["decisions"]), **refs})


_DRAFT_HEAD_REFS = ("embedding", "lm_head_weight", "token_ids")


def _runtime_json(record: RuntimeRecord) -> dict[str, Any]:
    proposal = {} if record.proposal is None else {"proposal": dict(record.proposal)}
    return {"graphs": dict(record.graphs), "compute_capabilities": list(record.compute_capabilities), **proposal}


def _runtime(data: Mapping[str, Any]) -> RuntimeRecord:
    proposal = data.get("proposal")
    if ("proposal" in data["graphs"]) != (proposal is not None):
        raise ValueError("a proposal graph and its configuration, of which one is missing")
    if proposal is not None and not all(isinstance(value, int) for value in proposal.values()):
        raise ValueError(f"proposal {proposal!r}")
    return RuntimeRecord(data["graphs"], tuple(data["compute_capabilities"]), proposal)


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
