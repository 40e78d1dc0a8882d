"""A run from a folder of images to its report, and the engine against transformers' pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from scipy.special import softmax

import compressor
from compressor import report as reports
from compressor.config.run import Recipe
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import example_inputs, load
from compressor.model_folder.processor import IMAGES
from compressor.results import NoteCode, Report
from compressor.targets import target
from compressor.tasks import open_data
from compressor.units import find_groups, keep_all
from tests.faults import fails_with
from tests.folders import rows_config
from tests.run.listeners import RecordingListener
from tests.shared_exports import shared_export
from tests.tasks.pictures import CLASSES, save_classifier, truncate, write_folder

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `images`, `photos` without labels, and `out`, the output of a run that learns from these.

    The run prunes, distils and quantizes.
    """
    path = tmp_path_factory.mktemp("images")
    save_classifier(path / "model")
    write_folder(path / "images", 24)
    write_folder(path / "photos", 20, labelled=False)
    recipe = Recipe(
        model=path / "model",
        data=str(path / "photos"),
        test_data=str(path / "images"),
        macs=0.92,
        distill=True,
        distill_steps=2,
        batch_size=4,
        target="openvino",
        precision="int8",
        out=path / "out",
        batch=(1,),
        seconds=0.01,
        prune_rows=16,
        calibration_rows=8,
    )
    compressor.compress(recipe)
    return path


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return reports.load(folder / "out")


def test_folders_of_images_become_a_report(report: Report) -> None:
    assert report.task == "image-classification"
    assert (report.scores[0].metric, report.scores[0].rows) == ("accuracy", 24)
    assert NoteCode.ROWS_UNLABELLED in {note.code for note in report.notes}
    assert all(proof.holds for proof in report.proofs)
    assert {speed.seq for speed in report.speeds} == {None}
    assert all(row.texts[0].endswith(".png") for row in report.answers)
    assert {text for row in report.answers for text in (row.dense, row.compressed, row.expected)} <= set(CLASSES)


def test_the_processor_and_the_names_of_classes_are_in_the_output(folder: Path) -> None:
    assert hf.AutoConfig.from_pretrained(folder / "out").id2label == dict(enumerate(CLASSES))
    processors = [hf.AutoImageProcessor.from_pretrained(folder / name).to_dict() for name in ("model", "out")]
    assert processors[0] == processors[1]


def test_an_engine_in_fp32_answers_as_the_pipeline_of_transformers(folder: Path, tmp_path: Path) -> None:
    loaded = load(folder / "model")
    inputs = example_inputs(loaded, 2, 8)
    plan = keep_all(find_groups(loaded.model, inputs))
    shared_export(loaded.model, plan, inputs, tmp_path / "model.onnx", fixed=(IMAGES,))
    engine = target("ort").build(tmp_path / "model.onnx", tmp_path / "engine.onnx")
    source = str(folder / "images")
    data = open_data(rows_config(source, source, source), loaded)
    logits = engine.run({"pixel_values": data.task.collate(list(data.test))["pixel_values"]})["logits"]
    pipeline = hf.pipeline(
        "image-classification", model=loaded.model, image_processor=loaded.processor, device="cpu", top_k=3
    )
    for row, example in zip(logits, data.test, strict=True):
        answers = {answer["label"]: answer["score"] for answer in pipeline(example["path"])}
        expected = np.array([answers[name] for name in CLASSES])
        assert np.abs(softmax(row) - expected).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("source", "image_format"),
    [
        ("data", "PNG"),
        ("eval_data", "JPEG"),
        *(
            pytest.param(*case, marks=pytest.mark.zoo)
            for case in (("data", "JPEG"), ("eval_data", "PNG"), ("test_data", "PNG"), ("test_data", "JPEG"))
        ),
    ],
)
def test_an_image_that_ends_early_ends_a_run_before_its_work(
    source: str, image_format: str, folder: Path, tmp_path: Path
) -> None:
    images = write_folder(tmp_path / "images", 24)
    truncate(images / "dark" / "001.png", image_format)
    rows = dict.fromkeys(("data", "eval_data", "test_data"), str(folder / "images")) | {source: str(images)}
    listener = RecordingListener()
    recipe = Recipe(model=folder / "model", **rows, macs=0.92, prune_rows=16, batch=(1,), out=tmp_path / "out")
    with fails_with(ErrorCode.INVALID_ROWS, path=str(images / "dark" / "001.png"), row=9) as caught:
        compressor.compress(recipe, listener)
    assert caught.value.exit_code == 3
    assert not any("export" in stage for stage in listener.stages)
    assert not (tmp_path / "out").exists()


def test_lengths_and_block_masks_are_refused(folder: Path, tmp_path: Path) -> None:
    rows = {"model": folder / "model", "data": str(folder / "images"), "out": tmp_path / "out"}
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="seq"):
        compressor.compress(Recipe(**rows, macs=0.7, seq=(16,)))
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, UsageError, field="drop_blocks"):
        compressor.compress(Recipe(**rows, drop_blocks=0.5))


@pytest.mark.zoo
def test_windows_of_images_meet_a_budget(folder: Path, tmp_path: Path) -> None:
    """Swin attends within windows, which are rows of their own in its layers."""
    sizes: dict[str, Any] = {
        "embed_dim": 8,
        "depths": [2],
        "num_heads": [2],
        "window_size": 4,
        "initializer_range": 0.3,
    }
    sizes |= {"image_size": 16, "patch_size": 2, "num_labels": len(CLASSES)}
    model = hf.SwinForImageClassification(hf.SwinConfig(**sizes))
    save_classifier(tmp_path / "model", model, size={"height": 16, "width": 16})
    recipe = Recipe(
        model=tmp_path / "model",
        data=str(folder / "images"),
        macs=0.8,
        prune_rows=16,
        batch=(1,),
        seconds=0.01,
        out=tmp_path / "out",
    )
    report = compressor.compress(recipe)
    assert all(proof.holds for proof in report.proofs)
    assert report.compressed.macs is not None
    assert report.dense.macs is not None
    assert report.compressed.macs < report.dense.macs
