"""The layers of the code: imports point to the same layer or to one above it, and have no cycle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import parsed

ROOT = Path(__file__).parent.parent

GRAPH_PASSES = (
    ("errors", "interrupts", "files", "tape"),
    ("block_sparse", "weights"),
    ("plan",),
    ("flow",),
    ("attention",),
    ("quantizers",),
    ("passes",),
    ("shrink",),
)
COMPRESSOR = (
    ("errors", "results", "progress", "environment", "workdir", "silence_libraries", "segment_memory", "answers"),
    ("store", "processes"),
    ("targets",),
    ("config",),
    ("units",),
    ("models", "graph", "model_folder", "export"),
    ("tasks",),
    ("measure", "quantization"),
    ("engines",),
    ("generation",),
    ("training",),
    ("selection",),
    ("block_masks",),
    ("report",),
    ("pruning",),
    ("run",),
    ("latency", "serving"),
    ("cli", "pytest_plugin"),
)
LAYERS = {"graph_passes": GRAPH_PASSES, "compressor": COMPRESSOR}
"""Layers of each package from the top down, as names of subpackages and modules; `__init__` may import all."""

Imports = dict[str, set[str]]
"""Module name -> modules of the project that its source imports, function bodies and type checking included."""


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(root: Path) -> Imports:
    """The import graph of the packages in `LAYERS` below a folder, read from the source."""
    sources = {module_name(path, root): path for package in LAYERS for path in sorted((root / package).rglob("*.py"))}
    return {name: set(imports_in(path, sources.keys())) for name, path in sources.items()}


def imports_in(path: Path, modules: set[str] | object) -> Iterator[str]:
    assert isinstance(modules, type({}.keys()))
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if submodule in modules:
                    yield submodule
                elif node.module in modules:
                    yield node.module


def imported_names(path: Path) -> Iterator[str]:
    """The modules that a file imports, of any package."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def layer_of(module: str) -> int | None:
    """The layer of a module, counted from the top; None for the package itself, which is the public interface."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if not name:
        return None
    return next(number for number, layer in enumerate(LAYERS[package]) if name in layer)


def upward_imports(imports: Imports) -> list[str]:
    """`a imports b, which lies below it`, for each such pair of files."""
    messages = []
    for module, targets in imports.items():
        for target in sorted(targets):
            if module.partition(".")[0] != target.partition(".")[0]:
                continue
            importer, layer = layer_of(module), layer_of(target)
            if importer is not None and (layer is None or layer > importer):
                messages.append(f"{module} imports {target}, which lies below it")
    return messages


def import_cycles(imports: Imports) -> list[str]:
    """Each import cycle as `a -> b -> a`, found by depth-first search."""
    finished: set[str] = set()
    path: list[str] = []
    cycles: list[str] = []

    def visit(module: str) -> None:
        if module in path:
            cycles.append(" -> ".join([*path[path.index(module) :], module]))
            return
        if module in finished:
            return
        path.append(module)
        for target in sorted(imports.get(module, ())):
            visit(target)
        path.pop()
        finished.add(module)

    for module in imports:
        visit(module)
    return cycles


@pytest.fixture(scope="module")
def imports() -> Imports:
    return imports_of(ROOT)


def test_no_import_points_to_a_lower_layer(imports: Imports) -> None:
    assert upward_imports(imports) == []


def test_imports_have_no_cycle(imports: Imports) -> None:
    assert import_cycles({module: targets - {module} for module, targets in imports.items()}) == []


def test_graph_passes_import_nothing_of_compressor(imports: Imports) -> None:
    imported = {name: targets for name, targets in imports.items() if name.startswith("graph_passes")}
    assert not {target for targets in imported.values() for target in targets if target.startswith("compressor")}


def test_the_packages_import_no_benchmarks_and_no_tests() -> None:
    paths = [path for package in LAYERS for path in (ROOT / package).rglob("*.py")]
    roots = {path: {name.partition(".")[0] for name in imported_names(path)} for path in paths}
    assert not {str(path) for path, names in roots.items() if names & {"benchmarks", "tests"}}


def test_every_module_has_a_layer(imports: Imports) -> None:
    members = {name.split(".")[1] for name in imports if name.startswith("compressor.")}
    assert members == {member for layer in COMPRESSOR for member in layer}


def test_upward_imports_and_cycles_are_reported() -> None:
    graph: Imports = {
        "compressor.units.gate": {"compressor.training.fit"},
        "compressor.training.fit": {"compressor.units.gate"},
    }
    assert upward_imports(graph) == ["compressor.units.gate imports compressor.training.fit, which lies below it"]
    assert import_cycles(graph) == ["compressor.units.gate -> compressor.training.fit -> compressor.units.gate"]
