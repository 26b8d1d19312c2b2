"""Graph pieces that several graphs share: linear layers, norms, the gated MLP, rotary tables."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtspec.checkpoint.rope import RopeConfig
from trtspec.graph.builder import GraphBuilder

NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def linear(builder: GraphBuilder, path: str, x: ir.Value, weight: ir.Value, bias: ir.Value | None = None) -> ir.Value:
    """x `[rows, in]` times weight `[out, in]` transposed, plus bias `[out]`: `[rows, out]`.

    Gemm with transB reads the checkpoint's layout as it is, and is the form that ONNX Runtime packs ahead of time.
    """
    return builder.op("Gemm", path, x, weight, *([bias] if bias is not None else []), transB=1)


def rms_norm(builder: GraphBuilder, path: str, x: ir.Value, weight: ir.Value, epsilon: float) -> ir.Value:
    """RMSNorm over the last axis, computed in float32."""
    return builder.op("RMSNormalization", path, x, weight, axis=-1, epsilon=epsilon)


def reshape(builder: GraphBuilder, path: str, x: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    """Reshape to a fixed shape; 0 keeps the axis, -1 is inferred."""
    name = "/shapes/" + "x".join(str(size) for size in shape)
    return builder.op("Reshape", path, x, builder.constant(name, np.array(shape, np.int64), "int64"))


def slice_columns(builder: GraphBuilder, path: str, x: ir.Value, start: int, width: int) -> ir.Value:
    """Columns start..start+width-1 of x `[rows, columns]`."""
    bounds = [
        builder.constant(f"/shapes/index_{value}", np.array([value], np.int64), "int64")
        for value in (start, start + width, 1)
    ]
    return builder.op("Slice", path, x, *bounds)


def gated_mlp(builder: GraphBuilder, path: str, prefix: str, x: ir.Value, *, bias: bool) -> ir.Value:
    """down(silu(gate(x)) * up(x)) of x `[rows, hidden]`; weights are named prefix + ".gate_proj.weight" and so on."""

    def project(name: str, value: ir.Value) -> ir.Value:
        offset = builder.weight(f"{prefix}.{name}.bias") if bias else None
        return linear(builder, f"{path}/{name}", value, builder.weight(f"{prefix}.{name}.weight"), offset)

    gate = project("gate_proj", x)
    activated = builder.op("Mul", f"{path}/act", gate, builder.op("Sigmoid", f"{path}/act", gate))
    return project("down_proj", builder.op("Mul", path, activated, project("up_proj", x)))


def rope_tables(
    builder: GraphBuilder, rope: RopeConfig, head_dim: int, positions: int, dtype: str
) -> tuple[ir.Value, ir.Value]:
    """cos and sin tables `[positions, head_dim / 2]` as constants of the graph."""
    cos, sin = rope.cos_sin(head_dim, positions)
    return (
        builder.constant("/rope/cos", cos.astype(NUMPY_DTYPES[dtype]), dtype),
        builder.constant("/rope/sin", sin.astype(NUMPY_DTYPES[dtype]), dtype),
    )
