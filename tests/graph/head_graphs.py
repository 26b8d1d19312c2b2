"""Tiny draft heads of every format and variant, their graphs in ONNX Runtime, and ways to draft with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import onnx
import onnx_ir as ir
import torch
from checkpoint import heads
from checkpoint.heads import HIDDEN, VOCAB, make_e1, make_e2, make_e3, make_e4, weight
from graph.head_oracle import HeadOracle, OracleSession, Outputs, Switches

from trtspec.checkpoint.convert import place_weights
from trtspec.checkpoint.draft_head import open_draft_head, weight_shapes
from trtspec.engine.base import TORCH_DTYPES
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.onnxruntime_engine import OnnxRuntimeEngine
from trtspec.graph.draft_head import draft_head_graph, draft_head_spec, fuse_graph, fuse_spec
from trtspec.tensors import GraphSpec

CACHE_ROWS = 48
NARROW = 48
IDS = "eagle_aux_hidden_state_layer_ids"
Make = Callable[[Path], Any]
Level = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """A head: how its directory is written, with which options it is opened, and what the oracle makes of those."""

    make: Make
    options: Mapping[str, str] = field(default_factory=dict)
    switches: Switches = field(default_factory=Switches)
    target_hidden: int = HIDDEN
    shared: bool = True
    """Equal tables of the target are used instead of the head's."""


def _case(make: Callable[..., Any], **arguments: Any) -> Case:
    return Case(lambda directory: make(directory, **arguments))


def _switched(case: Case, options: Mapping[str, str], **switches: Any) -> Case:
    return Case(case.make, options, Switches(**switches), case.target_hidden)


