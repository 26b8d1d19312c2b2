"""A draft head's share of a build: its weights' places and its graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from trtspec.checkpoint.convert import place_weights
from trtspec.checkpoint.draft_head.config import HEAD_EMBEDDING, HEAD_LM_HEAD
from trtspec.checkpoint.shards import TensorInfo
from trtspec.checkpoint.writer import write_safetensors
from trtspec.config import HEAD_CHUNK, HEAD_WIDTH, Limits
from trtspec.engine.tensorrt_build import lm_head_profiles, target_profiles
from trtspec.engine_dir import DRAFT_LM_HEAD_FILE, HEAD_DIR, DraftHeadRecord
from trtspec.errors import CheckpointError
from trtspec.graph.draft_head import draft_head_graph, draft_head_spec, fuse_graph, fuse_spec
from trtspec.graph.draft_lm_head import draft_lm_head_graph, draft_lm_head_spec, int4_draft_lm_head_graph
from trtspec.head_plan import HeadPlan, Table
from trtspec.runtime_build import Part
from trtspec.tensors import WeightRef

TOKEN_IDS = "token_ids"


@dataclass(frozen=True)
class PlacedHead:
    """Where a draft head's weights lie in the engine directory."""

    weights: Mapping[str, WeightRef]
    """By canonical name."""
    lm_head_weight: WeightRef | None
    token_ids: WeightRef | None

    @property
    def embedding(self) -> WeightRef | None:
        """The head's own table, where it is used."""
        return self.weights.get(HEAD_EMBEDDING)

    @property
    def tables(self) -> set[str]:
        """Files that are needed beside compiled engines."""
        refs = (self.embedding, self.lm_head_weight, self.token_ids)
        return {ref.location for ref in refs if ref is not None}

    @property
    def files(self) -> set[str]:
        """All files."""
        return {ref.location for ref in self.weights.values()} | self.tables


def place_head(plan: HeadPlan, target_lm_head: Table, directory: Path) -> PlacedHead:
    """Make the head's weights available below `directory`, each once.

    Raises:
        CheckpointError: a weight holds NaN or infinity, or overflows the dtype; the files cannot be written.
    """
    try:
        weights = _place_weights(plan, directory)
    except CheckpointError as error:
        raise CheckpointError(f"draft head {plan.name}: {error}") from None
    rows = plan.load_rows(target_lm_head) if plan.lm_head == "reduced" else None
    refs = _place_lm_head(plan, rows, directory)
    return PlacedHead(weights, refs.get(HEAD_LM_HEAD, weights.get(HEAD_LM_HEAD)), refs.get(TOKEN_IDS))


def head_parts(
    plan: HeadPlan, placed: PlacedHead, target_lm_head: Table, directory: Path, limits: Limits, *, on_cpu: bool
) -> Iterator[Part]:
    """The graphs of a head, for one runtime.

    Args:
        on_cpu: for ONNX Runtime, whose LM heads have their weight inside.
    """
    config, dtype, rows = plan.config, plan.dtype, limits.head_cache_rows
    yield Part(
        draft_head_spec(config, rows, dtype),
        target_profiles(limits.max_batch_size, HEAD_WIDTH, HEAD_CHUNK, rows),
        partial(draft_head_graph, config, placed.weights, directory, cache_rows=rows, dtype=dtype),
    )
    widest = limits.max_batch_size * HEAD_WIDTH
    if plan.has_fuse:
        yield Part(
            fuse_spec(config, dtype),
            lm_head_profiles(max(HEAD_CHUNK, widest)),
            partial(fuse_graph, config, placed.weights, directory, dtype=dtype),
        )
    as_input = not on_cpu and placed.lm_head_weight is not None
    spec = draft_lm_head_spec(config, dtype, weight_as_input=as_input)
    if placed.lm_head_weight is not None:
        graph = partial(
            draft_lm_head_graph, config, placed.lm_head_weight, directory, dtype=dtype, weight_as_input=as_input
        )
        yield Part(spec, lm_head_profiles(widest), graph)
    elif plan.lm_head == "int4":
        yield Part(
            spec,
            lm_head_profiles(widest),
            lambda: int4_draft_lm_head_graph(config, plan.load_rows(target_lm_head), dtype=dtype),
        )


def describe_head(plan: HeadPlan, placed: PlacedHead) -> DraftHeadRecord:
    """The head's record in engine.json."""
    return DraftHeadRecord(
        name=plan.name,
        origin=plan.origin,
        config=plan.config.to_json(),
        decisions={decision.name: decision.to_json() for decision in plan.head.decisions},
        lm_head=plan.lm_head,
        embedding=placed.embedding,
        lm_head_weight=placed.lm_head_weight,
        token_ids=placed.token_ids,
    )


def _place_weights(plan: HeadPlan, directory: Path) -> dict[str, WeightRef]:
    source, shapes = plan.head.tensors, plan.shapes
    if plan.in_place:
        return place_weights(source, shapes, directory, HEAD_DIR, "", plan.dtype)
    # Compiled engines swallow the body; the tables stay files.
    tables = {name: shape for name, shape in shapes.items() if name in (HEAD_EMBEDDING, HEAD_LM_HEAD)}
    body = {name: shape for name, shape in shapes.items() if name not in tables}
    weights = place_weights(source, body, directory, HEAD_DIR, "body.safetensors", plan.dtype, link=False)
    if tables:
        weights |= place_weights(source, tables, directory, HEAD_DIR, "tables.safetensors", plan.dtype, link=False)
    return weights


def _place_lm_head(plan: HeadPlan, rows: torch.Tensor | None, directory: Path) -> dict[str, WeightRef]:
    """Write the token ids and the chosen rows `[draft_vocab, hidden]`, where there are any, by name."""
    tensors: dict[str, torch.Tensor] = {}
    if plan.token_ids is not None:
        tensors[TOKEN_IDS] = torch.tensor(plan.token_ids, dtype=torch.int32)
    if rows is not None:
        tensors[HEAD_LM_HEAD] = rows
    if not tensors:
        return {}
    layout = {
        name: TensorInfo(str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in tensors.items()
    }
    ranges = write_safetensors(directory / DRAFT_LM_HEAD_FILE, layout.items(), tensors.__getitem__)
    return {
        name: WeightRef(DRAFT_LM_HEAD_FILE, at.offset, at.nbytes, layout[name].dtype, layout[name].shape)
        for name, at in ranges.items()
    }
