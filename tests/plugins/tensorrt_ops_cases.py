"""The plugins on TensorRT's bindings; `test_tensorrt_ops.py` runs this file in a process with stand-ins.

A plugin object is asked what TensorRT asks it while it builds an engine, and so in the same order.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tensorrt as trt
import tensorrt.plugin as trtp
import torch

from trtspec.graph.proposal import ProposalConfig, proposal_graph
from trtspec.plugins import reference, tensorrt_ops
from trtspec.plugins.kernels import plans

tensorrt_ops.register()

LOOKUP = {"ngram_min": 2, "ngram_max": 5, "num_tokens": 10, "branches": 3, "latest": 1}
MERGE = {"size": 40}
LOOKUP_INPUTS = [("batch", 4096), ("batch",)]
MERGE_INPUTS = [("batch", 3, 10), ("batch", 3), ("batch", 15), ("batch", 15), ("batch",), ("batch",)]
SIZES = {"batch": 5}
Shapes = Sequence[tuple[int | str, ...]]


def create(name: str, attributes: Mapping[str, int], request: str = "PREFER_AOT") -> Any:
    """A plugin made by its creator, as the ONNX parser makes it: integers are int64 fields."""
    creator = trt.get_plugin_registry().get_creator(name, "1", "trtspec")
    values = {key: np.array([value], np.int64) for key, value in attributes.items()}
    fields = [trt.PluginField(key, value, trt.PluginFieldType.INT64) for key, value in values.items()]
    wanted = getattr(trt.QuickPluginCreationRequest, request)
    collection = trt.PluginFieldCollection(fields)
    return creator.create_plugin(name, "trtspec", collection, trt.TensorRTPhase.BUILD, wanted)


class Asked:
    """A plugin that was asked for its outputs' dtypes and shapes."""

    def __init__(self, plugin: Any, inputs: Shapes) -> None:
        self.plugin, self.inputs = plugin, inputs
        self.dtypes = plugin.get_output_data_types([trt.DataType.INT32] * len(inputs), [len(s) for s in inputs])
        shapes = plugin.get_output_shapes([trt.DimsExprs(shape) for shape in inputs], [], trt.ExprBuilder())
        self.shapes = [tuple(size.value(SIZES) for size in shape) for shape in shapes]

    def tensors(self) -> list[Any]:
        """Inputs and outputs as they are while formats are chosen: dynamic axes are -1."""
        shapes = [[-1 if isinstance(size, str) else size for size in shape] for shape in self.inputs]
        return [dynamic(shape) for shape in [*shapes, *([-1, *shape[1:]] for shape in self.shapes)]]

    def configure(self, tactic: int) -> None:
        """Choose int32 in linear format everywhere, and a tactic."""
        tensors = self.tensors()
        self.plugin.get_supported_format_combinations(tensors, len(self.inputs))
        self.plugin.configure_plugin(tensors[: len(self.inputs)], tensors[len(self.inputs) :])
        assert tactic in self.plugin.get_valid_tactics()
        self.plugin.set_tactic(tactic)

    def kernel(self, tactic: int) -> Kernel:
        """What the ahead-of-time function gives for a tactic."""
        self.configure(tactic)
        launch, scalars, builder = SimpleNamespace(), trt.SymExprs(), trt.ExprBuilder()
        dims = [trt.DimsExprs(shape) for shape in self.inputs]
        tensors, count = self.tensors(), len(self.inputs)
        self.plugin.get_launch_params(dims, tensors, count, launch, scalars, builder)
        name, ptx = self.plugin.get_kernel([t.desc for t in tensors[:count]], [t.desc for t in tensors[count:]])
        return Kernel(name, ptx.decode(), {key: value.expr for key, value in vars(launch).items()}, scalars)


class Kernel:
    """A kernel as TensorRT will keep it."""

    def __init__(self, name: str, ptx: str, launch: dict[str, Any], scalars: Any) -> None:
        self.name, self.ptx = name, ptx
        self.launch = {key: size.value(SIZES) for key, size in launch.items()}
        assert {scalar.dtype for scalar in scalars} <= {trt.PluginArgDataType.INT32}
        self.scalars = [scalar.expr.value(SIZES) for scalar in scalars]

    def parameters(self) -> list[str]:
        """The types of the entry's parameters."""
        (entry,) = re.findall(rf"\.visible \.entry {self.name}\(([^)]*)\)", self.ptx)
        return re.findall(r"\.param \.(\w+)", entry)


def dynamic(shape: Sequence[int]) -> Any:
    result = trt.DynamicPluginTensorDesc()
    desc = trt.PluginTensorDesc()
    desc.dims, desc.type, desc.format = trt.Dims(list(shape)), trt.DataType.INT32, trt.TensorFormat.LINEAR
    result.desc = desc
    return result


