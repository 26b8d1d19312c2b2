import _thread
import dataclasses
import importlib.util
import logging
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny_model import CACHE_ROWS, KV_HEADS, LAYERS, TinyModel, export

from trtspec.engine import tensorrt_build, tensorrt_package
from trtspec.engine.tensorrt_build import (
    RUNTIMES,
    BuildConfig,
    BuildState,
    Profile,
    build_engine,
    check_network,
    check_request,
    layer_counts,
    lm_head_profiles,
    load_tensorrt,
    parse_network,
    target_profiles,
)
from trtspec.engine.tensorrt_package import tensorrt_logger
from trtspec.errors import ConfigError, DependencyError, EngineError
from trtspec.tensors import TensorSpec

RTX = "tensorrt-rtx"
PROFILES = target_profiles(max_batch=4, max_width=8, prefill_chunk=32, cache_rows=CACHE_ROWS)

needs_rtx = pytest.mark.skipif(
    not any(importlib.util.find_spec(module) for module in RUNTIMES[RTX].modules),
    reason="TensorRT-RTX is not installed",
)


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> TinyModel:
    return export(tmp_path_factory.mktemp("half"), "float16")


def config(dtype="float16", capabilities=(), profiles=PROFILES, **options) -> BuildConfig:
    return BuildConfig(dtype, tuple(capabilities), profiles, **options)


def files(directory) -> set[str]:
    return {path.name for path in directory.iterdir()}


@needs_rtx
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 16), ("float16", 64), ("bfloat16", 32), ("float16", 8), ("float16", 264)]
)
def test_target_compiles_with_native_layers(tmp_path, dtype, head_dim):
    model = export(tmp_path, dtype, head_dim)
    network = parse_network(RTX, model.target, model.target_spec)
    check_network(network, model.target_spec)
    counts = layer_counts(network)
    assert counts["KV_CACHE_UPDATE"] == 2 * LAYERS
    assert counts["ATTENTION_INPUT"] == counts["ATTENTION_OUTPUT"] == LAYERS
    assert counts["ROTARY_EMBEDDING"] == 2 * LAYERS
    info = build_engine(RTX, model.target, model.target_spec, config(dtype), tmp_path / "target.engine")
    assert info.path.stat().st_size == info.size_bytes > 0
    assert info.seconds > 0
    assert info.peak_rss_bytes is None or info.peak_rss_bytes > info.size_bytes
    assert info.runtime_version == load_tensorrt(RTX).__version__
    assert files(tmp_path) == {"weights.bin", "target.onnx", "lm_head.onnx", "target.engine"}


@needs_rtx
def test_engine_for_two_compute_capabilities(tmp_path, half):
    info = build_engine(RTX, half.target, half.target_spec, config(capabilities=(86, 120)), tmp_path / "e")
    assert info.size_bytes > 0


@needs_rtx
def test_workspace_limit_is_accepted(tmp_path, half):
    request = config(workspace_bytes=1 << 30)
    assert build_engine(RTX, half.target, half.target_spec, request, tmp_path / "e").size_bytes > 0


@needs_rtx
def test_lm_head_without_its_weight_is_tiny(tmp_path):
    sizes = {}
    for weight_as_input in (True, False):
        directory = tmp_path / str(weight_as_input)
        directory.mkdir()
        model = export(directory, "float16", lm_head_weight_as_input=weight_as_input)
        spec = model.lm_head_spec(weight_as_input)
        request = config(profiles=lm_head_profiles(max_rows=16))
        sizes[weight_as_input] = build_engine(RTX, model.lm_head, spec, request, directory / "e").size_bytes
    weight_bytes = 2 * 256 * 64
    assert sizes[False] - sizes[True] > weight_bytes // 2
    assert sizes[True] < 100_000


