"""The page and the figures of a study."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.studies import speed
from benchmarks.studies.context import StudyContext
from benchmarks.studies.run import KINDS, study
from compressor.config.run import Recipe
from tests.benchmarks.studies.requests import TINY, request_of, table

EACH_KIND = [pytest.param(kind, marks=pytest.mark.zoo) if kind == "astar" else kind for kind in KINDS]
"""A study of searches takes longest."""
PICTURES = {
    "grid": {"metric_vs_heads", "kept_dsp", "layers_dsp", "kept_taylor", "layers_ste"},
    "astar": {"iterations_b1", "solutions_lazy", "costs_paper_b60", "random_b1", "random_metric_b60"},
    "ablate": {"ablate_one", "ablate_histogram"},
    "dynamics": {"dynamics_k1"},
    "penalty": {"penalty"},
    "importance": {"domain_correlation", "domain_importance", "epoch_correlation", "epoch_importance"},
    "blocks": {"metric_vs_p", "macs_saved", "density", "maps_bidirectional"},
    "speed": {"speed_vs_heads", "size_vs_heads", "speed_vs_batch", "speed_vs_metric", "size_vs_metric"},
}


@pytest.mark.parametrize("kind", EACH_KIND)
def test_every_kind_writes_a_table_and_figures(kind: str, finished: Callable[[str], Path]) -> None:
    figures = {file.stem for file in (finished(kind) / "figures").iterdir()}
    assert figures >= PICTURES[kind]
    for file in (finished(kind) / "figures").iterdir():
        text = file.read_text()
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in text
    assert len(table(finished(kind))) > 1


@pytest.mark.parametrize("kind", EACH_KIND)
def test_the_page_is_self_contained(kind: str, finished: Callable[[str], Path]) -> None:
    page = (finished(kind) / "study.html").read_text()
    references = re.findall(r"""(?:src|href)="([^"]*)"|url\(([^)]*)\)""", page)
    assert all("".join(reference).startswith(("#", "data:")) for reference in references)
    assert "<script" not in page
    assert page.count("<svg") == len(list((finished(kind) / "figures").iterdir()))
    assert "<i>&amp;</i>" not in page


@pytest.mark.parametrize("kind", EACH_KIND)
def test_the_page_shows_every_field_that_identifies_the_study(kind: str, finished: Callable[[str], Path]) -> None:
    page = (finished(kind) / "study.html").read_text()
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    facts_by_kind = {
        "blocks": {"block size": "64", "map rows": "2000", "weight by count": "no", "data": "rows.tsv"},
        "importance": {"data": "rows.tsv"},
        "speed": {"target": "ort", "opset": "18", "batch": "1, 2", "seq": "8", "seconds": "0.001"},
    }
    assert facts.items() >= {"max length": "8", "metric": "accuracy", **facts_by_kind.get(kind, {})}.items()
    stamp = json.loads((finished(kind) / "study.json").read_text())
    unlisted = {"kind", "size", "model", "rows", "seed", "options", "batch_size", "learning_rate", "steps", "sources"}
    requested = {name for name, value in stamp.items() if value is not None} - unlisted
    assert {name.replace("_", " ") for name in requested} <= facts.keys()


def test_the_page_shows_the_batches_that_speed_measures(inputs: Path, tmp_path: Path) -> None:
    """Unless the batches are requested, they are those of the study and not those of the recipe."""
    request = request_of(inputs, tmp_path)
    values = {name: request.recipe.value(name) for name in request.recipe.fields_set - {"batch"}}
    instance = KINDS["speed"](replace(request, recipe=Recipe(**values)), StudyContext(request.recipe, TINY), None)  # type: ignore[arg-type]
    assert instance.settings() == {"batch": [1, 4, 8, 16, 64], "seq": 8, "seconds": 0.001}


def test_engines_of_speed_are_built_for_every_batch(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(inputs, tmp_path)
    values = {name: request.recipe.value(name) for name in request.recipe.fields_set - {"batch"}}
    instance: Any = KINDS["speed"](replace(request, recipe=Recipe(**values)), StudyContext(request.recipe, TINY), None)  # type: ignore[arg-type]
    built: list[Any] = []
    monkeypatch.setattr(speed, "target", lambda name: lambda *paths, options, **settings: built.append(options))
    instance._build(Path("a.onnx"), Path("b.onnx"))
    assert (built[0].batch[0], built[0].batch[2]) == (1, 64)


@pytest.mark.zoo
@pytest.mark.parametrize(("shares", "base"), [((0.0, 0.5), "retrained"), ((0.5,), "dense")])
def test_legend_and_description_name_the_same_baseline(
    shares: tuple[float, ...], base: str, inputs: Path, tmp_path: Path
) -> None:
    findings = study("blocks", request_of(inputs, tmp_path, axes={"shares": shares, "masks": ("own",)}))
    (chart,) = (picture for picture in findings.pictures if picture.name == "metric_vs_p")
    (legend,) = chart.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [base, "own, all"]
    assert chart.description.endswith(f"The grey line is {base}.")


def test_table_and_figure_give_saved_macs_the_same_name(inputs: Path, tmp_path: Path) -> None:
    findings = study("blocks", request_of(inputs, tmp_path, axes={"shares": (0.5,), "masks": ("own",)}, block_size=1))
    (printed_table,) = findings.tables
    dense_cell, masked_cell = (
        {"left": row["macs_left"], "text": line[-1]}
        for row, line in zip(findings.rows, printed_table.rows, strict=True)
    )
    assert printed_table.columns[-1] == "MACs saved"
    assert dense_cell == {"left": 1.0, "text": "0%"}
    assert (masked_cell["left"], masked_cell["text"]) == (
        pytest.approx(0.5, abs=0.05),
        f"{100 * (1 - masked_cell['left']):.0f}%",
    )
    (chart,) = (picture for picture in findings.pictures if picture.name == "macs_saved")
    (line,) = findings.summary
    assert line.removeprefix("MACs saved: ") == chart.description.removeprefix("Here ").removesuffix(".")
    assert chart.description.startswith("Here the share of attention's multiply-accumulates")
