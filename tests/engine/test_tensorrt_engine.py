import contextlib
import importlib.util

import fake_tensorrt
import pytest
import torch
from tiny_model import CACHE_ROWS, KV_HEADS, LAYERS, export

from trtspec.engine import tensorrt_engine, tensorrt_package
from trtspec.engine.base import CacheView
from trtspec.engine.kv_cache import KVCache
from trtspec.engine.onnxruntime_engine import OnnxRuntimeEngine
from trtspec.engine.tensorrt_binding import Bucket, GraphCache, check_inputs, select_profile
from trtspec.engine.tensorrt_build import BuildConfig, build_engine, target_profiles
from trtspec.engine.tensorrt_engine import TensorRTEngine, usable
from trtspec.engine.tensorrt_package import RUNTIMES, cuda_problem
from trtspec.errors import ConfigError, DependencyError, EngineError
from trtspec.tensors import TensorSpec, target_spec

CPU = torch.device("cpu")
HIDDEN, HEAD_DIM, ROWS = 4, 8, 16
SPEC = target_spec(
    hidden_size=HIDDEN, num_layers=1, num_kv_heads=1, head_dim=HEAD_DIM, cache_rows=ROWS, dtype="float32"
)
PROFILES = target_profiles(max_batch=2, max_width=4, prefill_chunk=8, cache_rows=ROWS)
RANGES = [{axis: (low, high) for axis, (low, _, high) in profile.sizes.items()} for profile in PROFILES]


def step_inputs(batch: int, width: int, live_len: int, hidden: int = HIDDEN, device=CPU) -> dict[str, torch.Tensor]:
    """A causal pass over the last `width` of `live_len` positions."""
    positions = torch.arange(live_len - width, live_len)
    mask = torch.arange(live_len)[None] <= positions[:, None]
    inputs = {
        "inputs_embeds": torch.randn(batch, width, hidden),
        "position_ids": positions.repeat(batch, 1),
        "cache_length": torch.full((batch,), live_len - width),
        "tree_mask": mask.expand(batch, 1, width, live_len).contiguous(),
    }
    return {name: value.to(device) for name, value in inputs.items()}


def new_cache(slots: int, **options) -> KVCache:
    sizes = {"num_layers": 1, "num_kv_heads": 1, "rows": ROWS, "head_dim": HEAD_DIM, "device": CPU}
    return KVCache(slots=slots, dtype=torch.float32, **{**sizes, **options})


@pytest.fixture
def fake():
    return fake_tensorrt.FakeEngine(SPEC, PROFILES)


@pytest.fixture
def graphs(monkeypatch, fake):
    return fake_tensorrt.install(monkeypatch, fake, tensorrt_engine.__name__)


@pytest.fixture
def load(tmp_path, graphs):
    (tmp_path / "target.engine").write_bytes(b"plan")

    def load(spec=SPEC, **options) -> TensorRTEngine:
        return TensorRTEngine("tensorrt", tmp_path / "target.engine", spec, device=CPU, **options)

    return load


def test_usable_names_a_missing_package(monkeypatch):
    monkeypatch.setitem(
        RUNTIMES, "tensorrt", tensorrt_package.RuntimePackage(("absent_module",), "tensorrt", "tensorrt")
    )
    assert "pip install 'trtspec[tensorrt]'" in str(usable("tensorrt"))


