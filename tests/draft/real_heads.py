"""Drafting with the tiny heads of `graph.head_graphs` in ONNX Runtime, and with their oracle."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from graph.head_graphs import CASES, HeadGraphs, Session, chain, refresh
from graph.head_oracle import Outputs

from trtspec.checkpoint.convert import place_weights
from trtspec.checkpoint.draft_head import weight_shapes
from trtspec.config import Limits
from trtspec.engine.draft_head import DraftHeadRunner
from trtspec.engine.embedding import Embedding
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.onnxruntime_engine import OnnxRuntimeEngine
from trtspec.engine.target import LmHead
from trtspec.graph.draft_head import draft_head_graph, draft_head_spec, fuse_graph, fuse_spec
from trtspec.graph.draft_lm_head import draft_lm_head_graph, draft_lm_head_spec
from trtspec.tensors import WeightRef


class RealHead:
    """A head's graphs, exported once for some limits."""

    def __init__(self, graphs: HeadGraphs, limits: Limits, folder: Path) -> None:
        self.graphs, self.limits, self._folder = graphs, limits, folder
        config = graphs.config
        weights = place_weights(
            graphs.head.tensors, weight_shapes(config), folder, "weights", "w.safetensors", "float32"
        )
        rows = limits.head_cache_rows
        models = {"draft_head": draft_head_graph(config, weights, folder, cache_rows=rows, dtype="float32")}
        self._specs = {"draft_head": draft_head_spec(config, rows, "float32")}
        if config.kind == "eagle3" and config.has_fc:
            models["fuse"] = fuse_graph(config, weights, folder, dtype="float32")
            self._specs["fuse"] = fuse_spec(config, "float32")
        matrix = write_matrix(folder / "lm_head.bin", graphs.lm_head)
        models["lm_head"] = draft_lm_head_graph(config, matrix, folder, dtype="float32")
        self._specs["lm_head"] = draft_lm_head_spec(config, "float32", weight_as_input=False)
        for name, model in models.items():
            ir.save(model, folder / f"{name}.onnx")

    def load(self) -> tuple[DraftHeadRunner, KVCache]:
        """A runner of its own, and an empty cache."""
        engines = {name: OnnxRuntimeEngine(self._folder / f"{name}.onnx", spec) for name, spec in self._specs.items()}
        config = self.graphs.config
        ids = None if config.token_ids is None else torch.tensor(config.token_ids, dtype=torch.int32)
        runner = DraftHeadRunner(
            config,
            Embedding(self.graphs.embedding_table.float()),
            engines["draft_head"],
            LmHead(engines["lm_head"]),
            fuse=engines.get("fuse"),
            token_ids=ids,
        )
        cache = KVCache(
            num_layers=config.num_layers,
            slots=self.limits.max_batch_size,
            num_kv_heads=config.num_kv_heads,
            rows=self.limits.head_cache_rows,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        return runner, cache


class Shelf:
    """Heads by name of their case, each made once."""

    def __init__(self, limits: Limits, directories: pytest.TempPathFactory) -> None:
        self._limits, self._directories = limits, directories
        self._made: dict[str, RealHead] = {}

    def __getitem__(self, name: str) -> RealHead:
        if name not in self._made:
            graphs = HeadGraphs(CASES[name], self._directories.mktemp(name))
            self._made[name] = RealHead(graphs, self._limits, self._directories.mktemp(f"{name}-graphs"))
        return self._made[name]


def write_matrix(path: Path, matrix: torch.Tensor) -> WeightRef:
    """A file of nothing but one float32 matrix."""
    data = matrix.float().contiguous().numpy().tobytes()
    path.write_bytes(data)
    return WeightRef(path.name, 0, len(data), "float32", tuple(matrix.shape))


class OracleDrafts:
    """What a head should draft behind some tokens: each path is a chain that is computed anew, without a cache.

    `margin` is the smallest difference between two numbers whose order decided something: a draft whose margin is tiny
    says nothing about an implementation that rounds otherwise.
    """

    def __init__(self, graphs: HeadGraphs, tokens: Seq[int], features: torch.Tensor) -> None:
        """`features` `[tokens - 1, features]` are the target's, of all tokens but the last."""
        self._graphs, self._tokens, self._features = graphs, list(tokens), features
        self._oracle = graphs.oracle_head()
        self.margin = float("inf")

    def behind(self, path: Seq[int]) -> tuple[Outputs, torch.Tensor]:
        """The output of a path's last row, and its log-probabilities `[draft_vocab]`."""
        session: Session = self._graphs.oracle()
        last = refresh(session, self._tokens[1:], self._features)
        if path:
            last = chain(session, last.feedback[-1], path)[-1]
        last = Outputs(*(value[-1] for value in last))
        return last, torch.log_softmax(last.logits, dim=0)

    def chain(self, size: int) -> list[int]:
        """The tokens of a chain."""
        path: list[int] = []
        for _ in range(size):
            [(_, token)] = self._best(path, 1)
            path.append(token)
        return path

    def tree(self, top_k: int, depth: int, size: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of an EAGLE-2 tree."""
        level = [(score, (token,)) for score, token in self._best([], top_k)]
        pool = list(level)
        for _ in range(depth):
            beam = self._sorted(level)[:top_k]
            level = [(score + more, (*path, token)) for score, path in beam for more, token in self._best(path, top_k)]
            pool += level
        chosen = [path for score, path in pool if (score, path) in self._sorted(pool, size)[:size]]
        rows = {path: row for row, path in enumerate(chosen, 1)}
        return [path[-1] for path in chosen], [rows.get(path[:-1], 0) for path in chosen]

    def _best(self, path: Seq[int], count: int) -> list[tuple[float, int]]:
        """Log-probabilities and the target's ids, best first."""
        ids, log_probs = self._oracle.token_ids(), self.behind(path)[1].tolist()
        ranked = sorted(zip(log_probs, ids, strict=True), reverse=True)
        self._note([score for score, _ in ranked[: count + 1]])
        return ranked[:count]

    def _sorted(
        self, level: list[tuple[float, tuple[int, ...]]], count: int | None = None
    ) -> list[tuple[float, tuple[int, ...]]]:
        ranked = sorted(level, reverse=True)
        scores = [score for score, _ in ranked]
        self._note(scores if count is None else scores[count - 1 : count + 1])
        return ranked

    def _note(self, scores: list[float]) -> None:
        gaps = [first - second for first, second in pairwise(scores)]
        self.margin = min([self.margin, *gaps])
