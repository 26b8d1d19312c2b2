"""Imports go down the layers of the design only, and heavy optional packages are imported where they are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "trtspec"
# Lowest first. A name is a file of trtspec/ or a folder in it. A file may import what stands in an earlier line, and a
# folder's files one another; files and folders in one line may not import each other.
LAYERS = (
    ("plugins",),
    ("errors",),
    ("config", "tensors"),
    ("engine_defaults",),
    ("engine_dir", "sequence", "staging"),
    ("checkpoint",),
    ("graph",),
    ("sampling",),
    ("engine",),
    ("draft",),
    ("decode",),
    ("tokenizer", "completion"),
    ("prompt", "draft_vocab", "runtime_build"),
    ("head_plan", "proposal_build"),
    ("head_build",),
    ("session", "engine_build"),
    ("bench", "train", "serving", "integrations"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = {
    "tensorrt",
    "tensorrt_rtx",
    "tensorrt_rtx_bindings",
    "transformers",
    "huggingface_hub",
    "triton",
    "tensorrt_llm",
}

FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
PLUGIN_FILES = sorted((ROOT / "plugins").rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    """The file's name in LAYERS."""
    first = path.relative_to(ROOT / PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports, in functions and under TYPE_CHECKING too; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def imported_at_module_level(tree: ast.Module) -> Iterator[str]:
    """Top-level packages that importing the module imports."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (name.split(".")[0] for name in imported(node))
        waiting += ast.iter_child_nodes(node)


def parts_used(tree: ast.AST) -> Iterator[str]:
    """Names in LAYERS, or else in trtspec itself, that a module imports."""
    for name in imported(tree):
        first, *rest = name.split(".")
        assert first, f"relative import {name}; write the full name"
        if first == PACKAGE:
            assert rest, "import trtspec: name what is used"
            yield rest[0]


def violations(part: str, tree: ast.AST) -> list[str]:
    """Imports that a file of this part must not have."""
    found = []
    for used in parts_used(tree):
        if used == "__version__" or (used == part and (ROOT / PACKAGE / part).is_dir()):
            continue
        if used not in LEVEL or LEVEL[used] >= LEVEL[part]:
            found.append(used)
    return found


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent != ROOT / PACKAGE or path.stem != "__init__"], ids=relative
)
def test_file_imports_lower_layers_only(path: Path) -> None:
    part = part_of(path)
    assert part in LEVEL, f"{part} has no layer; give it a place in LAYERS and in the design"
    assert violations(part, ast.parse(path.read_bytes())) == []


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=relative)
def test_plugins_import_nothing_of_trtspec_but_themselves(path: Path) -> None:
    assert set(parts_used(ast.parse(path.read_bytes()))) <= {"plugins"}


@pytest.mark.parametrize("path", [*FILES, *PLUGIN_FILES], ids=relative)
def test_heavy_packages_are_not_imported_at_module_level(path: Path) -> None:
    # A kernel is a function of the Triton language, so its own file can't do without; others import that file late.
    own = {"triton"} if path.parent == ROOT / "plugins" / "kernels" else set()
    assert not (HEAVY - own).intersection(imported_at_module_level(ast.parse(path.read_bytes())))


def test_package_init_imports_on_first_use_only() -> None:
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_bytes())
    assert PACKAGE not in set(imported_at_module_level(tree))


@pytest.mark.parametrize(
    ("part", "source", "found"),
    [
        ("graph", "from trtspec.engine.base import Engine", ["engine"]),
        ("graph", "def f():\n    from trtspec import session", ["session"]),
        ("graph", "if TYPE_CHECKING:\n    import trtspec.cli.main", ["cli"]),
        ("graph", "from trtspec.graph.layers import linear\nfrom trtspec import tensors, __version__", []),
        ("sampling", "from trtspec.engine.base import Engine", ["engine"]),
        ("session", "from trtspec.engine_build import build", ["engine_build"]),
        ("session", "from trtspec.tokenizer import Tokenizer", []),
        ("bench", "from trtspec.session import Session", []),
        ("checkpoint", "from trtspec.nowhere import x", ["nowhere"]),
        ("engine", "from trtspec.plugins.reference import x\nfrom trtspec.draft.tree import x", ["draft"]),
    ],
)
def test_violations_are_found(part: str, source: str, found: list[str]) -> None:
    assert violations(part, ast.parse(source)) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import transformers", {"transformers"}),
        ("try:\n    import triton.language as tl\nexcept ImportError:\n    tl = None", {"triton"}),
        ("class A:\n    from huggingface_hub import x", {"huggingface_hub"}),
        ("def f():\n    import tensorrt", set()),
        ("if typing.TYPE_CHECKING:\n    import tensorrt\nelse:\n    import torch", {"torch"}),
    ],
)
def test_module_level_imports_are_found(source: str, found: set[str]) -> None:
    assert set(imported_at_module_level(ast.parse(source))) == found


def test_there_are_files_to_check() -> None:
    assert len(FILES) > 40
    assert PLUGIN_FILES