def test_usable_names_a_missing_driver(monkeypatch):
    def no_driver(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(tensorrt_engine, "load_tensorrt", lambda runtime: None)
    monkeypatch.setattr(tensorrt_package.ctypes, "CDLL", no_driver)
    assert str(usable("tensorrt-rtx")).startswith("no NVIDIA driver: ")


def test_usable_names_a_missing_device(monkeypatch):
    monkeypatch.setattr(tensorrt_engine, "load_tensorrt", lambda runtime: None)
    monkeypatch.setattr(tensorrt_package.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert usable("tensorrt-rtx") == f"torch {torch.__version__} finds no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert usable("tensorrt-rtx") is None


def test_missing_package_and_missing_gpu_are_user_errors(tmp_path, monkeypatch):
    monkeypatch.setitem(
        RUNTIMES, "tensorrt", tensorrt_package.RuntimePackage(("absent_module",), "tensorrt", "tensorrt")
    )
    with pytest.raises(DependencyError, match=r"needs the package tensorrt"):
        TensorRTEngine("tensorrt", tmp_path / "e", SPEC)
    monkeypatch.setattr(tensorrt_engine, "load_tensorrt", lambda runtime: None)
    monkeypatch.setattr(tensorrt_engine, "cuda_problem", lambda: "no NVIDIA driver")
    with pytest.raises(ConfigError, match=r"need a GPU \(no NVIDIA driver\); use the runtime onnxruntime"):
        TensorRTEngine("tensorrt", tmp_path / "e", SPEC)


def test_decode_profile_is_preferred_and_prefill_takes_what_is_wider():
    assert select_profile("target", RANGES, {"batch": 2, "width": 4, "live_len": 16}) == 0
    assert select_profile("target", RANGES, {"batch": 1, "width": 4, "live_len": 1}) == 0
    assert select_profile("target", RANGES, {"batch": 1, "width": 5, "live_len": 16}) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 2, "width": 5, "live_len": 16},
        {"batch": 3, "width": 1, "live_len": 16},
        {"batch": 1, "width": 9, "live_len": 16},
        {"batch": 1, "width": 1, "live_len": 17},
    ],
)
def test_sizes_beyond_every_profile_name_the_limits(sizes):
    with pytest.raises(EngineError, match=r"built for batch 1\.\.2, width 1\.\.4.* or .*width 1\.\.8.*rebuild"):
        select_profile("target", RANGES, sizes)


def test_inputs_give_the_sizes():
    assert check_inputs("target", SPEC.inputs[:4], step_inputs(2, 3, 9), CPU) == {
        "batch": 2,
        "width": 3,
        "live_len": 9,
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tree_mask", None, "input tree_mask is missing"),
        (
            "position_ids",
            torch.zeros(2, 3, dtype=torch.int32),
            "torch.int32 on cpu, contiguous; expected contiguous int64",
        ),
        ("inputs_embeds", torch.zeros(2, 3, HIDDEN, device="meta"), "on meta"),
        ("inputs_embeds", torch.zeros(HIDDEN, 3, 2).permute(2, 1, 0), "not contiguous"),
        ("inputs_embeds", torch.zeros(2, 3, HIDDEN + 1), r"has shape \(2, 3, 5\)"),
        ("inputs_embeds", torch.zeros(2, 3), r"has shape \(2, 3\), expected"),
        (
            "cache_length",
            torch.zeros(3, dtype=torch.int64),
            r"has shape \(3,\), expected \('batch',\) with .*'batch': 2",
        ),
    ],
)
def test_unfit_inputs_are_rejected(name, value, message):
    inputs = {**step_inputs(2, 3, 9), name: value}
    with pytest.raises(EngineError, match=message):
        check_inputs("target", SPEC.inputs[:4], inputs, CPU)


def bucket(number: int) -> Bucket:
    return Bucket(0, (("width", number),), ())


def test_graph_cache_captures_on_the_second_use_and_evicts_the_least_recently_used():
    cache: GraphCache[str] = GraphCache(2)
    assert [cache.comes_back(bucket(1)) for _ in range(2)] == [False, True]
    assert cache.put(bucket(1), "one") is None
    assert cache.put(bucket(2), "two") is None
    assert cache.get(bucket(1)) == "one"
    assert cache.put(bucket(3), "three") == "two"
    assert cache.get(bucket(2)) is None
    assert sorted(cache.clear()) == ["one", "three"]
    assert cache.get(bucket(1)) is None


def test_graph_cache_forgets_what_was_seen_long_ago():
    cache: GraphCache[str] = GraphCache(1)
    for number in range(5):
        assert not cache.comes_back(bucket(number))
    assert not cache.comes_back(bucket(0))
    assert cache.comes_back(bucket(4))


def test_graph_cache_of_no_capacity_never_captures():
    cache: GraphCache[str] = GraphCache(0)
    assert not any(cache.comes_back(bucket(1)) for _ in range(3))