def lookup(**changes: int) -> Asked:
    return Asked(create("ngram_draft", {**LOOKUP, **changes}), LOOKUP_INPUTS)


def merge(**changes: int) -> Asked:
    return Asked(create("merge_drafts", {**MERGE, **changes}), MERGE_INPUTS)


@pytest.fixture(autouse=True)
def capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the GPU that would build the engine."""
    monkeypatch.setattr(tensorrt_ops, "_capability", lambda: 80)


def test_registering_twice_does_nothing() -> None:
    tensorrt_ops.register()
    names = {creator.name for creator in trt.get_plugin_registry().all_creators}
    assert {"ngram_draft", "merge_drafts"} <= names


def test_plugins_are_called_by_name() -> None:
    made = trtp.op.trtspec.ngram_draft
    assert list(made.input_attrs.items()) == [(name, int) for name in LOOKUP]
    assert made.input_tensor_names == ["history", "lengths"]
    assert made.num_outputs == 3
    made = trtp.op.trtspec.merge_drafts
    assert made.input_attrs == {"size": int}
    assert made.num_outputs == 5
    with pytest.raises(ValueError, match="Unexpected attribute width"):
        made(width=1)


def test_outputs_have_the_inputs_batch() -> None:
    asked = lookup()
    assert set(asked.dtypes) == {trt.DataType.INT32}
    assert asked.shapes == [(5, 3, 10), (5, 3), (5, 3)]
    asked = merge()
    assert set(asked.dtypes) == {trt.DataType.INT32}
    assert asked.shapes == [(5, 40)] * 4 + [(5,)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ngram_min": 0}, "ngram_min is 0: choose 1 to 32"),
        ({"ngram_max": 1}, "ngram_max is 1, less than ngram_min 2: choose ngram_max >= ngram_min"),
        ({"num_tokens": 0}, "num_tokens is 0: choose at least 1"),
        ({"branches": -1}, "branches is -1: choose at least 1"),
        ({"latest": 2}, "latest is 2: choose 0 to 1"),
    ],
)
def test_attributes_of_the_lookup_are_checked(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lookup(**changes)


def test_attributes_of_the_merge_are_checked() -> None:
    with pytest.raises(ValueError, match="size is 0: choose at least 1"):
        merge(size=0)


def test_unknown_and_missing_attributes_are_refused() -> None:
    with pytest.raises(AssertionError, match="Unexpected attribute beams"):
        create("ngram_draft", {**LOOKUP, "beams": 1})
    with pytest.raises(TypeError, match="size"):
        Asked(create("merge_drafts", {}), MERGE_INPUTS)


def test_inputs_are_checked() -> None:
    plugin = create("ngram_draft", LOOKUP)
    with pytest.raises(ValueError, match=r"lengths is .*INT64: the plugin takes int32 only, cast it"):
        plugin.get_output_data_types([trt.DataType.INT32, trt.DataType.INT64], [2, 1])
    with pytest.raises(ValueError, match=r"history has 1 axes: the plugin takes 2, reshape it"):
        plugin.get_output_data_types([trt.DataType.INT32] * 2, [1, 1])


@pytest.mark.parametrize(("asked", "tactics"), [(lookup(), [1, 2]), (merge(), [1])], ids=["lookup", "merge"])
def test_formats_and_tactics(asked: Asked, tactics: list[int]) -> None:
    tensors = asked.tensors()
    offered = asked.plugin.get_supported_format_combinations(tensors, len(asked.inputs))
    assert [(desc.type, desc.format) for desc in offered] == [(trt.DataType.INT32, trt.TensorFormat.LINEAR)] * len(
        tensors
    )
    asked.configure(tactics[0])
    assert sorted(asked.plugin.get_valid_tactics()) == tactics


@pytest.mark.parametrize("tactic", [1, 2])
def test_ahead_of_time_lookup(tactic: int) -> None:
    kernel = lookup().kernel(tactic)
    threads = tensorrt_ops.TACTICS[tactic] * 32 * plans.ngram_draft_plan(**LOOKUP).num_warps
    assert kernel.name == "ngram_draft_kernel"
    assert ".target sm_80" in kernel.ptx
    # history, lengths; columns of the history; tokens, counts, match_lengths.
    assert kernel.parameters() == ["u64", "u64", "u32", "u64", "u64", "u64"]
    assert kernel.scalars == [4096]
    shared = kernel.launch.pop("shared_mem")
    assert shared < 48 << 10  # what a kernel gets without asking the driver for more
    assert kernel.launch == {**ONE_PROGRAM_A_SEQUENCE, "block_x": threads}
    assert f".reqntid {threads}" in kernel.ptx


def test_ahead_of_time_merge() -> None:
    kernel = merge().kernel(1)
    plan = plans.merge_drafts_plan(branches=3, num_tokens=10, nodes=15, size=40)
    assert kernel.name == "merge_drafts_kernel"
    assert kernel.parameters() == ["u64"] * 11
    assert kernel.scalars == []
    assert kernel.launch.pop("shared_mem") < 48 << 10
    assert kernel.launch == {**ONE_PROGRAM_A_SEQUENCE, "block_x": 32 * plan.num_warps}
    assert f".reqntid {32 * plan.num_warps}" in kernel.ptx


ONE_PROGRAM_A_SEQUENCE = {"grid_x": 5, "grid_y": 1, "grid_z": 1, "block_y": 1, "block_z": 1}


def test_tactics_are_different_kernels() -> None:
    asked = lookup()
    assert asked.kernel(1).ptx != asked.kernel(2).ptx


def test_sizes_that_kernels_are_compiled_for_must_be_fixed() -> None:
    inputs: Shapes = [("batch", 3, 10), ("batch", 3), ("batch", "nodes"), ("batch", "nodes"), ("batch",), ("batch",)]
    with pytest.raises(ValueError, match="axis 1 of eagle_tokens is -1, which is dynamic or empty: export it"):
        Asked(create("merge_drafts", MERGE), inputs).kernel(1)


def test_a_build_needs_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch finds none: build where there is one"):
        lookup().kernel(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert ".target sm_86" in lookup().kernel(1).ptx


@pytest.mark.parametrize("name", ["ngram_draft", "merge_drafts"])
def test_the_parser_takes_the_plugin_for_the_node(name: str, tmp_path: Path) -> None:
    # TensorRT-RTX's parser finds plugins as TensorRT's does, and then refuses those made in Python.
    config = ProposalConfig(
        max_len=64,
        eagle_nodes=4,
        size=8,
        ngram_min=1,
        ngram_max=3,
        ngram_tokens=4,
        ngram_branches=1,
        latest=False,
    )
    model = proposal_graph(config)
    for function in list(model.functions.values()):
        if function.name != name:
            # Only one of the nodes is looked for.
            next(node for node in model.graph if node.op_type == function.name).attributes.pop("plugin_namespace")
    path = tmp_path / "proposal.onnx"
    path.write_bytes(ir.serde.serialize_model(model).SerializeToString())
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert not parser.parse_from_file(str(path))
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    assert [error.node_operator() for error in errors] == [name]
    assert "registered with an IPluginCreatorV3One creator only" in errors[0].desc()


class OnCpu:
    """Takes the plugins' tensors for CPU memory, where triton's interpreter reads it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[int] = []
        monkeypatch.setattr(tensorrt_ops, "_torch", self.torch)
        monkeypatch.setattr(tensorrt_ops, "_on_stream", self.on_stream)

    def torch(self, tensor: Any) -> torch.Tensor:
        shape = tuple(tensor.shape)
        memory = (ctypes.c_int32 * int(np.prod(shape))).from_address(tensor.data_ptr)
        return torch.from_numpy(np.ctypeslib.as_array(memory)).view(shape)

    def on_stream(self, stream: int) -> Any:
        self.streams.append(stream)
        return torch.no_grad()