def nvidia(directory: Path, eagle_config: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """NVIDIA's EAGLE-3 format."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: [1, 3, 4], **(eagle_config or {})}}
    fixed: dict[str, Any] = {"names": "layers.0", "maps": ["d2t"], "safetensors": True}
    return make_e3(directory, config=config, **fixed, **arguments)


def vllm_eagle3(directory: Path) -> Any:
    """EAGLE-3 as vLLM holds it, with joint projections; weights are ranges of the file's tensors."""
    tensors = {name: tensor for name, tensor in heads.fuse(heads.e3_tensors()).items() if name != "t2d"}
    tensors["draft_id_to_target_id"] = tensors.pop("d2t")
    config = {**heads.CONFIG, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": heads.DRAFT_VOCAB}
    return heads.save_head(directory, tensors, config, rename=lambda name: f"model.{name}")


def norms(*names: str) -> dict[str, torch.Tensor]:
    """Norm weights as wide as the head."""
    return {name: weight(name, HIDDEN) for name in names}


HALF = {name: tensor.half() for name, tensor in heads.e1_tensors().items()}
OTHER_NUMBERS = {"rope_theta": 50.0, "rms_norm_eps": 0.05}
SLOTS = norms("layers.0.input_layernorm.weight", "norm.weight")
EAGLE_NORMS = norms("embed_layernorm.weight", "hidden_layernorm.weight", "lm_head_layernorm.weight")
APPLIED = {"skip_prenorm": False, "skip_output_norm": False}
QWEN3 = {"model_type": "qwen3"}
ROPE = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
E1_NORMS, E3 = _case(make_e1, changes=SLOTS), _case(make_e3)

CASES: dict[str, Case] = {
    "e1": _case(make_e1),
    "e1_no_fc_bias": _case(make_e1, fc_bias=False),
    "e1_qkv_bias": _case(make_e1, qkv_bias=True),
    "e1_two_layers": _case(make_e1, layers=2),
    "e1_poison": _case(make_e1, poison=True),
    "e1_numbers": _case(make_e1, config=OTHER_NUMBERS),
    "e1_linear_rope": _case(make_e1, config={**OTHER_NUMBERS, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "e1_input_norm": _switched(E1_NORMS, {"input_norm": "true"}, first_input_norm=True),
    "e1_final_norm": _switched(E1_NORMS, {"output_norm": "true"}, final_norm=True),
    "e1_eagle_norms": _case(make_e1, changes=EAGLE_NORMS),
    "e2": Case(make_e2, shared=False),
    "e2_long_names": _case(make_e2, rename=heads.vllm_name),
    "e2_token_map": Case(lambda directory: make_e2(directory, mapped=True), shared=False),
    "e2_token_map_16_rows": _case(make_e2, mapped=True, lm_head_rows=heads.TOKEN_MAP),
    "e2_slots_ignored": _case(make_e2, slots=True),
    "e2_slots_applied": _case(make_e2, slots=True, config=APPLIED),
    "e2_slots_applied_pre_norm_fed": _switched(
        _case(make_e2, slots=True, config=APPLIED), {"norm_output": "false"}, feed_post_norm=False
    ),
    "e2_para_norm": _case(make_e2, para_norm=True),
    "e2_mixed_dtypes": _switched(
        _case(make_e2, changes={**HALF, "lm_head.weight": heads.target_lm_head()}), {"embedding": "head"}
    ),
    "e2_no_bias_flag": _case(make_e2, bias_flag=False),
    "e3": E3,
    "e3_embedding": _case(make_e3, with_embedding=True),
    "e3_narrow": Case(
        lambda directory: make_e3(directory, target_hidden=NARROW, with_embedding=True), target_hidden=NARROW
    ),
    "e3_whole_vocabulary": _case(make_e3, draft_vocab=VOCAB),
    "e3_zero_map": _case(make_e3, draft_vocab=VOCAB, changes={"d2t": torch.zeros(VOCAB, dtype=torch.int64)}),
    "e3_targets_lm_head": _case(make_e3, draft_vocab=VOCAB, changes={"lm_head.weight": None}),
    "e3_head_dim": _case(make_e3, head_dim=24),
    "e3_forty_layers": _case(make_e3, config={"num_hidden_layers": 40}),
    "e3_numbers": _case(make_e3, config=OTHER_NUMBERS),
    "e3_fc_bias": _case(make_e3, changes=norms("fc.bias")),
    "e3_no_final_norm": _switched(E3, {"output_norm": "false"}, final_norm=False),
    "e3_post_norm_fed": _switched(E3, {"norm_output": "true"}, feed_post_norm=True),
    "e3_normed_residual": _switched(E3, {"norm_before_residual": "true"}, norm_before_residual=True),
    "e3_double_norm": _switched(E3, {"double_hidden_norm": "true"}, double_hidden_norm=True),
    "e3_nvidia": _case(nvidia),
    "e3_nvidia_no_fc": _case(nvidia, changes={"fc.weight": None}, eagle_config={"use_aux_hidden_state": False}),
    "e3_nvidia_no_norm": _case(nvidia, changes={"norm.weight": None}, eagle_config={"use_last_layernorm": False}),
    "e3_nvidia_post_norm": _case(nvidia, eagle_config={"return_hidden_post_norm": True}),
    "e4": _case(make_e4),
    "e4_norm_before_fc": _case(make_e4, feature_norm="whole"),
    "e4_fc_norm": _case(make_e4, feature_norm="per_feature"),
    "e4_norm_output": _case(make_e4, config={"norm_output": True}),
    "e4_normed_residual": _case(make_e4, config={"norm_before_residual": True}),
    "e4_all_norms": _case(
        make_e4, feature_norm="per_feature", config={"norm_output": True, "norm_before_residual": True}
    ),
    "e4_two_layers": _case(make_e4, layers=2),
    "e4_qwen3": _case(make_e4, qk_norm=True, layer_config=QWEN3),
    "e4_qwen3_bias": _case(make_e4, qk_norm=True, bias=True, layer_config={**QWEN3, "attention_bias": True}),
    "e4_whole_vocabulary": _case(make_e4, draft_vocab=VOCAB),
    "e4_rope_parameters": _case(make_e4, layer_config=ROPE),
}
# Cases whose graphs have the same nodes, by the case that stands for them.
SAME_GRAPH: dict[str, Sequence[str]] = {
    "e1": (
        *("e1_poison", "e1_numbers", "e1_linear_rope", "e2", "e2_long_names", "e2_token_map", "e2_token_map_16_rows"),
        *("e2_slots_ignored", "e2_mixed_dtypes", "e2_no_bias_flag"),
    ),
    "e3": (
        *("e3_embedding", "e3_whole_vocabulary", "e3_zero_map", "e3_targets_lm_head", "e3_forty_layers", "e3_numbers"),
        *("e3_nvidia", "e4", "e4_whole_vocabulary", "e4_rope_parameters"),
    ),
    "e3_no_final_norm": ("e3_nvidia_no_norm",),
    "e3_post_norm_fed": ("e3_nvidia_post_norm", "e4_norm_output"),
    "e3_normed_residual": ("e4_normed_residual",),
}


class Session(Protocol):
    """A sequence of one head, which the graphs and the oracle both are."""

    @property
    def rows(self) -> int:
        """Rows so far."""

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Embedding rows."""

    def first_hidden(self, features: torch.Tensor) -> torch.Tensor:
        """What rows with the target's features receive."""

    def add(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> Outputs:
        """Append rows; visible `[new rows, all rows]`."""

    def drop(self, rows: int) -> None:
        """Forget all but the first rows."""


class HeadGraphs:
    """A head's directory and the graphs made of it, one folder per dtype."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.case = case
        self.source, self._directory = directory / "head", directory
        case.make(self.source)
        target = heads.target_config(hidden_size=case.target_hidden)
        tables = (self.target_embedding, heads.target_lm_head) if case.shared else ()
        self.head = open_draft_head(self.source, target, case.options, *tables)
        self.config = self.head.config

    def target_embedding(self) -> torch.Tensor:
        """The target's embedding table."""
        return heads.embedding(self.case.target_hidden)

    def oracle(self, switches: Switches | None = None) -> OracleSession:
        """A sequence of the oracle's."""
        return OracleSession(self.oracle_head(switches))

    def oracle_head(self, switches: Switches | None = None) -> HeadOracle:
        """The oracle, wired as the case says unless told otherwise."""
        tables = (self.target_embedding(), heads.target_lm_head())
        return HeadOracle(self.source, *tables, switches or self.case.switches)

    def export(self, dtype: str) -> Path:
        """Place the weights and write draft_head.onnx and, where the head has one, fuse.onnx; returns their folder."""
        folder = self._directory / dtype
        if not folder.exists():
            shapes = weight_shapes(self.config)
            weights = place_weights(self.head.tensors, shapes, folder, "weights", "w.safetensors", dtype)
            body = draft_head_graph(self.config, weights, folder, cache_rows=CACHE_ROWS, dtype=dtype)
            ir.save(body, folder / "draft_head.onnx")
            if "fuse" in self.specs(dtype):
                ir.save(fuse_graph(self.config, weights, folder, dtype=dtype), folder / "fuse.onnx")
        return folder

    def specs(self, dtype: str) -> dict[str, GraphSpec]:
        """The declarations of the head's graphs."""
        specs = {"draft_head": draft_head_spec(self.config, CACHE_ROWS, dtype)}
        if self.config.kind == "eagle3" and self.config.has_fc:
            specs["fuse"] = fuse_spec(self.config, dtype)
        return specs

    def nodes(self) -> list[list[tuple[str, list[str], list[str]]]]:
        """Operators of the head's graphs with their inputs and outputs."""
        folder = self.export("float16")
        models = [onnx.load(folder / f"{name}.onnx", load_external_data=False) for name in self.specs("float16")]
        return [[(node.op_type, list(node.input), list(node.output)) for node in model.graph.node] for model in models]

    def session(self, dtype: str = "float32", slots: int = 1) -> GraphSession:
        """A sequence of the graphs', in the first slot of a cache of its own."""
        folder, specs = self.export(dtype), self.specs(dtype)
        engines = {name: OnnxRuntimeEngine(folder / f"{name}.onnx", spec) for name, spec in specs.items()}
        cache = KVCache(
            num_layers=self.config.num_layers,
            slots=slots,
            num_kv_heads=self.config.num_kv_heads,
            rows=CACHE_ROWS,
            head_dim=self.config.head_dim,
            dtype=TORCH_DTYPES[dtype],
            device=torch.device("cpu"),
        )
        return GraphSession(self, engines, cache, dtype)

    @cached_property
    def embedding_table(self) -> torch.Tensor:
        """The head's or the target's, as the record says."""
        return self.head.tensors.load("embed_tokens.weight") if self.config.own_embedding else self.target_embedding()

    @cached_property
    def lm_head(self) -> torch.Tensor:
        """The head's or the target's, of which only the drafted rows."""
        if self.config.own_lm_head:
            return self.head.tensors.load("lm_head.weight")
        rows = heads.target_lm_head()
        return rows if self.config.token_ids is None else rows[list(self.config.token_ids)]


class GraphSession:
    """One sequence of a head in ONNX Runtime."""

    def __init__(
        self, graphs: HeadGraphs, engines: Mapping[str, OnnxRuntimeEngine], cache: KVCache, dtype: str, slot: int = 0
    ) -> None:
        self.graphs, self._engines, self.cache, self._slot, self._dtype = graphs, engines, cache, slot, dtype
        self.rows = 0

    def beside(self, slot: int) -> GraphSession:
        """Another sequence in the same cache."""
        return GraphSession(self.graphs, self._engines, self.cache, self._dtype, slot)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.graphs.embedding_table[list(tokens)]

    def first_hidden(self, features: torch.Tensor) -> torch.Tensor:
        if "fuse" not in self._engines:
            return features
        return self._engines["fuse"].run({"features": self._cast(features)})["fused"].clone()

    def add(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> Outputs:
        lengths = torch.tensor([self.rows])
        batched = (embeds[None], hidden[None], positions[None], lengths, visible[None, None])
        (outputs,) = self.run(*batched, start=self._slot)
        self.rows += embeds.shape[0]
        return outputs

    def run(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        mask: torch.Tensor,
        start: int = 0,
    ) -> list[Outputs]:
        """One pass over the slots from `start` on; one result per sequence."""
        inputs = {
            "inputs_embeds": self._cast(embeds),
            "hidden_input": self._cast(hidden),
            "position_ids": positions.contiguous(),
            "cache_length": lengths,
            "tree_mask": mask.contiguous(),
        }
        found = self._engines["draft_head"].run(inputs, self.cache.view(start, embeds.shape[0]))
        feedback = found["feedback"].clone()
        logit_hidden = found["logit_hidden"].clone() if "logit_hidden" in found else feedback
        logits = logit_hidden.float() @ self.graphs.lm_head.float().T
        return [Outputs(*values) for values in zip(feedback, logit_hidden, logits, strict=True)]

    def drop(self, rows: int) -> None:
        self.rows = rows

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(TORCH_DTYPES[self._dtype]).contiguous()


def features(graphs: HeadGraphs, rows: int, seed: int) -> torch.Tensor:
    """The target's hidden states, those of later layers larger, `[rows, features * target hidden size]`."""
    config, generator = graphs.config, torch.Generator().manual_seed(seed)
    count = config.num_features
    scale = torch.tensor([2.0**n for n in range(count)])[:, None]
    values = torch.randn((rows, count, config.target_hidden_size), generator=generator) * scale
    return values.flatten(1)


def refresh(session: Session, tokens: Sequence[int], target_features: torch.Tensor) -> Outputs:
    """Append committed tokens, each with the target's features before it."""
    start, new = session.rows, len(tokens)
    visible = torch.ones(new, start + new, dtype=torch.bool).tril(start)
    hidden = session.first_hidden(target_features)
    return session.add(session.embed(tokens), hidden, torch.arange(start, start + new), visible)


def grow(session: Session, root: torch.Tensor, levels: Sequence[Level]) -> list[Outputs]:
    """Append a tree level by level below `root` `[hidden]`; a node is its token and its parent's place one level up.

    Nodes of one level share a position and see the committed rows, their ancestors and themselves.
    """
    start, above, results = session.rows, root[None], []
    paths: list[list[int]] = [[]]
    for depth, level in enumerate(levels):
        first, count = session.rows, len(level)
        hidden = above[[parent for _, parent in level]]
        paths = [[*paths[parent], first + node] for node, (_, parent) in enumerate(level)]
        visible = torch.zeros(count, first + count, dtype=torch.bool)
        visible[:, :start] = True
        for node, path in enumerate(paths):
            visible[node, path] = True
        embeds = session.embed([token for token, _ in level])
        results.append(session.add(embeds, hidden, torch.full((count,), start + depth), visible))
        above = results[-1].feedback
    return results


def chain(session: Session, root: torch.Tensor, tokens: Sequence[int]) -> list[Outputs]:
    """Append tokens one by one, each with what the head fed back before it."""
    return grow(session, root, [[(token, 0)] for token in tokens])
