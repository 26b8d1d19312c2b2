"""Reads a graph into a TensorRT network, and checks networks and engines against their declarations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from trtspec.engine.tensorrt_package import load_tensorrt, tensorrt_logger
from trtspec.errors import EngineError
from trtspec.tensors import GraphSpec, TensorSpec

DTYPE_NAMES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class ParsedNetwork:
    """A network and what must stay alive with it: the parser maps the weight files that the network reads."""

    runtime: str
    tensorrt: ModuleType
    builder: Any
    network: Any
    parser: Any

    def errors(self) -> list[str]:
        """The runtime's error lines since the last call."""
        return list(tensorrt_logger(self.runtime).take_errors())


def parse_network(runtime: str, onnx_path: Path, spec: GraphSpec) -> ParsedNetwork:
    """Read a graph; its weights stay in the files that it names.

    Raises:
        EngineError: the runtime doesn't take the graph.
    """
    trt, trt_logger = load_tensorrt(runtime), tensorrt_logger(runtime)
    trt_logger.take_errors()
    try:
        builder = trt.Builder(trt_logger)
    except Exception as error:
        raise EngineError(message(f"{runtime} made no builder", trt_logger.take_errors() or [str(error)])) from error
    network = builder.create_network(_network_flags(runtime, trt))
    parser = trt.OnnxParser(network, trt_logger)
    if runtime == "tensorrt" and hasattr(trt.OnnxParserFlag, "ENABLE_PLUGIN_OVERRIDE"):
        # Versions differ in what they take for a node that has both: a registered plugin, or the graph's function.
        parser.set_flag(trt.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE)
    if not parser.parse_from_file(str(onnx_path)):
        # The parser's own errors leave out which file could not be opened.
        raise EngineError(message(f"{runtime} could not parse the graph {onnx_path}", trt_logger.take_errors()))
    parsed = ParsedNetwork(runtime, trt, builder, network, parser)
    if _needs_decomposition(spec):
        _allow_decomposition(parsed)
    return parsed


def _network_flags(runtime: str, trt: ModuleType) -> int:
    creation = trt.NetworkDefinitionCreationFlag
    flags = 1 << int(creation.STRONGLY_TYPED)
    # TensorRT-RTX has the parser's flag too, but takes no plugins made in Python, and refuses this one.
    if runtime == "tensorrt" and hasattr(creation, "PREFER_AOT_PYTHON_PLUGINS"):
        # The plugins of trtspec come both compiled and as Python functions; TensorRT wants to be told which to take.
        flags |= 1 << int(creation.PREFER_AOT_PYTHON_PLUGINS)
    return flags


def check_network(parsed: ParsedNetwork, spec: GraphSpec) -> None:
    """Raise EngineError where the network differs from the declaration in names, dtypes, shapes or aliases."""
    network = parsed.network
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    what = f"the network of {spec.name}"
    check_tensors(f"{what}: input", spec.inputs, {t.name: (t.dtype, tuple(t.shape)) for t in inputs})
    check_tensors(f"{what}: output", spec.outputs, {t.name: (t.dtype, tuple(t.shape)) for t in outputs})
    updates = {
        layer.get_output(0).name: layer.get_input(0).name
        for layer in _layers(parsed)
        if layer.type == parsed.tensorrt.LayerType.KV_CACHE_UPDATE
    }
    check_aliases(what, spec, updates)


def check_tensors(what: str, declared: Iterable[TensorSpec], found: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
    """Raise EngineError where tensors differ from their declarations.

    Args:
        what: how the message calls one of them.
        found: name -> (TensorRT dtype, shape with -1 for a dynamic axis).
    """
    expected = {tensor.name: tensor for tensor in declared}
    for problem, names in (("missing", expected.keys() - found.keys()), ("unexpected", found.keys() - expected.keys())):
        if names:
            raise EngineError(f"{what} {', '.join(sorted(names))} is {problem}; rebuild the graph")
    for name, tensor in expected.items():
        dtype, shape = found[name]
        if DTYPE_NAMES.get(dtype.name) != tensor.dtype:
            raise EngineError(f"{what} {name} has dtype {dtype.name}, expected {tensor.dtype}; rebuild the graph")
        if shape != tuple(-1 if isinstance(axis, str) else axis for axis in tensor.axes):
            raise EngineError(f"{what} {name} has shape {shape}, expected {tensor.axes}; rebuild the graph")


def check_aliases(what: str, spec: GraphSpec, found: Mapping[str, str | None]) -> None:
    """Raise EngineError where the outputs that update an input in place are not those of the declaration."""
    for output, source in spec.aliases.items():
        if found.get(output) != source:
            raise EngineError(
                f"{what}: output {output} is not a KV cache update of input {source} "
                f"(found: {found.get(output) or 'none'}); rebuild the graph"
            )
    for output, actual in found.items():
        if actual is not None and output not in spec.aliases:
            raise EngineError(f"{what}: output {output} updates input {actual} in place, which is not declared")


def layer_counts(parsed: ParsedNetwork) -> dict[str, int]:
    """How many layers of each type the network has, by TensorRT's names, such as KV_CACHE_UPDATE."""
    return dict(Counter(layer.type.name for layer in _layers(parsed)))


def message(what: str, errors: list[str]) -> str:
    """What failed, and the reasons that the runtime logged."""
    return f"{what}: {'; '.join(errors) or 'no reason given'}"


def _needs_decomposition(spec: GraphSpec) -> bool:
    """Whether attention has no fused kernel: float32, or a head_dim outside 16 to 256."""
    dim = head_dim(spec)
    if dim is None:
        return False
    cache_dtype = next(tensor.dtype for tensor in spec.inputs if tensor.name in spec.aliases.values())
    return cache_dtype == "float32" or not 16 <= dim <= 256


def _allow_decomposition(parsed: ParsedNetwork) -> None:
    """Let attention be compiled from primitives; set here because standard ONNX has no attribute for it."""
    trt = parsed.tensorrt
    for layer in _layers(parsed):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            # get_layer gives the base class, which doesn't show the attention it belongs to.
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def head_dim(spec: GraphSpec) -> int | None:
    """The last axis of the KV cache; None for a graph without one."""
    caches = [tensor for tensor in spec.inputs if tensor.name in spec.aliases.values()]
    return int(caches[0].axes[-1]) if caches else None


def _layers(parsed: ParsedNetwork) -> Iterator[Any]:
    return (parsed.network.get_layer(index) for index in range(parsed.network.num_layers))
