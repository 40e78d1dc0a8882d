"""Runs that follow the plan of an earlier run, whose weights lie beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import compressor
from compressor.config.run import Recipe
from compressor.config.step_list import steps_of
from compressor.config.unused_flags import nothing_learned_note
from compressor.errors import ErrorCode
from compressor.model_folder import load
from compressor.results import NoteCode, Report
from compressor.run.load import load_model
from compressor.run.plan_source import whole_plan
from compressor.targets.graph_facts import graph_digest
from graph_passes import WEIGHTS, Plan, save
from graph_passes import load as load_graph
from tests import folders
from tests.faults import fails_with
from tests.run.budgets.budget_runs import codes
from tests.run.distillation.distilled_runs import have_same_weights, weights
from tests.run.runs import learn, learning_recipe, write_inputs

ALONE: dict[str, Any] = {"keep": None, "training_steps": None, "macs": "60%"}
AFTER_TRAINING: dict[str, Any] = {"macs": "85%"}
DISTILLED: dict[str, Any] = {"distill": True, "distill_steps": 60, "distill_learning_rate": 1e-4}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers differ from row to row; tests must not change it."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    torch.manual_seed(0)
    folders.save(folders.bert(initializer_range=0.5), folder / "model")
    return folder


@pytest.mark.parametrize("blocks", [{"drop_blocks": 0}, {"drop_blocks_by_kind": {"bidirectional": 0}}])
def test_a_run_that_drops_no_blocks_keeps_every_head(blocks: dict[str, Any], inputs: Path, tmp_path: Path) -> None:
    recipe = learning_recipe(inputs, tmp_path / "out", keep=None, training_steps=None, **blocks)
    assert steps_of(recipe) == ()
    selected = whole_plan(load_model(recipe, ()))
    assert not selected.plan.drops_any
    assert nothing_learned_note(recipe, has_heads=True).code is NoteCode.NOTHING_LEARNED


@pytest.fixture(scope="module")
def pruned(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """The output folder of a run that refits weights, and its report."""
    out = tmp_path_factory.mktemp("pruned") / "out"
    return out, compressor.compress(learning_recipe(inputs, out, **ALONE))


@pytest.fixture
def copy(pruned: tuple[Path, Report], tmp_path: Path) -> Path:
    """A copy of the output folder that a test may damage."""
    return shutil.copytree(pruned[0], tmp_path / "copy")


def following(inputs: Path, out: Path, plan: Path, **fields: Any) -> Recipe:
    return learning_recipe(inputs, out, **{"keep": None, "training_steps": None, "plan": plan / "plan.json", **fields})


def assert_repeats(report: Report, out: Path, earlier: Report, earlier_out: Path) -> None:
    """The run builds what the earlier run built, and compares it with the same model."""
    assert all(proof.holds for proof in report.proofs)
    assert report.graphs["model.onnx"] == earlier.graphs["model.onnx"]
    assert report.dense.macs == earlier.dense.macs
    assert [(row.dense, row.compressed) for row in report.scores] == [
        (row.dense, row.compressed) for row in earlier.scores
    ]
    first, second = (Plan.load(folder / "plan.json") for folder in (earlier_out, out))
    assert first.model_copy(update={"evidence": {}}) == second.model_copy(update={"evidence": {}})
    assert have_same_weights(weights(out), weights(earlier_out))
    assert {NoteCode.PLAN_FOLLOWED, NoteCode.WEIGHTS_CHANGED} <= codes(report)


def test_a_plan_brings_the_weights_that_were_refitted_with_it(
    inputs: Path, tmp_path: Path, pruned: tuple[Path, Report]
) -> None:
    earlier_out, earlier = pruned
    report = compressor.compress(following(inputs, tmp_path / "out", earlier_out))
    assert not have_same_weights(weights(inputs / "model"), weights(earlier_out))
    assert_repeats(report, tmp_path / "out", earlier, earlier_out)


def test_a_plan_is_followed_with_rows_that_have_no_labels(
    inputs: Path, tmp_path: Path, pruned: tuple[Path, Report]
) -> None:
    texts = [line.partition("\t")[2] for line in (inputs / "rows.tsv").read_text().splitlines()]
    (tmp_path / "texts.tsv").write_text("\n".join([*texts, ""]))
    earlier_out, earlier = pruned
    report = compressor.compress(
        following(inputs, tmp_path / "out", earlier_out, data=tmp_path / "texts.tsv", eval_data=None, test_data=None)
    )
    assert report.graphs["model.onnx"] == earlier.graphs["model.onnx"]
    assert NoteCode.ROWS_UNLABELLED in codes(report)


@pytest.mark.zoo
def test_a_plan_brings_the_weights_of_heads_that_were_trained_first(inputs: Path, tmp_path: Path) -> None:
    earlier = compressor.compress(learning_recipe(inputs, tmp_path / "earlier", **AFTER_TRAINING))
    assert earlier.plan.method == "dsp+reconstruct"
    report = compressor.compress(following(inputs, tmp_path / "out", tmp_path / "earlier"))
    assert_repeats(report, tmp_path / "out", earlier, tmp_path / "earlier")


def without_metadata(out: Path, folder: Path) -> str:
    """Hash of the graph in an output folder without its metadata, of which `folder` gets a copy."""
    folder.mkdir()
    graph = load_graph(out / "model.onnx")
    graph.metadata_props.clear()
    save(graph, folder / "model.onnx")
    return graph_digest(folder / "model.onnx")


def test_without_rows_the_plan_is_built_and_fields_without_effect_are_named(
    inputs: Path, tmp_path: Path, pruned: tuple[Path, Report]
) -> None:
    fields = {"prune_rows": 16, "keep": 1, "data": None}
    report = compressor.compress(following(inputs, tmp_path / "out", pruned[0], **fields))
    # The example rows that a graph carries are laid out like the rows of the run, if it has any.
    assert without_metadata(tmp_path / "out", tmp_path / "here") == without_metadata(pruned[0], tmp_path / "there")
    assert NoteCode.PLAN_FOLLOWED in {note.code for note in report.notes}
    unused = [note.text for note in report.notes if note.code is NoteCode.NO_EFFECT]
    assert all(any(flag in text for text in unused) for flag in ("--keep", "--prune-rows"))


@pytest.mark.zoo
def test_the_whole_model_teaches_what_the_plan_keeps(inputs: Path, tmp_path: Path, pruned: tuple[Path, Report]) -> None:
    out, report = pruned
    by_plan = learn(following(inputs, tmp_path / "plan", out, **DISTILLED))
    fields = {"model": out, "teacher": inputs / "model", **DISTILLED}
    by_folder = learn(learning_recipe(inputs, tmp_path / "folder", keep=None, training_steps=None, **fields))
    assert {NoteCode.PLAN_FOLLOWED, NoteCode.DISTILLED} <= by_plan.codes
    assert by_plan.selected.plan.groups == report.plan.groups
    assert not have_same_weights(by_plan.weights, weights(out))
    assert have_same_weights(by_plan.weights, by_folder.weights)


@pytest.mark.parametrize("model_option", ["--plan", "model folder"])
def test_a_compressed_model_does_not_teach_itself(model_option: str, inputs: Path, tmp_path: Path, copy: Path) -> None:
    plan = {"plan": copy / "plan.json"} if model_option == "--plan" else {}
    with fails_with(ErrorCode.MISSING_VALUE, field="teacher"):
        compressor.compress(
            learning_recipe(inputs, tmp_path / "out", model=copy, keep=None, training_steps=None, **plan, **DISTILLED)
        )


def change_weights(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if name.endswith("output.dense.weight"))
    save_file({**tensors, name: tensors[name] + 1e-3}, folder / WEIGHTS, {"format": "pt"})


def remove_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def forget_originals(folder: Path) -> None:
    Plan.load(folder / "plan.json").model_copy(update={"weights": {}}).save(folder / "plan.json")


@pytest.mark.parametrize("damage", [change_weights, remove_weights, forget_originals])
@pytest.mark.parametrize("fields", [{}, DISTILLED])
def test_weights_that_are_not_those_of_the_plan_are_refused(
    damage: Any, fields: dict[str, Any], inputs: Path, tmp_path: Path, copy: Path
) -> None:
    damage(copy)
    with fails_with(ErrorCode.FILE_MISMATCH, path=copy / "plan.json") as caught:
        compressor.compress(following(inputs, tmp_path / "out", copy, **fields))
    assert ("--teacher" in str(caught.value)) == bool(fields)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize("parameter", ["bert.encoder.layer.0.output.dense.weight", "classifier.bias"])
def test_a_plan_of_another_model_is_refused(
    parameter: str, inputs: Path, tmp_path: Path, pruned: tuple[Path, Report]
) -> None:
    """Also if the other model differs only in a parameter that the run of the plan did not change."""
    network = load(inputs / "model").model
    assert (parameter in pruned[1].plan.weights) == parameter.endswith("weight")
    with torch.no_grad():
        network.get_parameter(parameter).add_(0.5)
    folders.save(network, tmp_path / "another")
    with fails_with(ErrorCode.FILE_MISMATCH, path=pruned[0] / "plan.json", model=pruned[1].plan.model) as caught:
        compressor.compress(following(inputs, tmp_path / "out", pruned[0], model=tmp_path / "another"))
    assert load(tmp_path / "another").fingerprint in str(caught.value)
