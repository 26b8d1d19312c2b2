"""The kernels as PTX, compiled ahead of time for a GPU that needn't be there.

    python -m trtspec.plugins.compile

prints registers, shared memory and spills of every kernel for the compute capabilities of `CAPABILITIES`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from trtspec.plugins.kernels import plans
from trtspec.plugins.kernels.launch import kernel_of
from trtspec.plugins.kernels.plans import Plan

CAPABILITIES = (80, 90, 100, 120)
"""Compute capabilities (8.0 is 80) that kernels are checked for."""
_PTX_VERSIONS = {100: 86, 101: 86, 120: 87, 103: 88, 121: 88}
"""The oldest version of PTX that knows a capability; 8.0 is enough for older ones. A driver refuses newer PTX than its
own, and triton would write the newest."""


class CompiledKernel(NamedTuple):
    """A kernel for one compute capability."""

    name: str
    """Of the entry in the PTX."""
    ptx: str
    parameters: tuple[str, ...]
    """The entry's parameters: inputs, scalars (int32), outputs."""
    plan: Plan
    """Constants and number of warps."""
    shared_bytes: int
    """Dynamic shared memory that the launch has to ask for."""
    registers: int
    """Of each thread."""
    spill_bytes: int
    """Registers that had to be kept in memory, stores and loads together."""

    @property
    def threads(self) -> int:
        """Threads of a program, the launch's block size."""
        threads: int = 32 * self.plan.num_warps
        return threads


def compile_ngram_draft(
    capability: int, *, ngram_min: int, ngram_max: int, num_tokens: int, branches: int, latest: int
) -> CompiledKernel:
    """Parameters: history, lengths, columns of the history, then the outputs. Grid: one program for each sequence.

    Raises:
        ImportError, RuntimeError: triton is missing, or cannot compile here.
    """
    plan = plans.ngram_draft_plan(
        ngram_min=ngram_min, ngram_max=ngram_max, num_tokens=num_tokens, branches=branches, latest=latest
    )
    return compile_kernel("ngram", "ngram_draft_kernel", plan, capability)


def compile_merge_drafts(capability: int, *, branches: int, num_tokens: int, nodes: int, size: int) -> CompiledKernel:
    """Parameters: the inputs, then the outputs; no scalars. Grid: one program for each sequence.

    Args:
        nodes: M, columns of the EAGLE tree's tensors.

    Raises:
        ImportError, RuntimeError: triton is missing, or cannot compile here.
    """
    plan = plans.merge_drafts_plan(branches=branches, num_tokens=num_tokens, nodes=nodes, size=size)
    return compile_kernel("merge", "merge_drafts_kernel", plan, capability)


def compile_accept(capability: int, *, nodes: int) -> CompiledKernel:
    """Parameters: the inputs, then the outputs; no scalars. Grid: one program for each sequence.

    Raises:
        ImportError, RuntimeError: triton is missing, or cannot compile here.
    """
    return compile_kernel("verify", "accept_kernel", plans.accept_plan(nodes=nodes), capability)


def compile_kv_commit(capability: int, *, nodes: int, head_dim: int, element_size: int = 2) -> CompiledKernel:
    """Parameters: the inputs, then slots, heads, rows and head_dim of the cache. Grid: [planes * heads, sequences].

    Args:
        element_size: bytes of an element of the cache.

    Raises:
        ImportError, RuntimeError: triton is missing, or cannot compile here.
    """
    plan = plans.kv_commit_plan(nodes=nodes, head_dim=head_dim)
    return compile_kernel("verify", "kv_commit_kernel", plan, capability, {"cache_ptr": f"*i{8 * element_size}"})