@needs_rtx
def test_progress_is_reported_in_the_calling_thread_and_never_falls(tmp_path, half):
    seen = []
    build_engine(
        RTX,
        half.target,
        half.target_spec,
        config(),
        tmp_path / "e",
        progress=lambda phase, fraction: seen.append((threading.get_ident(), phase, fraction)),
    )
    assert {thread for thread, _, _ in seen} == {threading.get_ident()}
    fractions = [fraction for _, _, fraction in seen]
    assert fractions == sorted(fractions)
    assert fractions[0] >= 0
    assert fractions[-1] == 1.0


@needs_rtx
def test_cancelled_build_leaves_nothing(tmp_path, half, caplog):
    with pytest.raises(EngineError, match=r"cancelled"):
        build_engine(RTX, half.target, half.target_spec, config(), tmp_path / "e", cancelled=lambda: True)
    assert files(tmp_path) == set()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@needs_rtx
def test_cancelled_build_keeps_the_previous_engine(tmp_path, half):
    (tmp_path / "e").write_bytes(b"old")
    with pytest.raises(EngineError, match=r"cancelled"):
        build_engine(RTX, half.target, half.target_spec, config(), tmp_path / "e", cancelled=lambda: True)
    assert (tmp_path / "e").read_bytes() == b"old"


@needs_rtx
def test_keyboard_interrupt_stops_the_compiler(tmp_path, half):
    def interrupt(phase: str, fraction: float) -> None:
        _thread.interrupt_main()

    # A shell's background job is started with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engine(RTX, half.target, half.target_spec, config(), tmp_path / "e", progress=interrupt)
            time.sleep(1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert files(tmp_path) == set()


@needs_rtx
def test_error_in_the_progress_callback_reaches_the_caller(tmp_path, half):
    def fail(phase: str, fraction: float) -> None:
        raise ValueError("the bar broke")

    with pytest.raises(ValueError, match=r"the bar broke"):
        build_engine(RTX, half.target, half.target_spec, config(), tmp_path / "e", progress=fail)
    assert files(tmp_path) == set()


@needs_rtx
def test_unwritable_output_is_an_engine_error(tmp_path, half):
    with pytest.raises(EngineError, match=r"could not write the engine"):
        build_engine(RTX, half.target, half.target_spec, config(), tmp_path / "absent" / "e")


@needs_rtx
def test_full_disk_is_an_engine_error(half):
    class FullDisk(type(Path())):
        def open(self, *arguments, **options):
            return Path("/dev/full").open("wb", buffering=0)

    network = parse_network(RTX, half.target, half.target_spec)
    builder_config = tensorrt_build._builder_config(network, half.target_spec, config())
    with pytest.raises(EngineError, match=r"No space left"):
        tensorrt_build._write_engine(network, builder_config, FullDisk("target.engine"))


@needs_rtx
def test_missing_graph_and_missing_weights_are_named(tmp_path):
    model = export(tmp_path, "float16")
    with pytest.raises(EngineError, match=r"absent.onnx"):
        parse_network(RTX, tmp_path / "absent.onnx", model.target_spec)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(EngineError, match=r"target.onnx: .*weights.bin"):
        parse_network(RTX, model.target, model.target_spec)


@needs_rtx
def test_compiler_errors_reach_the_message_and_the_log(tmp_path, half, caplog, monkeypatch):
    monkeypatch.setattr(tensorrt_build, "check_network", lambda parsed, spec: None)
    # Declared without a cache, float32 attention isn't allowed to decompose, and has no kernel.
    model = export(tmp_path, "float32")
    parse = tensorrt_build.parse_network
    undeclared = dataclasses.replace(model.target_spec, aliases={})
    monkeypatch.setattr(tensorrt_build, "parse_network", lambda runtime, path, spec: parse(runtime, path, undeclared))
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(EngineError, match=r"could not build target: .*dedicated kernel"),
    ):
        build_engine(RTX, model.target, model.target_spec, config("float32"), tmp_path / "e")
    assert any(record.name == tensorrt_package.__name__ for record in caplog.records)
    assert "e" not in files(tmp_path)