def execute(asked: Asked, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a just-in-time plugin on CPU memory."""
    outputs = [torch.full(shape, 99, dtype=torch.int32) for shape in asked.shapes]
    descs = [[dynamic(tensor.shape).desc for tensor in tensors] for tensors in (inputs, outputs)]
    pointers = [[tensor.data_ptr() for tensor in tensors] for tensors in (inputs, outputs)]
    strides = [[tensor.stride() for tensor in tensors] for tensors in (inputs, outputs)]
    asked.plugin.enqueue(*descs, *pointers, *strides, 7)
    return outputs


def test_just_in_time_functions_run_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, generator = OnCpu(monkeypatch), torch.Generator().manual_seed(0)

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, (5, *shape), generator=generator, dtype=torch.int32)

    history, lengths = ints(4, 96), torch.tensor([0, 1, 40, 95, 96], dtype=torch.int32)
    plugin = create("ngram_draft", LOOKUP, "STRICT_JIT")
    found = execute(Asked(plugin, [("batch", 96), ("batch",)]), [history, lengths])
    expected = reference.ngram_draft(history, lengths, **LOOKUP)
    assert all(map(torch.equal, found, expected))

    eagle = ints(4, 15), torch.stack([ints(node + 1) for node in range(15)], 1), ints(16)
    inputs = [*found[:2], *eagle, ints(50)]
    merged = execute(Asked(create("merge_drafts", MERGE, "STRICT_JIT"), MERGE_INPUTS), inputs)
    assert all(map(torch.equal, merged, reference.merge_drafts(*inputs, **MERGE)))
    assert cpu.streams == [7, 7]
