"""Runs of models that change at some length are right on both sides of it, against the folder loaded afresh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import compressor
from compressor.config.run import Recipe
from compressor.config.sections import ExportConfig
from compressor.engines.build import ExportedGraph
from compressor.engines.export import export_graph
from compressor.engines.prove import both_sides, make_cases
from compressor.model_folder import ModelFolder, example_inputs, load, loading
from compressor.model_folder.text_limits import token_limit
from compressor.models.tiny_model import tiny_model
from compressor.results import NoteCode, ProofStage, Report
from compressor.run import proof_lengths
from compressor.run.proof_lengths import prove_beyond, switch_lengths
from compressor.run.rebuild import load_run
from compressor.run.stages import row_cases
from compressor.tasks import open_data
from compressor.units import find_sites, keep_all
from tests import folders
from tests.run.length_models import LIMIT, SWITCHES, text_model
from tests.run.runs import write_inputs

EXPORTED = sorted(SWITCHES.keys() - {"longformer"})
"""Longformer cannot be exported."""


def compare(folder: Path, graph: Path, length: int) -> float:
    """Relative error of a graph on a padded batch against the folder, loaded afresh."""
    loaded = loading.load_unchanged(folder)
    inputs = example_inputs(loaded, 2, length, seed=length)
    with torch.no_grad():
        expected = loaded.model(**inputs).logits.numpy()
    session = onnxruntime.InferenceSession(graph)
    (actual,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.zoo
@pytest.mark.parametrize("name", EXPORTED)
def test_a_run_is_right_on_both_sides_of_a_switch_and_proves_it(name: str, tmp_path: Path) -> None:
    folders.save(text_model(name), tmp_path / "model")
    switch = SWITCHES[name]
    fields = {"seconds": 0.01, "batch": (1,), "seq": (24,), "threads": 1}
    report: Report = compressor.compress(Recipe(model=tmp_path / "model", out=tmp_path / "out", **fields))
    for proof in report.proofs:
        lengths = {int(case.partition("length ")[2].partition(",")[0]) for case in proof.cases}
        assert {switch, switch + 1} <= lengths or proof.stage is ProofStage.FIXED_SHAPE
    for graph in ("model.onnx", "engine.onnx"):
        for length in (3, switch, switch + 1, 33, 50):
            assert compare(tmp_path / "model", tmp_path / "out" / graph, length) < 1e-4, (graph, length)


def dense_graph(folder: ModelFolder, path: Path) -> ExportedGraph:
    plan = keep_all(find_sites(folder.model, example_inputs(folder, 2, 8)))
    cases = make_cases(lambda *size: example_inputs(folder, *size), maximum_length=10)
    return export_graph("dense", folder, plan, ExportConfig(), cases, path)


@pytest.mark.parametrize(
    "is_large", [pytest.param(False, id="itself", marks=pytest.mark.zoo), pytest.param(True, id="tiny")]
)
def test_beyond_what_is_served_the_model_or_a_tiny_one_of_its_configuration_is_proven(
    is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof_lengths, "_WORK", 0 if is_large else 1e12)
    folder = load(folders.save(text_model("dynamic"), tmp_path / "model"))
    exported = dense_graph(folder, tmp_path / "dense.onnx")
    switches = switch_lengths(folder, 10, token_limit(folder.model))
    proven, notes = prove_beyond(folder, exported, switches, ExportConfig(), 10)
    names = set(proven.proof.cases) - set(exported.proof.cases)
    assert {length for length in both_sides(switches, 10, LIMIT) if any(f"length {length}" in name for name in names)}
    assert all(("tiny" in name) == is_large for name in names)
    assert proven.proof.holds
    assert not notes


def test_a_length_that_nothing_can_prove_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_lengths, "_LONGEST", 12)
    folder = load(folders.save(text_model("dynamic"), tmp_path / "model"))
    exported = dense_graph(folder, tmp_path / "dense.onnx")
    proven, notes = prove_beyond(folder, exported, (16,), ExportConfig(), 10)
    assert proven == exported
    assert [note.code for note in notes] == [NoteCode.LENGTHS_UNPROVEN]


@pytest.mark.parametrize("name", sorted(SWITCHES))
def test_a_tiny_model_has_the_class_and_the_switches_of_the_configuration(name: str) -> None:
    model = text_model(name)
    tiny = tiny_model(model)
    assert type(tiny) is type(model)
    assert tiny is not None
    for entry in ("sliding_window", "local_attention", "max_position_embeddings", "rope_parameters", "block_size"):
        assert getattr(tiny.config, entry, None) == getattr(model.config, entry, None)


def test_dynamic_frequencies_extend_the_limit_of_tokens() -> None:
    assert token_limit(text_model("dynamic")) == LIMIT
    assert token_limit(text_model("longrope")) == LIMIT


def test_rows_of_the_user_are_cases_of_every_proof_of_a_run_and_of_a_build(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    rows = str(inputs / "rows.tsv")
    fields = {"seconds": 0.01, "batch": (1,), "seq": (8,), "threads": 1, "max_length": 8}
    recipe = Recipe(model=inputs / "model", out=tmp_path / "out", eval_data=rows, **fields)
    report = compressor.compress(recipe)
    assert all(
        sum(case.startswith("rows") for case in proof.cases) == 2
        for proof in report.proofs
        if proof.stage is not ProofStage.FIXED_SHAPE
    )
    folder = load(inputs / "model")
    data = open_data(folders.rows_config(None, rows), folder)
    run = load_run(tmp_path / "out", {"seq": (8,)})
    cases = row_cases(data, run.inputs, longest=run.mask_reach)
    ids = {int(id) for case in cases for id in case.feeds["input_ids"].ravel()}
    texts = {int(id) for row in data.eval for id in row["input_ids"]}
    assert cases
    assert ids <= texts | {folder.processor.pad_token_id}


def test_the_shortest_and_the_longest_row_are_cases(tmp_path: Path) -> None:
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\tlabel\ngood\t1\nbad film\t0\ngood film plot the a\t1\n")
    folder = load(folders.save(folders.bert(), tmp_path / "model"))
    data = open_data(folders.rows_config(None, str(rows), str(rows)), folder)
    lengths = sorted(data.test["length"][:])
    alone, ends = row_cases(data, lambda *size: example_inputs(folder, *size))
    assert alone.feeds["input_ids"].shape == (1, lengths[1])
    assert sorted(ends.feeds["attention_mask"].sum(-1)) == [lengths[0], lengths[-1]]
    assert all(case.feeds.keys() == example_inputs(folder, 1, 4).keys() for case in (alone, ends))
    short = row_cases(data, lambda *size: example_inputs(folder, *size), longest=lengths[0])
    assert {case.feeds["input_ids"].shape for case in short} == {(1, lengths[0])}
