"""Draft LM heads: full-precision rows are the LM head's own; 4-bit rows differ by their rounding and are fast."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from checkpoint import heads
from safetensors.torch import save_file

from trtspec import tensors
from trtspec.checkpoint.draft_head import DraftHeadConfig, open_draft_head
from trtspec.engine.base import TORCH_DTYPES
from trtspec.engine.onnxruntime_engine import OnnxRuntimeEngine, set_threads
from trtspec.engine.tensorrt_build import RUNTIMES, BuildConfig, build_engine, lm_head_profiles
from trtspec.errors import ConfigError
from trtspec.graph import draft_lm_head
from trtspec.graph.draft_lm_head import (
    INT4_BLOCK,
    check_int4,
    draft_lm_head_graph,
    draft_lm_head_spec,
    int4_draft_lm_head_graph,
    quantise_int4,
)
from trtspec.tensors import WeightRef

RTX = "tensorrt-rtx"
DTYPES = ["float32", "float16", "bfloat16"]
VOCAB = 77

needs_rtx = pytest.mark.skipif(
    not any(importlib.util.find_spec(module) for module in RUNTIMES[RTX].modules),
    reason="TensorRT-RTX is not installed",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DraftHeadConfig:
    """Of a head with an odd number of draft tokens and three blocks per row."""
    directory = tmp_path_factory.mktemp("head")
    heads.make_e1(directory)
    config = open_draft_head(directory, heads.target_config()).config
    return dataclasses.replace(config, hidden_size=3 * INT4_BLOCK, draft_vocab_size=VOCAB)


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return heads.weight("draft lm head", VOCAB, 3 * INT4_BLOCK)


def write_full(config: DraftHeadConfig, rows: torch.Tensor, directory: Path, dtype: str, **options: Any) -> Path:
    """Write a full-precision graph and its weight."""
    stored = rows.to(TORCH_DTYPES[dtype])
    save_file({"rows": stored}, directory / "w.safetensors")
    size = (directory / "w.safetensors").stat().st_size
    ref = WeightRef("w.safetensors", size - stored.nbytes, stored.nbytes, dtype, tuple(rows.shape))
    ir.save(draft_lm_head_graph(config, ref, directory, dtype=dtype, **options), directory / "draft_lm_head.onnx")
    return directory / "draft_lm_head.onnx"


def write_int4(config: DraftHeadConfig, rows: torch.Tensor, directory: Path, dtype: str) -> Path:
    ir.save(int4_draft_lm_head_graph(config, rows, dtype=dtype), directory / "draft_lm_head.onnx")
    return directory / "draft_lm_head.onnx"


def logits(path: Path, config: DraftHeadConfig, hidden: torch.Tensor, dtype: str) -> torch.Tensor:
    engine = OnnxRuntimeEngine(path, draft_lm_head_spec(config, dtype, weight_as_input=False))
    found = engine.run({tensors.HIDDEN_ROWS: hidden.to(TORCH_DTYPES[dtype])})[tensors.LOGITS]
    assert found.dtype == TORCH_DTYPES[dtype]
    return found.float()


def hidden_rows(config: DraftHeadConfig, count: int = 5) -> torch.Tensor:
    return torch.randn((count, config.hidden_size), generator=torch.Generator().manual_seed(4))


def dequantised(values: np.ndarray, scales: np.ndarray) -> torch.Tensor:
    blocks = torch.from_numpy(values).float().reshape(values.shape[0], -1, INT4_BLOCK)
    return (blocks * torch.from_numpy(scales)[..., None]).reshape(values.shape)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2e-3)])
def test_full_precision(
    config: DraftHeadConfig, rows: torch.Tensor, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    hidden = hidden_rows(config)
    found = logits(write_full(config, rows, tmp_path, dtype), config, hidden, dtype)
    expected = hidden @ rows.T
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_int4_is_the_product_with_the_rounded_rows(
    config: DraftHeadConfig, rows: torch.Tensor, tmp_path: Path, dtype: str
) -> None:
    hidden = hidden_rows(config)
    found = logits(write_int4(config, rows, tmp_path, dtype), config, hidden, dtype)
    exact = hidden @ rows.T
    rounded = hidden @ dequantised(*quantise_int4(rows)).T
    # ONNX Runtime rounds the hidden rows to 8 bits, in blocks, too.
    assert (found - rounded).abs().max() <= 0.05 * exact.std()
    assert 0.02 * exact.std() < (found - exact).std() < 0.12 * exact.std()


def test_onnxruntime_joins_the_two_operators(config: DraftHeadConfig, rows: torch.Tensor, tmp_path: Path) -> None:
    set_threads(None)
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(
        str(write_int4(config, rows, tmp_path, "float32")), options, providers=["CPUExecutionProvider"]
    )
    (node,) = onnx.load(tmp_path / "optimised.onnx").graph.node
    assert node.op_type == "MatMulNBits"


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_takes_four_bits_and_a_scale_per_block(config: DraftHeadConfig, tmp_path: Path, dtype: str) -> None:
    large = dataclasses.replace(config, draft_vocab_size=4000)
    path = write_int4(large, torch.randn(4000, config.hidden_size), tmp_path, dtype)
    weights = 4000 * config.hidden_size
    expected = weights // 2 + weights // INT4_BLOCK * TORCH_DTYPES[dtype].itemsize
    assert expected <= path.stat().st_size <= expected + 2000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["full", "input", "int4"])
def test_graphs_pass_the_onnx_checker(
    config: DraftHeadConfig, rows: torch.Tensor, tmp_path: Path, kind: str, dtype: str
) -> None:
    if kind == "int4":
        path = write_int4(config, rows, tmp_path, dtype)
    else:
        path = write_full(config, rows, tmp_path, dtype, weight_as_input=kind == "input")
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path, load_external_data=False)
    spec = draft_lm_head_spec(config, dtype, weight_as_input=kind == "input")
    assert (model.graph.name, spec.name) == ("draft_lm_head", "draft_lm_head")
    for declared, values in ((spec.inputs, model.graph.input), (spec.outputs, model.graph.output)):
        found = {
            value.name: tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim)
            for value in values
        }
        assert found == {tensor.name: tensor.axes for tensor in declared}


def test_rounding_error_of_every_weight(rows: torch.Tensor) -> None:
    values, scales = quantise_int4(rows)
    assert values.dtype == np.int8
    assert scales.dtype == np.float32
    assert values.min() >= -8
    assert values.max() <= 7
    assert (scales > 0).all()
    largest = rows.reshape(VOCAB, -1, INT4_BLOCK).abs().amax(-1)
    error = (dequantised(values, scales) - rows).reshape(VOCAB, -1, INT4_BLOCK).abs().amax(-1)
    # Half a step of the coarsest scale, or what the finest one cuts off.
    assert (error <= 0.25 * largest).all()
    assert (dequantised(values, scales) - rows).norm() <= 0.1 * rows.norm()


def test_rows_of_zeros_tiny_and_huge_weights() -> None:
    rows = torch.zeros(4, 2 * INT4_BLOCK)
    rows[1] = 1e-7
    rows[2, 5] = 1e4
    rows[3] = -torch.arange(2.0 * INT4_BLOCK)
    values, scales = quantise_int4(rows)
    assert np.isfinite(scales).all()
    assert (scales >= np.finfo(np.float16).tiny).all()
    back = dequantised(values, scales)
    assert torch.equal(back[0], rows[0])
    assert back[1].abs().max() <= 1e-4
    assert abs(float(back[2, 5]) - 1e4) <= 2e3
    assert (back[3] - rows[3]).abs().max() <= 63 / 7


def test_result_does_not_depend_on_how_many_rows_are_quantised_at_once(
    rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = quantise_int4(rows)
    monkeypatch.setattr(draft_lm_head, "_CHUNK", 10 * rows.shape[1] + 1)
    in_pieces = quantise_int4(rows)
    assert all(np.array_equal(found, expected) for found, expected in zip(in_pieces, at_once, strict=True))


def test_hidden_size_that_is_no_multiple_of_the_block(config: DraftHeadConfig) -> None:
    check_int4(2 * INT4_BLOCK)
    narrow = dataclasses.replace(config, hidden_size=48)
    with pytest.raises(ConfigError, match="multiple of 32, the draft head's is 48; leave the option out"):
        int4_draft_lm_head_graph(narrow, torch.zeros(VOCAB, 48), dtype="float32")


@needs_rtx
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["input", "int4"])
def test_compiles_for_tensorrt_rtx(config: DraftHeadConfig, tmp_path: Path, kind: str, dtype: str) -> None:
    large = dataclasses.replace(config, draft_vocab_size=4001)
    rows = torch.randn(4001, config.hidden_size)
    if kind == "int4":
        path = write_int4(large, rows, tmp_path, dtype)
    else:
        path = write_full(large, rows, tmp_path, dtype, weight_as_input=True)
    spec = draft_lm_head_spec(large, dtype, weight_as_input=kind == "input")
    info = build_engine(RTX, path, spec, BuildConfig(dtype, (), lm_head_profiles(64)), tmp_path / "engine")
    full = rows.numel() * TORCH_DTYPES[dtype].itemsize
    # Weights of 4 bits stay so in the engine; as an input they aren't in it.
    assert info.size_bytes < (rows.numel() * 0.7 + 400_000 if kind == "int4" else full // 2)