@needs_rtx
def test_there_is_one_logger():
    assert tensorrt_logger(RTX) is tensorrt_logger(RTX)


def change(spec, name, **fields):
    inputs = tuple(dataclasses.replace(t, **fields) if t.name == name else t for t in spec.inputs)
    return dataclasses.replace(spec, inputs=inputs)


@needs_rtx
def test_network_that_differs_from_its_declaration_is_rejected(half):
    spec = half.target_spec
    network = parse_network(RTX, half.target, spec)
    extra = TensorSpec("extra", "int64", ("batch",))
    swapped = {**spec.aliases, "present.0.key": "past_key_values.1.key"}
    wrong = {
        "input extra is missing": dataclasses.replace(spec, inputs=(*spec.inputs, extra)),
        "input tree_mask is unexpected": dataclasses.replace(
            spec, inputs=tuple(t for t in spec.inputs if t.name != "tree_mask")
        ),
        "output hidden_states is unexpected": dataclasses.replace(spec, outputs=spec.outputs[1:]),
        "input cache_length has dtype INT64, expected int32": change(spec, "cache_length", dtype="int32"),
        r"input inputs_embeds has shape \(-1, -1, 64\), expected \('batch', 'width', 32\)": change(
            spec, "inputs_embeds", axes=("batch", "width", 32)
        ),
        r"past_key_values.0.key has shape \(-1, 2, 64, 16\)": change(
            spec, "past_key_values.0.key", axes=("batch", KV_HEADS, "rows", 16)
        ),
        "present.0.key is not a KV cache update of input past_key_values.1.key": dataclasses.replace(
            spec, aliases=swapped
        ),
        "updates input past_key_values.0.key in place, which is not declared": dataclasses.replace(spec, aliases={}),
    }
    for message, declared in wrong.items():
        with pytest.raises(EngineError, match=message):
            check_network(network, declared)


@needs_rtx
@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (config("bfloat16", (75,)), "bfloat16 needs compute capability 80 or newer, found 75; use float16"),
        (config("float32", (75, 89)), "no float32 matrices at compute capability 75; use --dtype float16"),
        (config(capabilities=(77,)), "builds for the compute capabilities .*80.*, not for 77"),
        (config("float32"), "exported in float16 and the engine is asked for in float32"),
        (config(profiles=lm_head_profiles(4)), "profile rows says nothing about axis batch"),
    ],
)
def test_requests_that_cannot_be_compiled(tmp_path, half, request_, message):
    with pytest.raises(ConfigError, match=message):
        build_engine(RTX, half.target, half.target_spec, request_, tmp_path / "e")


@needs_rtx
def test_head_dim_must_be_a_multiple_of_eight(tmp_path):
    model = export(tmp_path, "float16", head_dim=20)
    with pytest.raises(ConfigError, match=r"head_dim 20 is no multiple of 8.*onnxruntime"):
        check_request(RTX, model.target_spec, config())


@pytest.fixture
def fake_tensorrt(monkeypatch):
    monkeypatch.setattr(tensorrt_build, "load_tensorrt", lambda runtime: None)


def test_tensorrt_builds_only_on_its_gpu(half, fake_tensorrt, monkeypatch):
    with pytest.raises(ConfigError, match=r"compiles for the GPU it runs on"):
        check_request("tensorrt", half.target_spec, config(capabilities=(89,)))
    monkeypatch.setattr(tensorrt_build, "cuda_problem", lambda: "no NVIDIA driver")
    with pytest.raises(ConfigError, match=r"builds only on the GPU .*no NVIDIA driver.*tensorrt-rtx"):
        check_request("tensorrt", half.target_spec, config())


