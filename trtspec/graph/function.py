"""Model-local functions: an operation of our own with a body of standard ones, for runtimes without its plugin.

TensorRT takes a registered plugin of the function's name; every other runtime runs the body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from trtspec.graph.builder import OPSET

DOMAIN = "trtspec"
DOMAIN_VERSION = 1
# TensorRT's parser looks for a plugin in the namespace that a node names, and older ones (10.x) in no other.
_NAMESPACE = "plugin_namespace"


class FunctionBody:
    """Collects the nodes of one function.

    Attribute values are constants of the body, so a model holds one body per function name.
    """

    def __init__(self, name: str, inputs: Sequence[str]) -> None:
        self.name = name
        self.inputs = [ir.Value(name=input_name) for input_name in inputs]
        self._nodes: list[ir.Node] = []

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Append a node with one output."""
        return self._append(op_type, inputs, attributes)

    def constant(self, array: np.ndarray) -> ir.Value:
        """A tensor of the array's dtype and shape."""
        return self._append("Constant", (), {"value": ir.tensor(array)})

    def int32(self, values: int | Sequence[int]) -> ir.Value:
        """A scalar, or `[size]`."""
        return self.constant(np.array(values, np.int32))

    def counting(self, size: int, shape: tuple[int, ...] = (1, -1)) -> ir.Value:
        """int32 0..size-1, by default `[1, size]`."""
        return self.constant(np.arange(size, dtype=np.int32).reshape(shape))

    def unsqueeze(self, value: ir.Value, axis: int) -> ir.Value:
        """The value with a new axis of size 1."""
        return self.op("Unsqueeze", value, self.axes(axis))

    def axes(self, *axes: int) -> ir.Value:
        """The int64 operand that gives axes or a shape."""
        return self.constant(np.array(axes, np.int64))

    def function(self, attributes: Mapping[str, int], outputs: Sequence[tuple[str, ir.Value]]) -> ir.Function:
        """The function, which takes these attributes and gives these outputs."""
        results = [self.op("Identity", value) for _, value in outputs]
        for result, (name, _) in zip(results, outputs, strict=True):
            result.name = name
        graph = ir.Graph(self.inputs, results, nodes=self._nodes, opset_imports={"": OPSET}, name=self.name)
        declared = [ir.Attr(name, ir.AttributeType.INT, None) for name in attributes]
        declared.append(ir.Attr(_NAMESPACE, ir.AttributeType.STRING, None))
        return ir.Function(DOMAIN, self.name, graph=graph, attributes=declared)

    def _append(self, op_type: str, inputs: Sequence[ir.Value], attributes: Mapping[str, Any]) -> ir.Value:
        name = f"{self.name}/{len(self._nodes)}/{op_type}"
        node = ir.node(op_type, list(inputs), attributes=attributes or None, name=name, num_outputs=1)
        node.outputs[0].name = f"{name}:0"
        self._nodes.append(node)
        return node.outputs[0]


def call(function: ir.Function, inputs: Sequence[ir.Value], attributes: Mapping[str, int], path: str) -> ir.Node:
    """A node that calls the function; its outputs are named path + ":0" and so on."""
    node = ir.node(
        function.name,
        list(inputs),
        attributes={**attributes, _NAMESPACE: DOMAIN},
        domain=DOMAIN,
        name=path,
        num_outputs=len(function.outputs),
    )
    for index, output in enumerate(node.outputs):
        output.name = f"{path}:{index}"
    return node
