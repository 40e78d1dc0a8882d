"""An installation without PyTorch, `.[onnx]`, has every command but those that load a model folder or learn."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.utils import canonicalize_name

import compressor
import graph_passes
from compressor import report as reports
from compressor.environment import PYTORCH_PACKAGES, ROW_PACKAGES
from compressor.errors import TargetMissingError
from compressor.results import NoteCode
from tests.command import compress
from tests.folders import WORDS, tokenizer
from tests.graph.decoders import build_grouped
from tests.graph.files import arrays, classifier, npz, texts
from tests.latency.http_server import serving_http
from tests.light_environment import ROOT, extra, hidden_packages
from tests.run.runs import learning_recipe

TIMING = ("--seconds", "0.01", "--batch", "1", "--seq", "8", "--threads", "1")
TEXTS = ("--max-slowdown", "100000%", "--seconds", "0.2")
CHECK = ("--max-slowdown", "100000%", "--seconds", "0.2", "--seq", "8")
TEST = """
def test_the_model_is_as_fast(latency_gate):
    latency_gate("{model}", baseline="{baseline}", max_slowdown="100000%", seconds=0.2, seq=8)
"""


ROWS = {"rows.npz": (), "rows.tsv": ("--tokenizer", "tokenizer", "--task", "text-classification")}
"""Rows of a file, and how they are read."""


def of_file(folder: Path, rows: str) -> list[str | Path]:
    """Arguments of a run on a file, whose units and weights do not depend on times."""
    options = [folder / part if (folder / part).exists() else part for part in ROWS[rows]]
    return [folder / "model.onnx", "--data", folder / rows, *options, "--macs", "60%", *TIMING]


def of_decoder(folder: Path) -> list[str | Path]:
    """Arguments of a run on a file with caches."""
    rows: list[str | Path] = ["--data", folder / "rows.txt", "--tokenizer", folder / "tokenizer", "--max-length", "8"]
    return [*rows, "--macs", "70%", "--prompt-tokens", "4", "--new-tokens", "2", *TIMING]


@dataclass(frozen=True)
class Light:
    """A folder of a run that a process without PyTorch worked on, and the results of its commands by name."""

    out: Path
    results: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(inputs: Path, tmp_path_factory: pytest.TempPathFactory, shared_exports: None) -> Path:
    """A folder with the output of a run, `out`."""
    folder = tmp_path_factory.mktemp("light")
    compressor.compress(learning_recipe(inputs, folder / "out", save_dense=True))
    classifier(folder / "model.onnx")
    npz(folder / "rows.npz", **arrays(48))
    texts(folder / "rows.tsv")
    tokenizer().save_pretrained(folder / "tokenizer")
    build_grouped(folder / "decoder.onnx")
    (folder / "rows.txt").write_text("\n".join([" ".join(WORDS)] * 10))
    return folder


@pytest.fixture(scope="module")
def light(folder: Path, inputs: Path) -> Light:
    return _light(folder, inputs, lambda name: name not in TIMED)


@pytest.fixture(scope="module")
def timed(folder: Path, inputs: Path) -> Light:
    return _light(folder, inputs, lambda name: name in TIMED)


def _light(folder: Path, inputs: Path, is_run: Callable[[str], bool]) -> Light:
    out, model, rows = folder / "out", inputs / "model", inputs / "rows.tsv"
    shutil.copytree(out, folder / "built", dirs_exist_ok=True)
    dense, small = str(out / "dense.onnx"), str(out / "model.onnx")
    (folder / "test_light.py").write_text(TEST.format(model=small, baseline=dense))
    with serving_http() as url:
        server = ["check", "--server", url, "--model", "small", "--baseline", "dense"]
        commands: dict[str, list[str | Path]] = {
            "--version": ["--version"],
            "--help": ["--help"],
            "sites graph": ["sites", dense],
            "apply": ["apply", dense, "--plan", out / "plan.json", "-o", folder / "applied.onnx"],
            "bench folder": ["bench", out, *TIMING],
            "bench graphs": ["bench", dense, small, *TIMING],
            "check folder": ["check", out, "--baseline", dense, "--expect", "any", *CHECK],
            "check server": [*server, *CHECK],
            "report": ["report", out],
            "recipe": ["recipe"],
            "explain": ["explain", model, "--keep", "1", "--data", rows],
            "export-triton": ["export-triton", out, "-o", folder / "models"],
            "build": ["build", folder / "built", *TIMING],
            "pytest": ["pytest", "-q", "-p", "compressor.pytest_plugin", "-p", "no:cacheprovider", folder],
            "run": ["run", model, "--data", rows],
            "sites folder": ["sites", model],
            "costs": ["costs", model],
            "generate": ["generate", model, "--prompt", "one"],
            "train": ["train", folder / "trained", "--data", rows],
            "distil a file": ["run", *of_file(folder, "rows.npz"), "--distill", "-o", folder / "distilled"],
            "sites file": ["sites", folder / "model.onnx"],
            "explain file": ["explain", folder / "model.onnx", "--data", folder / "rows.npz"],
            **{f"run {name}": ["run", *of_file(folder, name), "-o", folder / f"light {name}"] for name in ROWS},
            "run decoder": ["run", folder / "decoder.onnx", *of_decoder(folder), "-o", folder / "light decoder"],
            "check texts": ["check", small, "--baseline", dense, *TEXTS, "--inputs", rows, "--tokenizer", out],
        }
        commands = {name: command for name, command in commands.items() if is_run(name)}
        file = folder / "commands.json"
        file.write_text(json.dumps({name: list(map(str, arguments)) for name, arguments in commands.items()}))
        done = subprocess.run(
            [sys.executable, "-m", "tests.light_environment", str(file)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    results = {result["name"]: result for result in [json.loads(line) for line in done.stdout.splitlines()]}
    assert results.keys() == commands.keys()
    return Light(folder / "built", results)


TIMED = ("bench folder", "bench graphs", "check folder", "check texts", "build", "pytest")
"""Commands that time engines."""
WORKING = (
    *("--version", "--help", "sites graph", "apply", "check server", "report", "recipe", "explain"),
    *("export-triton", "sites file", "explain file", "run rows.npz", "run rows.tsv", "run decoder"),
)


@pytest.mark.parametrize("name", WORKING)
def test_commands_on_graphs_and_servers_work(name: str, light: Light) -> None:
    result = light.results[name]
    assert result["code"] == 0, result["out"] + result["err"]


@pytest.mark.parametrize("name", ["run", "sites folder", "costs", "generate", "train", "distil a file"])
def test_commands_on_models_say_in_a_line_what_is_missing(name: str, light: Light) -> None:
    result = light.results[name]
    assert result["code"] == TargetMissingError.exit_code, result["out"] + result["err"]
    (line,) = result["err"].splitlines()[-1:]
    assert "pip install '.[cpu]'" in line
    assert "Traceback" not in result["err"]


@pytest.mark.zoo
@pytest.mark.parametrize("name", TIMED)
def test_commands_that_time_engines_work(name: str, timed: Light) -> None:
    result = timed.results[name]
    assert result["code"] == 0, result["out"] + result["err"]


@pytest.mark.zoo
def test_a_build_notes_that_it_measures_no_metric_again(timed: Light) -> None:
    report = reports.load(timed.out)
    assert NoteCode.ROWS_MISSING in {note.code for note in report.notes}
    assert not report.scores
    assert report.speeds
    assert all(proof.holds for proof in report.proofs)


def test_pruning_imports_no_pytorch() -> None:
    lines = (
        "from importlib import import_module; from pkgutil import iter_modules; import compressor.pruning as pruning",
        "from tests.light_environment import hide; hide({'torch', 'transformers', 'datasets', 'accelerate'})",
        "[import_module(f'compressor.pruning.{module.name}') for module in iter_modules(pruning.__path__)]",
    )
    done = subprocess.run([sys.executable, "-c", "; ".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rows_are_read_and_scored_without_pytorch() -> None:
    lines = (
        "from tests.light_environment import hide; hide({'torch', 'transformers', 'accelerate', 'optimum'})",
        "from importlib import import_module; from pkgutil import iter_modules; import compressor.tasks as tasks",
        "[import_module(f'compressor.tasks.{module.name}') for module in iter_modules(tasks.__path__)]",
        "[import_module(f'compressor.{name}') for name in ('engines.score', 'run.evaluate', 'selection.certify')]",
    )
    done = subprocess.run([sys.executable, "-c", "; ".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rows", ["rows.npz", pytest.param("rows.tsv", marks=pytest.mark.zoo)])
def test_a_run_on_a_file_comes_to_the_same_as_with_pytorch(
    rows: str, light: Light, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = folder / f"with PyTorch {rows}"
    assert compress(capfd, *of_file(folder, rows), "-o", out).code == 0
    without, with_pytorch = (reports.load(folder) for folder in (folder / f"light {rows}", out))
    assert without.plan == with_pytorch.plan
    assert without.plan.heads_kept + without.plan.neurons_kept < without.plan.heads + without.plan.neurons
    assert [score.compressed for score in without.scores] == [score.compressed for score in with_pytorch.scores]
    assert all(proof.holds for proof in without.proofs)
    assert {proof.stage for proof in without.proofs} == {proof.stage for proof in with_pytorch.proofs}
    graphs = [graph_passes.load(folder / "model.onnx").graph for folder in (folder / f"light {rows}", out)]
    weights = [{name: value.const_value for name, value in graph.initializers.items()} for graph in graphs]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        counterpart = weights[1][name]
        assert value is not None
        assert counterpart is not None
        np.testing.assert_array_equal(value.numpy(), counterpart.numpy(), name)


def test_a_run_on_a_file_loads_no_pytorch_where_it_is_installed(folder: Path, tmp_path: Path) -> None:
    lines = (
        "import atexit, os, sys; from compressor.cli import main",
        "atexit.register(lambda: os._exit(100 * bool(sys.modules.keys() & {'torch', 'transformers'})))",
        "main(sys.argv[1:])",
    )
    command = [sys.executable, "-c", "; ".join(lines), *of_file(folder, "rows.tsv"), "-o", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert reports.load(tmp_path / "out").plan.neurons_kept


def test_the_packages_of_pytorch_and_of_rows_are_those_of_their_extras() -> None:
    distributions = packages_distributions()
    of_pytorch, of_rows = (
        {canonicalize_name(distributions[package][0]) for package in packages}
        for packages in (PYTORCH_PACKAGES, ROW_PACKAGES)
    )
    assert {canonicalize_name(requirement.name) for requirement in extra("rows")} == of_rows
    assert {canonicalize_name(requirement.name) for requirement in extra("pytorch")} == of_pytorch | of_rows
    assert hidden_packages().issuperset(PYTORCH_PACKAGES)
    assert hidden_packages().isdisjoint(ROW_PACKAGES)
