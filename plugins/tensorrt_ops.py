"""The operations ngram_draft and merge_drafts as TensorRT plugins: engines with them hold their kernels as PTX.

`register` makes them known to TensorRT, so that its ONNX parser takes them for the nodes of the proposal graph.

What the tests exercise, on TensorRT's own Python bindings, but over TensorRT-RTX's libraries, with stand-ins for
symbolic sizes and without a GPU: registration, creation from attributes, that the ONNX parser finds the plugins, shapes
and dtypes of the outputs, formats and tactics, and everything that the ahead-of-time functions hand to TensorRT. What
nothing has exercised: a network with the plugins in it, building and running its engine, and the just-in-time functions
on a GPU (they run in triton's interpreter in the tests).
"""

# No `from __future__ import annotations`: tensorrt.plugin reads the annotations of what is registered.

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from trtspec.plugins import checks
from trtspec.plugins.compile import CompiledKernel, compile_kernel, compile_merge_drafts
from trtspec.plugins.definition import MergedDraft, NgramDraft
from trtspec.plugins.kernels import launch
from trtspec.plugins.kernels.plans import Plan, ngram_draft_plan

NAMESPACE = "trtspec"
NGRAM_DRAFT = f"{NAMESPACE}::ngram_draft"
MERGE_DRAFTS = f"{NAMESPACE}::merge_drafts"
TACTICS = {1: 1, 2: 2}
"""Tactics of ngram_draft that TensorRT may time: how many times the usual tile, by how many times the threads."""


def register() -> None:
    """Make both plugins known to TensorRT; calls after the first do nothing.

    A network whose parser should take them needs the flags PREFER_AOT_PYTHON_PLUGINS (there are two implementations)
    and ENABLE_PLUGIN_OVERRIDE (the graph brings functions of the same names).

    Raises:
        ImportError: TensorRT is missing, or too old for plugins that are compiled ahead of time.
    """
    plugin = plugin_module()
    if not hasattr(getattr(plugin.op, NAMESPACE, None), "ngram_draft"):
        _describe_ngram_draft()
        _implement_ngram_draft()
        _describe_merge_drafts()
        _implement_merge_drafts()


def plugin_module() -> Any:
    """The module tensorrt.plugin.

    Raises:
        ImportError: see `register`.
    """
    # tensorrt.plugin reads numpy.typing as an attribute, which an import makes one.
    importlib.import_module("numpy.typing")
    try:
        tensorrt = importlib.import_module("tensorrt")
    except ImportError as error:
        raise ImportError("plugins need TensorRT: install it with pip install 'trtspec[tensorrt]'") from error
    try:
        plugin = importlib.import_module("tensorrt.plugin")
    except ImportError:
        plugin = None
    if not hasattr(plugin, "aot_impl"):
        raise ImportError(
            f"tensorrt {tensorrt.__version__} has no plugins that are compiled ahead of time: "
            "install a newer one with pip install -U 'trtspec[tensorrt]'"
        )
    return plugin


def _describe_ngram_draft() -> None:
    """Register ngram_draft with the shapes of its outputs, its formats and its tactics."""
    import tensorrt.plugin as trtp

    def describe(
        history: trtp.TensorDesc,
        lengths: trtp.TensorDesc,
        ngram_min: int,
        ngram_max: int,
        num_tokens: int,
        branches: int,
        latest: int,
    ) -> tuple[trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc]:
        checks.check_ngram_attributes(ngram_min, ngram_max, num_tokens, branches, latest)
        _check_inputs({"history": (history, 2), "lengths": (lengths, 1)})
        batch = history.shape_expr[0]
        return _outputs(history, (batch, branches, num_tokens), (batch, branches), (batch, branches))

    def tactics(
        history: trtp.TensorDesc,
        lengths: trtp.TensorDesc,
        outputs: tuple[trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc],
    ) -> list[trtp.AutoTuneCombination]:
        return [_int32_everywhere(2 + len(outputs), list(TACTICS))]

    trtp.register(NGRAM_DRAFT)(describe)
    trtp.autotune(NGRAM_DRAFT)(tactics)