def test_run_fills_outputs_and_updates_the_cache_in_place(load, fake):
    engine, cache = load(), new_cache(2)
    inputs = step_inputs(2, 3, 9)
    outputs = engine.run(inputs, cache.view(0, 2))
    assert outputs.keys() == {"hidden_states"}
    assert torch.equal(outputs["hidden_states"], 2 * inputs["inputs_embeds"])
    assert cache.block[:, 0, 0, 0, 0].tolist() == [1.0, 1.0]
    context = fake.contexts[0]
    assert context.shapes["past_key_values.0.key"] == (2, 1, ROWS, HEAD_DIM)
    assert context.memory is not None and context.memory[1] == fake.device_memory_size_v2


def test_outputs_are_valid_until_the_next_run(load):
    engine, cache = load(), new_cache(2)
    first = engine.run(step_inputs(1, 2, 9), cache.view(0, 1))["hidden_states"]
    second = engine.run(step_inputs(1, 2, 9), cache.view(0, 1))["hidden_states"]
    assert first.data_ptr() == second.data_ptr()


def test_second_use_of_a_bucket_is_captured_and_later_ones_replayed(load, fake, graphs):
    engine, cache = load(), new_cache(2)
    for expected_calls in (1, 3, 3, 3):
        inputs = step_inputs(1, 3, 9)
        hidden = engine.run(inputs, cache.view(0, 1))["hidden_states"]
        assert torch.equal(hidden, 2 * inputs["inputs_embeds"])
        assert len(fake.calls) == expected_calls
    assert fake.executions == 4
    assert len(graphs) == 1
    assert graphs[0].context is fake.contexts[1], "a graph needs a context that nothing rebinds"


def test_interleaved_buckets_keep_apart(load, fake, graphs):
    engine, cache = load(), new_cache(2)
    shapes = [(1, 3, 9), (2, 1, 9), (1, 8, 16), (1, 3, 10)]
    for _ in range(4):
        for batch, width, live_len in shapes:
            inputs = step_inputs(batch, width, live_len)
            hidden = engine.run(inputs, cache.view(0, batch))["hidden_states"]
            assert torch.equal(hidden, 2 * inputs["inputs_embeds"])
    assert fake.executions == 16
    assert len(graphs) == len(shapes)
    assert sorted(context.profile for context in fake.contexts) == [0, 0, 0, 0, 1, 1]


def test_cache_views_and_new_caches_get_graphs_of_their_own(load, graphs):
    engine, cache = load(), new_cache(2)
    other = new_cache(2)
    for view in (cache.view(0, 1), cache.view(1, 1), other.view(0, 1)):
        for _ in range(3):
            before = view.tensors["past_key_values.0.key"].clone()
            engine.run(step_inputs(1, 1, 3), view)
            assert not torch.equal(before, view.tensors["past_key_values.0.key"])
    assert len(graphs) == 3


def test_evicted_graph_is_reset(load, graphs):
    engine, cache = load(max_graphs=1), new_cache(2)
    for live_len in (3, 3, 4, 4):
        engine.run(step_inputs(1, 1, live_len), cache.view(0, 1))
    assert [graph.was_reset for graph in graphs] == [True, False]
    engine.close()
    assert [graph.was_reset for graph in graphs] == [True, True]


def test_no_graphs_without_capacity(load, fake, graphs):
    engine, cache = load(max_graphs=0), new_cache(1)
    for _ in range(3):
        engine.run(step_inputs(1, 1, 3), cache.view(0, 1))
    assert not graphs and len(fake.contexts) == 1


def test_failed_execution_is_an_engine_error(load, fake):
    engine, cache = load(), new_cache(1)
    fake.succeeds = False
    with pytest.raises(EngineError, match=r"target could not run: the reason"):
        engine.run(step_inputs(1, 1, 3), cache.view(0, 1))


def test_cache_must_fit_the_batch(load):
    engine, cache = load(), new_cache(2)
    with pytest.raises(EngineError, match=r"target needs a KV cache"):
        engine.run(step_inputs(1, 1, 3))
    with pytest.raises(EngineError, match=r"view has 2 slots, batch 1"):
        engine.run(step_inputs(1, 1, 3), cache.view(0, 2))
    lying = CacheView((0, 1), cache.view(0, 2).tensors)
    with pytest.raises(EngineError, match=r"the KV cache has batch 2, not 1"):
        engine.run(step_inputs(1, 1, 3), lying)


