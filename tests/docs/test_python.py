"""The Python code in the documentation runs unchanged; that on ladders is run by `tests/run/test_ladder.py`."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

import compressor
from compressor import AllAttentionConfig, AllAttentionForCausalLM
from compressor.config.run import Recipe
from compressor.export import export_reference
from compressor.measure.costs import CostTable
from compressor.model_folder import example_inputs
from compressor.model_folder import load as load_folder
from compressor.pruning.measure import CostSource
from compressor.selection import allocation
from compressor.targets import BuildOptions
from compressor.targets.onnxruntime.ort_session import open_session, run_session, session_settings
from compressor.units import find_sites, keep_all
from graph_passes import count_parameters, find_attention, load
from tests import folders
from tests.docs.pages import ROOT, blocks, python_block
from tests.generation.counting import write_decoder_only
from tests.latency.graphs import text_model
from tests.latency.grpc_server import TOKENS, serving
from tests.tasks.rows import forward_of


@pytest.mark.zoo
def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.save(folders.bert(), tmp_path / "model")
    rows = [f"{index % 2}\tthe {'good' if index % 2 else 'bad'} film {index % 5}" for index in range(40)]
    (tmp_path / "train.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    short = {"training_steps": 2, "batch": (1,), "seq": (8,), "seconds": 0.01, "threads": 1, "max_length": 8}
    monkeypatch.setattr(compressor, "Recipe", functools.partial(Recipe, **short))
    monkeypatch.chdir(tmp_path)
    exec(python_block(ROOT / "README.md"), {})
    assert (tmp_path / "out" / "report.html").is_file()
    assert [site.heads for site in find_attention(load("small.onnx"))] == [1]


def test_the_code_on_generation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_decoder_only(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(python_block(ROOT / "docs" / "generation.md"), names)
    assert names["text"] == names["parts"]
    assert names["ids"].shape == (1, 12)


@pytest.mark.zoo
def test_the_code_on_language_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_persistent": 5}
    model = AllAttentionForCausalLM(AllAttentionConfig(vocab_size=25, memory_length=6, **sizes))
    folder = load_folder(folders.save(model, tmp_path / "lm"))
    inputs = example_inputs(folder, 2, 8)
    (tmp_path / "small").mkdir()
    export_reference(model, keep_all(find_sites(model, inputs)), inputs, tmp_path / "small" / "model.onnx")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(python_block(ROOT / "docs" / "language_models.md"), names)
    assert len(names["stream"].memories) == 1
    torch.testing.assert_close(torch.from_numpy(names["logits"]), names["out"].logits, rtol=1e-4, atol=1e-4)


@pytest.mark.zoo
def test_the_stages_of_pruning_run_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are multiply-accumulates, so that no engine of a cost table is built."""

    def tables(source: CostSource, macs: CostTable, *args: object) -> list[CostTable]:
        return [macs.model_copy(update={"unit": "ms", "seq": 8, "batch": 1})]

    monkeypatch.setattr(CostSource, "measured_tables", tables)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders.save(folders.bert(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(python_block(ROOT / "docs" / "latency_target.md"), names)
    table, plan = names["table"], names["plan"]
    assert table.least <= table.cost(plan.counts) <= names["budget"].budget < table.whole
    dense = count_parameters(load("reference.onnx"))
    assert count_parameters(load("small.onnx")) < dense


@pytest.mark.zoo
def test_the_tests_on_the_latency_check_page_pass(tmp_path: Path) -> None:
    out = text_model(tmp_path / "out")
    session = open_session(out / "model.onnx", session_settings("cpu", 1))

    def infer(**feeds: np.ndarray) -> np.ndarray:
        logits: np.ndarray = run_session(session, feeds)["logits"]
        return logits

    (tmp_path / "dev.tsv").write_text("text\n" + "the good film\n" * 16)
    text = python_block(ROOT / "docs" / "latency_check.md")
    inputs = {"input_ids": TOKENS, "attention_mask": TOKENS}
    with serving({"small": infer, "dense": infer}, inputs, output="logits") as url:
        # Bounds that any machine meets, and short measurements.
        for documented, tested in (
            ("grpc://localhost:8001", url),
            ('tokenizer="out"', 'tokenizer="out", seconds=0.1, load_seconds=0.1'),
            ('"5%", p99="10ms"', '"1000%", p99="10s"'),
            ("model_p50 < 20", "model_p50 < 20_000"),
            ("seconds=10", 'seconds=0.1, max_slowdown="1000%"'),
        ):
            assert documented in text
            text = text.replace(documented, tested)
        (tmp_path / "test_latency.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", str(tmp_path)]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "3 passed" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("number", range(12))
def test_examples_of_extensions_run(number: int) -> None:
    """The code of each extension runs, and its methods take what those of their class take."""
    names = _example(number)
    assert len(_examples()) == 12
    for name, method, inherited in _overrides(names.values()):
        missing = set(inspect.signature(inherited).parameters) - set(inspect.signature(method).parameters)
        assert not missing, name


def test_the_target_of_the_extending_page_computes_its_graph(tmp_path: Path) -> None:
    graph = text_model(tmp_path / "out") / "model.onnx"
    names = _example(_number_of("ReferenceTarget"))
    options = {"precision": "fp32", "provider": None, "threads": None, "options": BuildOptions()}
    engine = names["build_engine"](graph, tmp_path / names["TARGET"].engine_file, **options)
    feeds = {name: np.ones((2, 8), np.int64) for name in engine.inputs}
    expected = run_session(open_session(graph, session_settings("cpu", 1)), feeds)
    outputs = engine.run(feeds)
    assert outputs.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(outputs[name], values, rtol=1e-4, atol=1e-5)


def test_the_task_of_the_extending_page_ranks_pairs_by_scores_of_single_texts(tmp_path: Path) -> None:
    folder = load_folder(folders.save(folders.bert(num_labels=1), tmp_path / "model"))
    task_class = _example(_number_of("PairRanking"))["PairRanking"]
    task = task_class(folder, folders.rows_config(), task_class.metrics[0])
    texts = {"first": ["good film", "the bad plot", "one"], "second": ["bad film", "two", "a very good film"]}
    examples = task.encode_unlabelled(Dataset.from_dict(texts), "rows")
    forward = forward_of(folder.model)
    answers = task.labels_by(forward, list(examples))["labels"]
    exchanged = {"first": texts["second"], "second": texts["first"], "better": [1 - answer for answer in answers]}
    for rows in ({**texts, "better": answers}, exchanged):
        labelled = list(task.encode(Dataset.from_dict(rows), "rows"))
        assert task.score(task.measure(forward, labelled)) == 1


def test_the_allocation_of_the_extending_page_meets_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "least_loss", _example(_number_of("greedy"))["greedy"])
    random = np.random.default_rng(0)
    for _ in range(20):
        losses, cost = (
            [dict(zip(range(5), np.sort(random.random(5))[::order].tolist(), strict=True)) for _ in range(4)]
            for order in (-1, 1)
        )
        budget = 0.6 * sum(curve[4] for curve in cost) + 0.4 * sum(curve[0] for curve in cost)
        widths = allocation.allocate(losses, [cost], [budget])
        assert sum(curve[width] for curve, width in zip(cost, widths, strict=True)) <= budget * (1 + 1e-9)


def _examples() -> list[str]:
    pages = (ROOT / "docs" / f"{name}.md" for name in ("architecture", "extending"))
    return [block.text for page in pages for block in blocks(page) if block.language == "python"]


def _number_of(name: str) -> int:
    """The number of the example that defines a name."""
    (number,) = (n for n, text in enumerate(_examples()) if re.search(rf"^(class|def) {name}\b", text, re.MULTILINE))
    return number


def _example(number: int) -> dict[str, Any]:
    """The names that an example defines."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(_examples()[number], "extending.md", "exec", dont_inherit=True), names)
    return names


def _overrides(values: Iterable[Any]) -> Iterator[tuple[str, Any, Any]]:
    """The methods of the classes of an example that replace inherited ones, each with the inherited one."""
    for owner in values:
        if not inspect.isclass(owner) or owner.__module__ != "__main__":
            continue
        for name, method in vars(owner).items():
            inherited = getattr(super(owner, owner), name, None)
            if not name.startswith("__") and inspect.isfunction(method) and inspect.isroutine(inherited):
                yield f"{owner.__name__}.{name}", method, inherited