def test_tensorrt_asks_the_gpu_for_its_compute_capability(half, fake_tensorrt, monkeypatch):
    monkeypatch.setattr(tensorrt_build, "cuda_problem", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    check_request("tensorrt", half.target_spec, config())
    spec = dataclasses.replace(half, dtype="bfloat16").target_spec
    with pytest.raises(ConfigError, match=r"found 75"):
        check_request("tensorrt", spec, config("bfloat16"))


def test_missing_package_names_the_extra(monkeypatch):
    package = dataclasses.replace(tensorrt_package.RUNTIMES[RTX], modules=("absent_one", "absent_two"))
    monkeypatch.setitem(tensorrt_package.RUNTIMES, RTX, package)
    with pytest.raises(DependencyError, match=r"tensorrt-rtx; install it with: pip install 'trtspec\[tensorrt-rtx\]'"):
        load_tensorrt(RTX)


def test_second_module_name_is_tried(monkeypatch):
    package = dataclasses.replace(tensorrt_package.RUNTIMES[RTX], modules=("absent_one", "json"))
    monkeypatch.setitem(tensorrt_package.RUNTIMES, RTX, package)
    assert load_tensorrt(RTX).__name__ == "json"


@pytest.mark.parametrize("failure", ["import absent_library", "raise OSError('libnvinfer.so.11 not found')"])
def test_broken_package_is_not_called_missing(tmp_path, monkeypatch, failure):
    (tmp_path / "broken_tensorrt.py").write_text(failure)
    monkeypatch.syspath_prepend(tmp_path)
    package = dataclasses.replace(tensorrt_package.RUNTIMES["tensorrt"], modules=("broken_tensorrt",))
    monkeypatch.setitem(tensorrt_package.RUNTIMES, "tensorrt", package)
    with pytest.raises(EngineError, match=r"installed and cannot be loaded"):
        load_tensorrt("tensorrt")


def test_unknown_runtime():
    with pytest.raises(ConfigError, match=r"'tensorflow' is not one of tensorrt, tensorrt-rtx"):
        load_tensorrt("tensorflow")


def test_target_profiles():
    decode, prefill = target_profiles(max_batch=4, max_width=17, prefill_chunk=512, cache_rows=1024)
    assert decode.sizes == {"batch": (1, 2, 4), "width": (1, 9, 17), "live_len": (1, 512, 1024)}
    assert prefill.sizes == {"batch": (1, 1, 1), "width": (1, 512, 512), "live_len": (1, 512, 1024)}


def test_limits_beyond_the_cache_are_rejected():
    with pytest.raises(ConfigError, match=r"prefill_chunk 512 is more than the KV cache's 64 rows"):
        target_profiles(max_batch=1, max_width=8, prefill_chunk=512, cache_rows=64)
    with pytest.raises(ConfigError, match=r"axis batch has .* = .1, 0, 0.; expected 1 <= min"):
        target_profiles(max_batch=0, max_width=8, prefill_chunk=8, cache_rows=64)


def test_build_config_rejects_nonsense():
    with pytest.raises(ConfigError, match=r"dtype 'float8'"):
        config("float8")
    with pytest.raises(ConfigError, match=r"at least one optimisation profile"):
        config(profiles=())
    with pytest.raises(ConfigError, match=r"name one twice"):
        config(capabilities=(86, 86))
    with pytest.raises(ConfigError, match=r"axis rows"):
        Profile("p", {"rows": (2, 1, 4)})


def test_nested_phases_count_towards_the_outermost():
    seen = []
    state = BuildState(lambda phase, fraction: seen.append((phase, fraction)), None)
    state.phase_start("build", None, 4)
    assert state.step_complete("build", 0)
    state.phase_start("optimise", "build", 2)
    state.step_complete("optimise", 0)
    state.poll()
    state.phase_finish("optimise")
    state.poll()
    state.phase_start("time", "build", 1000)
    state.poll()
    assert seen == [("optimise", 0.375), ("time", 0.375)]
    state.stop.set()
    assert not state.step_complete("build", 1)