def test_weight_input_is_bound_where_it_lies(tmp_path, monkeypatch):
    weight = TensorSpec("w", "float32", (2, 2))
    spec = fake_tensorrt.GraphSpec("g", (*SPEC.inputs[:1], weight), SPEC.outputs[:1])
    fake = fake_tensorrt.FakeEngine(spec, PROFILES)
    fake_tensorrt.install(monkeypatch, fake, tensorrt_engine.__name__)
    (tmp_path / "e").write_bytes(b"plan")
    engine = TensorRTEngine("tensorrt", tmp_path / "e", spec, device=CPU)
    weights = [torch.zeros(2, 2), torch.zeros(2, 2)]
    for value in weights:
        engine.run({"inputs_embeds": torch.randn(1, 1, HIDDEN), "w": value})
        assert fake.calls[-1].addresses["w"] == value.data_ptr()
    with pytest.raises(EngineError, match=r"g has no KV cache"):
        engine.run({"inputs_embeds": torch.randn(1, 1, HIDDEN), "w": weights[0]}, new_cache(1).view(0, 1))


def test_plan_that_differs_from_the_declaration_is_rejected(load):
    other = target_spec(hidden_size=8, num_layers=1, num_kv_heads=1, head_dim=8, cache_rows=ROWS, dtype="float32")
    with pytest.raises(EngineError, match=r"target.engine: input inputs_embeds has shape"):
        load(other)


def test_unloadable_plan_names_the_version(tmp_path, monkeypatch):
    fake_tensorrt.install(monkeypatch, None, tensorrt_engine.__name__)
    (tmp_path / "e").write_bytes(b"not a plan")
    with pytest.raises(EngineError, match=r"rebuild it with the version installed here \(0.0\): the reason"):
        TensorRTEngine("tensorrt", tmp_path / "e", SPEC, device=CPU)
    with pytest.raises(EngineError, match=r"could not read the engine .*absent"):
        TensorRTEngine("tensorrt", tmp_path / "absent", SPEC, device=CPU)


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed")
@pytest.mark.skipif(cuda_problem() is None, reason="there is a GPU here")
def test_real_runtime_without_a_gpu_reports_why_the_plan_cannot_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorrt_engine, "cuda_problem", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: fake_tensorrt.FakeStream())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    model = export(tmp_path, "float16")
    profiles = target_profiles(max_batch=1, max_width=4, prefill_chunk=8, cache_rows=CACHE_ROWS)
    plan = build_engine(
        "tensorrt-rtx", model.target, model.target_spec, BuildConfig("float16", (), profiles), tmp_path / "e"
    ).path
    with pytest.raises(EngineError, match=r"could not load .*CUDA"):
        TensorRTEngine("tensorrt-rtx", plan, model.target_spec, device=CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_engine_agrees_with_onnxruntime(tmp_path, runtime):
    reason = usable(runtime)
    if reason:
        pytest.skip(reason)
    device = torch.device("cuda", torch.cuda.current_device())
    model = export(tmp_path, "float32")
    profiles = target_profiles(max_batch=2, max_width=4, prefill_chunk=16, cache_rows=CACHE_ROWS)
    request = BuildConfig("float32", (), profiles)
    plan = build_engine(runtime, model.target, model.target_spec, request, tmp_path / "target.engine").path
    engine = TensorRTEngine(runtime, plan, model.target_spec, device=device, max_graphs=2)
    reference = OnnxRuntimeEngine(model.target, model.target_spec)
    sizes = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "rows": CACHE_ROWS, "head_dim": 16}
    cache, expected_cache = new_cache(2, **{**sizes, "device": device}), new_cache(2, **sizes)
    # Prefill, then decode steps; repeated shapes go through capture, replay and eviction.
    steps = [
        (1, 16, 16),
        (1, 1, 17),
        (1, 1, 17),
        (1, 1, 17),
        (2, 4, 20),
        (2, 4, 20),
        (2, 4, 20),
        (1, 1, 21),
        (1, 1, 21),
    ]
    for batch, width, live_len in steps:
        inputs = step_inputs(batch, width, live_len, hidden=64)
        expected = reference.run(inputs, expected_cache.view(0, batch))["hidden_states"]
        on_device = {name: value.to(device) for name, value in inputs.items()}
        actual = engine.run(on_device, cache.view(0, batch))["hidden_states"]
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(cache.block.cpu(), expected_cache.block, rtol=1e-3, atol=1e-3)
    engine.close()