def compile_kernel(
    module: str, name: str, plan: Plan, capability: int, types: dict[str, str] | None = None
) -> CompiledKernel:
    kernel, is_interpreted = kernel_of(module, name)
    if is_interpreted:
        raise RuntimeError("kernels are interpreted because TRITON_INTERPRET is set: unset it to compile them")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    parameters = tuple(name for name in kernel.arg_names if name not in plan.constants)
    signature = {name: "*i32" if name.endswith("_ptr") else "i32" for name in parameters}
    signature |= types or {}
    signature |= dict.fromkeys(plan.constants, "constexpr")
    constants = {(kernel.arg_names.index(name),): value for name, value in plan.constants.items()}
    options = {"num_warps": plan.num_warps, "ptx_version": _PTX_VERSIONS.get(capability, 80)}
    compiled = triton.compile(
        ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options=options | plans.OPTIONS,
    )
    ptx = _drop_scratch(compiled.asm["ptx"], len(parameters))
    registers, spill_bytes = _assemble(ptx, Path(triton.__file__).parent / "backends/nvidia/bin/ptxas")
    return CompiledKernel(name, ptx, parameters, plan, compiled.metadata.shared, registers, spill_bytes)


def _drop_scratch(ptx: str, count: int) -> str:
    """PTX whose entry has the first `count` parameters only.

    Triton appends pointers to scratch memory of its own; whoever launches the kernel without triton doesn't have them.
    """
    entry = re.search(r"\.entry\s+\w+\(\s*(.*?)\s*\)", ptx, re.DOTALL)
    if entry is None:
        raise RuntimeError("triton's PTX has no entry: use a version of triton that this package is tested with")
    parameters = re.split(r",\s*", entry[1])
    body = ptx[entry.end() :]
    dropped = [parameter.split()[-1] for parameter in parameters[count:]]
    if len(parameters) < count or any(re.search(rf"\b{name}\b", body) for name in dropped):
        raise RuntimeError(f"triton's PTX has {len(parameters)} parameters, {count} without scratch memory, or uses it")
    return ptx[: entry.start(1)] + ",\n\t".join(parameters[:count]) + ptx[entry.end(1) :]


def _assemble(ptx: str, ptxas: Path) -> tuple[int, int]:
    """Registers and bytes of spills, as the assembler tells them."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    with TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(ptx)
        command: list[str | Path] = [ptxas, "-v", f"-arch={target[1]}", source, "-o", source.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas refused the kernel: {done.stderr}")
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    if registers is None or not spills:
        raise RuntimeError(f"ptxas tells no registers or spills: {done.stderr}")
    return int(registers[1]), sum(map(int, spills))


def examples(capability: int) -> dict[str, CompiledKernel]:
    """Every kernel at usual sizes, by what the table calls it."""
    lookup = {"ngram_min": 2, "num_tokens": 10, "latest": 1}
    return {
        "ngram_draft 2..5, R 1": compile_ngram_draft(capability, **lookup, ngram_max=5, branches=1),
        "ngram_draft 2..32, R 4": compile_ngram_draft(capability, **lookup, ngram_max=32, branches=4),
        "merge_drafts R 1, K 10, M 15": compile_merge_drafts(capability, branches=1, num_tokens=10, nodes=15, size=25),
        "merge_drafts R 4, K 10, M 60": compile_merge_drafts(capability, branches=4, num_tokens=10, nodes=60, size=63),
        "accept N 63": compile_accept(capability, nodes=63),
        "kv_commit N 63, head_dim 128": compile_kv_commit(capability, nodes=63, head_dim=128),
    }


def table() -> list[str]:
    """Lines of a Markdown table of `examples`."""
    lines = [
        "| kernel | capability | block | threads | registers | shared bytes | spilled bytes |",
        "|---|" + "---:|" * 6,
    ]
    for capability in CAPABILITIES:
        for title, kernel in examples(capability).items():
            cells: list[Any] = [title, capability, _block(kernel.plan), kernel.threads, kernel.registers]
            lines.append("| " + " | ".join(map(str, [*cells, kernel.shared_bytes, kernel.spill_bytes])) + " |")
    return lines


def _block(plan: Plan) -> int:
    """Elements that a program works on at once."""
    blocks = ("TILE", "ITEMS", "NODE_BLOCK", "HEAD_BLOCK")
    block: int = next(value for name, value in plan.constants.items() if name in blocks)
    return block


if __name__ == "__main__":
    print("\n".join(table()))
