"""The residual streams that a target's graph gives to EAGLE-3 heads, against transformers' hidden states."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from tiny_targets import CACHE_ROWS, Case, TinyTarget, save_case

from trtspec import tensors
from trtspec.checkpoint.convert import place_weights
from trtspec.engine.base import TORCH_DTYPES
from trtspec.engine.onnxruntime_engine import OnnxRuntimeEngine
from trtspec.engine.tensorrt_build import RUNTIMES, BuildConfig, build_engine, target_profiles
from trtspec.graph.target import target_graph, target_spec

RTX = "tensorrt-rtx"
LAYERS = 3
PROMPT = [17, 3, 200, 44, 9, 9, 120, 61, 7, 33, 150, 2, 88]
CHOICES = [(0,), (3,), (1, 2), (2, 1), (0, 1, 2, 3)]
Export = Callable[[tuple[int, ...], str], Path]

needs_rtx = pytest.mark.skipif(
    not any(importlib.util.find_spec(module) for module in RUNTIMES[RTX].modules),
    reason="TensorRT-RTX is not installed",
)


@pytest.fixture(scope="module", params=["llama_untied", "mistral", "qwen2", "qwen3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    directory = tmp_path_factory.mktemp(request.param)
    save_case(Case(request.param, "default"), directory / "hf")
    return TinyTarget(directory / "hf", directory / "graphs")


@pytest.fixture
def export(tiny: TinyTarget, tmp_path: Path) -> Export:
    """Writes target.onnx for some boundaries."""

    def write(boundaries: tuple[int, ...], dtype: str) -> Path:
        weights = place_weights(tiny.tensors, tiny.config.weight_shapes(), tmp_path, "weights", "w.safetensors", dtype)
        graph = target_graph(tiny.config, weights, tmp_path, cache_rows=CACHE_ROWS, dtype=dtype, boundaries=boundaries)
        ir.save(graph, tmp_path / "target.onnx")
        return tmp_path / "target.onnx"

    return write


def residual_streams(tiny: TinyTarget) -> list[torch.Tensor]:
    """The residual stream before each of transformers' layers and after the last one, `[prompt length, hidden]`."""
    last: list[torch.Tensor] = []
    hook = tiny.hf.model.layers[-1].register_forward_hook(
        lambda module, inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        states = tiny.hf(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    hook.remove()
    # transformers' last state is behind the final norm.
    assert (states[-1] - last[0]).abs().max() > 0.1
    return [state[0] for state in (*states[:-1], last[0])]


def run(tiny: TinyTarget, engine: OnnxRuntimeEngine, dtype: str, chunk: int) -> dict[str, torch.Tensor]:
    """Outputs behind the prompt's tokens, run in chunks of one sequence."""
    cache, table = tiny.new_cache(slots=1, dtype=dtype), tiny.tensors.load("model.embed_tokens.weight")
    pieces: list[dict[str, torch.Tensor]] = []
    for start in range(0, len(PROMPT), chunk):
        tokens = PROMPT[start : start + chunk]
        length = start + len(tokens)
        inputs = {
            tensors.INPUTS_EMBEDS: table[tokens][None].to(TORCH_DTYPES[dtype]),
            tensors.POSITION_IDS: torch.arange(start, length)[None],
            tensors.CACHE_LENGTH: torch.tensor([start]),
            tensors.TREE_MASK: torch.ones(1, 1, len(tokens), length, dtype=torch.bool).tril(start),
        }
        outputs = engine.run(inputs, cache.view(0, 1))
        pieces.append({name: value[0].clone() for name, value in outputs.items()})
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-2)])
@pytest.mark.parametrize("boundaries", CHOICES, ids=str)
def test_residual_streams(
    tiny: TinyTarget, export: Export, boundaries: tuple[int, ...], dtype: str, tolerance: float
) -> None:
    engine = OnnxRuntimeEngine(export(boundaries, dtype), target_spec(tiny.config, CACHE_ROWS, dtype, boundaries))
    outputs = run(tiny, engine, dtype, chunk=8)
    found = outputs[tensors.AUX_HIDDEN_STATES].float()
    assert found.shape == (len(PROMPT), len(boundaries) * tiny.config.hidden_size)
    streams = residual_streams(tiny)
    for part, boundary in zip(found.chunk(len(boundaries), dim=-1), boundaries, strict=True):
        assert (part - streams[boundary]).abs().max() <= tolerance * streams[boundary].std()
    with torch.no_grad():
        normed = tiny.hf.model(torch.tensor([PROMPT])).last_hidden_state[0]
    assert (outputs[tensors.HIDDEN_STATES].float() - normed).abs().max() <= tolerance * normed.std()


def test_hidden_states_are_the_same_without_boundaries(tiny: TinyTarget, export: Export) -> None:
    found = []
    for boundaries in ((), (1, 3)):
        spec = target_spec(tiny.config, CACHE_ROWS, "float32", boundaries)
        found.append(run(tiny, OnnxRuntimeEngine(export(boundaries, "float32"), spec), "float32", chunk=8))
    assert tensors.AUX_HIDDEN_STATES not in found[0]
    assert torch.equal(found[0][tensors.HIDDEN_STATES], found[1][tensors.HIDDEN_STATES])


def test_spec_and_checker(tiny: TinyTarget, export: Export) -> None:
    path = export((0, 3), "bfloat16")
    spec = target_spec(tiny.config, CACHE_ROWS, "bfloat16", (0, 3))
    model = onnx.load(path, load_external_data=False)
    assert [value.name for value in model.graph.output] == [tensor.name for tensor in spec.outputs]
    assert spec.outputs[1].axes == ("batch", "width", 2 * tiny.config.hidden_size)
    assert spec.outputs[1].name == tensors.AUX_HIDDEN_STATES
    onnx.checker.check_model(path, full_check=True)


@needs_rtx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("boundaries", [(2,), (0, 1, 3)], ids=str)
def test_compiles_for_tensorrt_rtx(
    tiny: TinyTarget, export: Export, boundaries: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    profiles = target_profiles(max_batch=2, max_width=8, prefill_chunk=16, cache_rows=CACHE_ROWS)
    spec = target_spec(tiny.config, CACHE_ROWS, dtype, boundaries)
    info = build_engine(RTX, export(boundaries, dtype), spec, BuildConfig(dtype, (), profiles), tmp_path / "engine")
    assert info.size_bytes > 0