def _implement_ngram_draft() -> None:
    """Register its kernel: compiled for the engine, and launched from Python."""
    import tensorrt.plugin as trtp

    def ahead_of_time(
        history: trtp.TensorDesc,
        lengths: trtp.TensorDesc,
        ngram_min: int,
        ngram_max: int,
        num_tokens: int,
        branches: int,
        latest: int,
        outputs: tuple[trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        usual = ngram_draft_plan(
            ngram_min=ngram_min, ngram_max=ngram_max, num_tokens=num_tokens, branches=branches, latest=latest
        )
        tile = TACTICS[tactic] * usual.constants["TILE"]
        plan = Plan({**usual.constants, "TILE": tile}, TACTICS[tactic] * usual.num_warps)
        kernel = compile_kernel("ngram", "ngram_draft_kernel", plan, _capability())
        return _launch(kernel, history.shape_expr[0], {"columns": history.shape_expr[1]})

    def just_in_time(
        history: trtp.Tensor,
        lengths: trtp.Tensor,
        ngram_min: int,
        ngram_max: int,
        num_tokens: int,
        branches: int,
        latest: int,
        outputs: tuple[trtp.Tensor, trtp.Tensor, trtp.Tensor],
        stream: int,
    ) -> None:
        with _on_stream(stream):
            launch.ngram_draft(
                _torch(history),
                _torch(lengths),
                ngram_min=ngram_min,
                ngram_max=ngram_max,
                num_tokens=num_tokens,
                branches=branches,
                latest=latest,
                out=NgramDraft(*map(_torch, outputs)),
            )

    trtp.aot_impl(NGRAM_DRAFT)(ahead_of_time)
    trtp.impl(NGRAM_DRAFT)(just_in_time)


def _describe_merge_drafts() -> None:
    """Register merge_drafts with the shapes and formats of its outputs."""
    import tensorrt.plugin as trtp

    def describe(
        ngram_tokens: trtp.TensorDesc,
        ngram_counts: trtp.TensorDesc,
        eagle_tokens: trtp.TensorDesc,
        eagle_parents: trtp.TensorDesc,
        eagle_counts: trtp.TensorDesc,
        room: trtp.TensorDesc,
        size: int,
    ) -> tuple[trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc]:
        checks.check_size(size)
        _check_inputs(
            {
                "ngram_tokens": (ngram_tokens, 3),
                "ngram_counts": (ngram_counts, 2),
                "eagle_tokens": (eagle_tokens, 2),
                "eagle_parents": (eagle_parents, 2),
                "eagle_counts": (eagle_counts, 1),
                "room": (room, 1),
            }
        )
        batch = ngram_tokens.shape_expr[0]
        return _outputs(ngram_tokens, *([(batch, size)] * 4), (batch,))

    def formats(
        ngram_tokens: trtp.TensorDesc,
        ngram_counts: trtp.TensorDesc,
        eagle_tokens: trtp.TensorDesc,
        eagle_parents: trtp.TensorDesc,
        eagle_counts: trtp.TensorDesc,
        room: trtp.TensorDesc,
        outputs: tuple[trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc],
    ) -> list[trtp.AutoTuneCombination]:
        return [_int32_everywhere(6 + len(outputs), [1])]

    trtp.register(MERGE_DRAFTS)(describe)
    trtp.autotune(MERGE_DRAFTS)(formats)


def _implement_merge_drafts() -> None:
    """Register its kernel: compiled for the engine, and launched from Python."""
    import tensorrt.plugin as trtp

    def ahead_of_time(
        ngram_tokens: trtp.TensorDesc,
        ngram_counts: trtp.TensorDesc,
        eagle_tokens: trtp.TensorDesc,
        eagle_parents: trtp.TensorDesc,
        eagle_counts: trtp.TensorDesc,
        room: trtp.TensorDesc,
        size: int,
        outputs: tuple[trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        kernel = compile_merge_drafts(
            _capability(),
            branches=_fixed("ngram_tokens", ngram_tokens, 1),
            num_tokens=_fixed("ngram_tokens", ngram_tokens, 2),
            nodes=_fixed("eagle_tokens", eagle_tokens, 1),
            size=size,
        )
        return _launch(kernel, ngram_tokens.shape_expr[0], {})

    def just_in_time(
        ngram_tokens: trtp.Tensor,
        ngram_counts: trtp.Tensor,
        eagle_tokens: trtp.Tensor,
        eagle_parents: trtp.Tensor,
        eagle_counts: trtp.Tensor,
        room: trtp.Tensor,
        size: int,
        outputs: tuple[trtp.Tensor, trtp.Tensor, trtp.Tensor, trtp.Tensor, trtp.Tensor],
        stream: int,
    ) -> None:
        inputs = ngram_tokens, ngram_counts, eagle_tokens, eagle_parents, eagle_counts, room
        with _on_stream(stream):
            launch.merge_drafts(*map(_torch, inputs), size=size, out=MergedDraft(*map(_torch, outputs)))

    trtp.aot_impl(MERGE_DRAFTS)(ahead_of_time)
    trtp.impl(MERGE_DRAFTS)(just_in_time)


def _check_inputs(inputs: Mapping[str, tuple[Any, int]]) -> None:
    """Raise ValueError where an input isn't int32 with as many axes as expected."""
    import tensorrt

    for name, (desc, axes) in inputs.items():
        if desc.dtype != tensorrt.DataType.INT32:
            raise ValueError(f"{name} is {desc.dtype}: the plugin takes int32 only, cast it in the graph")
        if desc.ndim != axes:
            raise ValueError(f"{name} has {desc.ndim} axes: the plugin takes {axes}, reshape it in the graph")


def _fixed(name: str, desc: Any, axis: int) -> int:
    """The size of an axis that kernels are compiled for."""
    size = int(desc.shape[axis])
    if size < 1:
        raise ValueError(f"axis {axis} of {name} is {size}, which is dynamic or empty: export it with a fixed size")
    return size


def _outputs(like: Any, *shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Descriptions of int32 tensors; a size is an integer or an expression of the inputs' sizes."""
    import tensorrt.plugin as trtp

    return tuple(trtp.from_shape_expr(shape, like.dtype) for shape in shapes)


def _int32_everywhere(count: int, tactics: list[int]) -> Any:
    import tensorrt.plugin as trtp

    return trtp.AutoTuneCombination(", ".join(["INT32"] * count), "LINEAR", tactics)


def _launch(kernel: CompiledKernel, batch: Any, scalars: Mapping[str, Any]) -> tuple[str, str, Any, Any]:
    """What TensorRT keeps of a kernel: name, PTX, launch parameters, and the scalars behind the inputs."""
    import tensorrt.plugin as trtp

    # TensorRT passes inputs, scalars, outputs; a kernel with others would read its arguments from wrong places.
    assert [name for name in kernel.parameters if not name.endswith("_ptr")] == list(scalars)
    sizes = trtp.KernelLaunchParams(grid_x=batch, block_x=kernel.threads, shared_mem=kernel.shared_bytes)
    arguments = trtp.SymIntExprs.from_tuple([trtp.SymInt32(value) for value in scalars.values()])
    return kernel.name, kernel.ptx, sizes, arguments


def _capability() -> int:
    """The compute capability to compile for: 90 for 9.0. TensorRT builds an engine only on the GPU that will run it."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            "plugins are compiled for the GPU that builds the engine, and torch finds none: build where there is one"
        )
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _on_stream(stream: int) -> Any:
    """A context in which torch and triton launch on a CUDA stream of TensorRT."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))


def _torch(tensor: Any) -> torch.Tensor:
    """The memory of a plugin's tensor as a torch tensor."""
    return torch.as_tensor(tensor, device="cuda")
