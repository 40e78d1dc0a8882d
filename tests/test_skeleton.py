"""The project around the code: light imports, independent graph passes, pinned dependencies and container images."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import compressor
from scripts.docker_check import stages
from tests.sources import parsed

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("module", ["compressor", "compressor.cli"])
def test_import_is_light(module: str) -> None:
    heavy = "{'torch', 'transformers', 'onnx_ir', 'onnxruntime', 'datasets'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_public_names_can_be_imported() -> None:
    assert {"find_sites", "gated", "export_reference", "compress", "Recipe", "Report", "Site"} <= set(
        compressor.__all__
    )
    for name in compressor.__all__:
        assert getattr(compressor, name).__name__ == compressor._RENAMED.get(name, name)


def test_graph_passes_imports_neither_torch_nor_compressor() -> None:
    for file in (ROOT / "graph_passes").rglob("*.py"):
        for node in ast.walk(parsed(file)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"torch", "transformers", "compressor"} & {name.split(".")[0] for name in names}, file


def test_required_files_exist_at_the_top_level() -> None:
    for name in ("pyproject.toml", "Dockerfile", "README.md", "Makefile", "LICENSE", ".ci/run", "constraints.txt"):
        assert (ROOT / name).is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_every_dependency_is_pinned() -> None:
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    required = re.findall(r'^    "([\w.-]+)[>=<]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {name.lower() for name in required} <= {name.lower() for name in pinned}
    assert "torch==2.13.0\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_images_run_as_a_non_root_user(name: str) -> None:
    lines = stages((ROOT / "Dockerfile").read_text())[name].lines
    users = [argument for instruction, argument in lines if instruction == "USER"]
    assert users
    assert users[-1].split(":")[0] not in ("0", "root")
    assert ("ENTRYPOINT", '["compress"]') in lines
