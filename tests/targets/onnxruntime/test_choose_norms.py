"""Fused normalizations are split where that is faster; the file computes the same and is complete either way."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from compressor.targets import TOLERANCE, BuildOptions, Feeds, target
from compressor.targets.onnxruntime import choose_norms as norms
from compressor.targets.onnxruntime import ort_session
from compressor.targets.onnxruntime.choose_norms import choose_norms
from compressor.targets.relative_error import relative_error
from graph_passes import data_files, load, save
from tests.quantization.graphs import files_of
from tests.targets.graphs import parsed, pruned

NORM = "com.microsoft.SkipLayerNormalization"
BODY = f"""
    h, , , s = {NORM} <epsilon = 1e-05> (x, x, scale, shift)
    f = MatMul(h, w)
    y = {NORM} <epsilon = 1e-05> (f, s, scale, shift, bias)
"""
WEIGHTS = "float[32] scale, float[32] shift, float[32] bias, float[32, 32] w"
FEEDS: Feeds = {"x": np.random.default_rng(0).normal(size=(2, 5, 32)).astype(np.float32)}
SETTINGS = ort_session.session_settings("cpu", 1)
SPLIT, KEPT = 0.0, float("inf")
"""Ratios of times from which on norms are split, so that they always or never are."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and short rounds of timing."""
    monkeypatch.setattr(norms, "ROUNDS", 2)
    monkeypatch.setattr(norms, "PAUSE_SECONDS", 0.0)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A graph of two fused norms; its large weights are in a file beside it."""
    path = tmp_path / "engine" / "engine.onnx"
    path.parent.mkdir()
    save(parsed(BODY, "float[B, S, 32] x", "float[B, S, 32] y", WEIGHTS), path)
    assert data_files(load(path))
    return path


def run(path: Path) -> np.ndarray:
    """The output of a graph."""
    output: np.ndarray = ort_session.runner(path, SETTINGS)(FEEDS)["y"]
    return output


def kinds(path: Path) -> set[str]:
    """The operators of a graph."""
    return {node.op_type for node in load(path).graph}


@pytest.mark.parametrize("gain", [SPLIT, KEPT, None], ids=["split", "kept", "timed"])
def test_the_graph_computes_the_same_whatever_is_chosen(
    gain: float | None, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gain is not None:
        monkeypatch.setattr(norms, "GAIN", gain)
    expected = run(graph)
    choice = choose_norms(graph, SETTINGS, FEEDS, TOLERANCE["fp32"])
    assert choice is not None
    assert relative_error(expected, run(graph), FEEDS) < 1e-5
    is_split = "LayerNormalization" in kinds(graph)
    assert is_split is ("SkipLayerNormalization" not in kinds(graph))
    assert re.fullmatch(
        r"norms split, \d+\.\d\d times as fast as fused ones"
        if is_split
        else r"fused norms kept, split ones are \d+\.\d\d times as fast",
        choice,
    )
    if gain is not None:
        assert is_split is (gain == SPLIT)


def test_the_file_of_split_norms_is_complete(graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "GAIN", SPLIT)
    expected = run(graph)
    choose_norms(graph, SETTINGS, FEEDS, TOLERANCE["fp32"])
    onnx.checker.check_model(str(graph))
    files = data_files(load(graph))
    assert {file.parent for file in files} <= {graph.parent.resolve()}
    assert set(files_of(graph)) == {graph.name, *(file.name for file in files)}, "nothing else is left behind"
    moved = tmp_path / "moved"
    shutil.move(graph.parent, moved)
    assert relative_error(expected, run(moved / graph.name), FEEDS) < 1e-5


@pytest.mark.parametrize(("gain", "tolerance"), [(KEPT, 1e-4), (SPLIT, -1.0)], ids=["slower", "other numbers"])
def test_the_files_of_fused_norms_stay(
    gain: float, tolerance: float, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "GAIN", gain)
    before = files_of(graph)
    choice = choose_norms(graph, SETTINGS, FEEDS, tolerance)
    assert choice is not None
    assert choice.startswith("fused norms kept")
    assert files_of(graph) == before


def test_norms_that_are_split_already_are_left(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "GAIN", SPLIT)
    assert choose_norms(graph, SETTINGS, FEEDS, TOLERANCE["fp32"]) is not None
    before = files_of(graph)
    assert choose_norms(graph, SETTINGS, FEEDS, TOLERANCE["fp32"]) is None
    assert files_of(graph) == before


@pytest.mark.parametrize(
    "body",
    ["y = LayerNormalization(x, scale, shift)", f"h, mean = {NORM}(x, x, scale)  m = MatMul(h, w)  y = Sub(m, mean)"],
    ids=["no residual", "mean is read"],
)
def test_nothing_is_chosen_without_a_norm_that_can_be_split(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "GAIN", SPLIT)
    path = tmp_path / "engine.onnx"
    save(parsed(body, "float[B, S, 32] x", "float[B, S, 32] y", WEIGHTS), path)
    before = files_of(path)
    assert choose_norms(path, SETTINGS, FEEDS, TOLERANCE["fp32"]) is None
    assert files_of(path) == before


@pytest.mark.parametrize("gain", [SPLIT, KEPT], ids=["split", "kept"])
def test_an_engine_has_the_form_that_was_chosen(gain: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "GAIN", gain)
    bert = pruned("bert")
    options = BuildOptions(batch=(1, 1, 2), seq=(4, 8, 16), norm_seconds=0.01)
    engine = target("ort").build(bert.shrunk, tmp_path / "engine.onnx", provider="cpu", threads=1, options=options)
    text = "norms split" if gain == SPLIT else "fused norms kept"
    assert text in engine.optimization
    assert ("SkipLayerNormalization" in engine.kernels) is (gain == KEPT)
    assert engine.fused == engine.attentions == bert.attentions
    settings = {**SETTINGS, "graph_optimization": "none"}
    expected = ort_session.runner(bert.shrunk, settings)(bert.inputs)["logits"]
    assert relative_error(expected, engine.run(bert.inputs)["logits"], bert.inputs) <= TOLERANCE["fp32"]
    loaded = target("ort").load(engine.path, provider="cpu", threads=1)
    assert loaded.kernels == engine.kernels


def test_norms_are_not_timed_unless_that_is_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "GAIN", SPLIT)
    engine = target("ort").build(pruned("bert").shrunk, tmp_path / "engine.onnx", provider="cpu", threads=1)
    assert "norms" not in engine.optimization
    assert "SkipLayerNormalization" in engine.kernels


@pytest.mark.parametrize("split", [True, False])
def test_a_form_that_is_given_is_not_timed(*, split: bool, tmp_path: Path) -> None:
    options = BuildOptions(split_norms=split, norm_seconds=1.0)
    path = tmp_path / "engine.onnx"
    engine = target("ort").build(pruned("bert").shrunk, path, provider="cpu", threads=1, options=options)
    assert ("SkipLayerNormalization" in engine.kernels) is not split
    assert "times as fast" not in engine.optimization
