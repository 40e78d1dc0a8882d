"""Code that decides stored results has a version, which is raised when the code changes.

`tests/code_versions.json` records a hash of the code that each version declares (`compressor.store.versioned`), without
comments, docstrings and formatting. After a change, raise the version where results may differ from those of before,
and record the code by `python -m tests.test_code_versions`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_name("code_versions.json")


def module_files(module: str) -> list[Path]:
    """The source of a module, or of every module of a package."""
    path = ROOT.joinpath(*module.split("."))
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    if not all(file.is_file() for file in files) or not files:
        raise AssertionError(f"{module}: there is no such module; name the one that decides the result now")
    return files


def normalized(source: str) -> str:
    """The source as a syntax tree, without docstrings; comments and formatting are not part of it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            texts = [part for part in body if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)]
            node.body = [part for part in body if part not in texts] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree)


def versions_in(tree: ast.Module) -> Iterator[tuple[str, int, list[str]]]:
    """Name of each function with a version, the version, and the further modules that it declares."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, list[str]]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield from visit(child, prefix)
                continue
            name = f"{prefix}{child.name}"
            for call in child.decorator_list:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "versioned":
                    names = [part.value for part in ast.walk(call) if isinstance(part, ast.Constant)]
                    version, *modules = sorted(names, key=lambda value: isinstance(value, str))
                    assert isinstance(version, int), f"{name}: its version is no number"
                    yield name, version, [str(module) for module in modules]
            yield from visit(child, f"{name}.")

    yield from visit(tree, "")


@functools.cache
def current() -> dict[str, dict[str, Any]]:
    """Version and hash of the code of every function that declares a version."""
    versions: dict[str, dict[str, Any]] = {}
    for file in sorted((ROOT / "compressor").rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if "@versioned(" not in source:
            continue
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for name, version, parts in versions_in(ast.parse(source)):
            files = dict.fromkeys(path for part in (module, *parts) for path in module_files(part))
            code = hashlib.sha256("".join(normalized(path.read_text(encoding="utf-8")) for path in files).encode())
            versions[f"{module} {name}"] = {"version": version, "code": code.hexdigest()[:16]}
    return versions


def test_code_that_changed_has_another_version_or_is_recorded() -> None:
    recorded: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    versions = current()
    changed = [name for name in {**recorded, **versions} if recorded.get(name) != versions.get(name)]
    unraised = [
        name
        for name in changed
        if name in recorded and name in versions and recorded[name]["version"] == versions[name]["version"]
    ]
    assert not changed, (
        f"code that decides stored results changed: {', '.join(changed)}; raise the version"
        f" (`versioned`){f' of {unraised}' if unraised else ''} if results may differ from those of before, then record"
        " the code: python -m tests.test_code_versions"
    )


def test_every_step_has_a_version() -> None:
    steps = {path.stem for path in (ROOT / "compressor/run/steps").glob("*.py")} - {"__init__", "base"}
    assert {name for name in steps if f"compressor.run.steps.{name} _run" in current()} == steps


def test_comments_docstrings_and_formatting_are_not_part_of_the_code() -> None:
    plain = "def f(x):\n    return x + 1\n"
    assert normalized('"""Doc."""\n\n\ndef f(x):  # why\n    """Doc."""\n    return (x  +  1)\n') == normalized(plain)
    assert normalized("def f(x):\n    return x + 2\n") != normalized(plain)


@pytest.mark.parametrize("decorator", ["@versioned(3, 'a.b', 'c')", "@versioned(3, *('a.b', 'c'))"])
def test_versions_are_read_from_the_source(decorator: str) -> None:
    source = f"class A:\n    {decorator}\n    def f(self):\n        @versioned(1)\n        def g(): ...\n"
    assert list(versions_in(ast.parse(source))) == [("A.f", 3, ["a.b", "c"]), ("A.f.g", 1, [])]


if __name__ == "__main__":
    RECORD.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
