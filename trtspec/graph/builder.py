"""A small layer over onnx_ir: named nodes, external weights, declared inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from trtspec.tensors import GraphSpec, TensorSpec, WeightRef

OPSET = 24
# Opset 24 came with IR version 11; a newer IR version would shut out runtimes that read the opset well.
IR_VERSION = 11

IR_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int64": ir.DataType.INT64,
    "int32": ir.DataType.INT32,
    "bool": ir.DataType.BOOL,
    "int4": ir.DataType.INT4,
}


class GraphBuilder:
    """Collects nodes, weights, inputs and outputs, and makes the model.

    Node paths look like /model/layers.0/attn/q_proj/Gemm, and a node's output is called path + ":0".
    """

    def __init__(self, spec: GraphSpec, weights: Mapping[str, WeightRef], directory: Path) -> None:
        self.spec = spec
        self._weights = weights
        self._directory = directory
        self._nodes: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}
        self.inputs = {tensor.name: self._declared(tensor) for tensor in spec.inputs}
        self._outputs: dict[str, ir.Value] = {}

    def op(self, op_type: str, path: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Append a node with one output."""
        node = ir.node(op_type, list(inputs), attributes=attributes or None, name=f"{path}/{op_type}", num_outputs=1)
        node.outputs[0].name = f"{path}/{op_type}:0"
        self._nodes.append(node)
        return node.outputs[0]

    def weight(self, name: str) -> ir.Value:
        """The initializer for a checkpoint tensor, pointing into its file."""
        if name not in self._initializers:
            ref = self._weights[name]
            tensor = ir.ExternalTensor(
                location=ref.location,
                offset=ref.offset,
                length=ref.nbytes,
                dtype=IR_DTYPES[ref.dtype],
                shape=ir.Shape(ref.shape),
                name=name,
                base_dir=str(self._directory),
            )
            self._add_initializer(name, tensor, ref.shape)
        return self._initializers[name]

    def constant(self, name: str, array: np.ndarray, dtype: str) -> ir.Value:
        """An initializer stored in the graph file; `array` must hold values of the given dtype."""
        if name not in self._initializers:
            self._add_initializer(name, ir.Tensor(array, dtype=IR_DTYPES[dtype], name=name), array.shape)
        return self._initializers[name]

    def output(self, name: str, value: ir.Value) -> None:
        """Make a value the declared output of this name."""
        declared = next(tensor for tensor in self.spec.outputs if tensor.name == name)
        value.name = name
        value.type = ir.TensorType(IR_DTYPES[declared.dtype])
        value.shape = ir.Shape(declared.axes)
        self._outputs[name] = value

    def model(self) -> ir.Model:
        """The finished model; every declared output must have been given."""
        outputs = [self._outputs[tensor.name] for tensor in self.spec.outputs]
        graph = ir.Graph(
            list(self.inputs.values()),
            outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": OPSET},
            name=self.spec.name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="trtspec")

    def _declared(self, tensor: TensorSpec) -> ir.Value:
        return ir.Value(name=tensor.name, type=ir.TensorType(IR_DTYPES[tensor.dtype]), shape=ir.Shape(tensor.axes))

    def _add_initializer(self, name: str, tensor: ir.TensorProtocol, shape: tuple[int, ...]) -> None:
        self._initializers[name] = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape), const_value=tensor
        )
