"""Interrupted runs: the files that they leave, and how the same command resumes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from transformers import BertConfig, BertForSequenceClassification

import compressor
from compressor.config.run import Recipe
from compressor.config.step_list import step_of_flags, steps_of
from compressor.config.steps import Heads
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.progress import ProgressCallback, ignore_progress
from compressor.results import NoteCode
from compressor.run.load import load_model, read_rows
from compressor.run.plan_source import PlanFiles
from compressor.run.run_context import LoadedModel
from compressor.run.step_stores import open_stores
from compressor.run.steps.base import PLAN, signed
from compressor.selection.learn import learn
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.store import FORM, Store
from compressor.tasks import Data
from compressor.workdir import write_json
from tests import folders
from tests.command import enable_ctrl_c
from tests.faults import fails_with
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import learning_recipe

ANOTHER = {"form": FORM, "step": "another"}
"""Key of a step of another recipe."""
RUN = """import sys
from compressor.cli import main
from tests.shared_exports import sharing_exports
with sharing_exports():
    main(sys.argv[1:])
"""
"""The command, which shares exports."""
STATE = '{"global_step": 3, "max_steps": 9}'


@pytest.mark.parametrize("stage", ["loading", "dense: building", "learning"])
def test_an_interrupted_run_leaves_no_files(stage: str, inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(learning_recipe(inputs, tmp_path / "out"), RecordingListener(stage, interrupt))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def model(inputs: Path) -> tuple[LoadedModel, Data]:
    recipe = learning_recipe(inputs, Path("out"))
    steps = steps_of(recipe)
    loaded = load_model(recipe, steps)
    return loaded, read_rows(recipe, steps, loaded)


def open_store(recipe: Recipe, model: tuple[LoadedModel, Data], path: Path) -> tuple[Store, list[NoteCode]]:
    """The store of the only step of a recipe, and the codes of notes."""
    (store,), notes = open_stores(steps_of(recipe), recipe, *model, path, PartialState())
    return store, [note.code for note in notes]


@pytest.mark.parametrize(
    ("file", "content", "progress"),
    [
        ("plan/done.json", "{}", "learning had finished"),
        ("plan.unfinished/checkpoints/checkpoint-3/trainer_state.json", STATE, "step 3 of 9"),
        ("maps.unfinished/checkpoints/checkpoint-3/trainer_state.json", STATE, "step 3 of 9"),
        ("maps/done.json", "{}", "attention maps"),
        ("plan.unfinished/checkpoints/checkpoint-search.npz", "", "a search"),
    ],
)
def test_the_work_of_another_recipe_is_discarded_only_with_force(
    file: str, content: str, progress: str, inputs: Path, model: tuple[LoadedModel, Data], tmp_path: Path
) -> None:
    folder = tmp_path / "learning" / "heads"
    (folder / file).parent.mkdir(parents=True)
    write_json(folder / "key.json", ANOTHER)
    (folder / file).write_text(content)
    recipe = learning_recipe(inputs, tmp_path / "out")
    with pytest.raises(UsageError, match=progress) as caught:
        open_store(recipe, model, folder.parent)
    assert caught.value.code is ErrorCode.RUN_DIFFERS
    assert (folder / file).read_text() == content
    _, codes = open_store(recipe.updated(force=True), model, folder.parent)
    assert codes == [NoteCode.STARTED_AFRESH]
    assert [path.name for path in folder.iterdir()] == ["key.json"]


def test_the_work_of_another_version_is_discarded_only_with_force(
    inputs: Path, model: tuple[LoadedModel, Data], tmp_path: Path
) -> None:
    file = tmp_path / "learning" / "heads" / "file of another form"
    file.parent.mkdir(parents=True)
    file.touch()
    write_json(file.with_name("key.json"), {**ANOTHER, "form": FORM + 1})
    recipe = learning_recipe(inputs, tmp_path / "out")
    with fails_with(ErrorCode.RUN_DIFFERS, UsageError, path=tmp_path / "learning"):
        open_store(recipe, model, tmp_path / "learning")
    assert file.exists()
    open_store(recipe.updated(force=True), model, tmp_path / "learning")
    assert not file.exists()


def test_statistics_outlive_a_change_of_the_recipe(
    inputs: Path, model: tuple[LoadedModel, Data], tmp_path: Path
) -> None:
    learning = tmp_path / "learning"
    kept, times = learning / "statistics" / "0123" / "grams", learning / "units" / "plan.unfinished" / "times"
    for folder in (kept, times):
        folder.mkdir(parents=True)
    write_json(learning / "units" / "key.json", ANOTHER)
    recipe = learning_recipe(inputs, tmp_path / "out", keep=None, training_steps=None, macs="60%")
    _, codes = open_store(recipe, model, learning)
    assert codes == [NoteCode.STARTED_AFRESH, NoteCode.RESUMED]
    assert kept.exists()
    assert not times.exists()


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"distill_learning_rate": 1e-5}, {"heads", "units"}),
        ({"distill_steps": 7}, {"heads", "units"}),
        ({"distill": False}, {"heads", "units"}),
        ({"macs": "40%"}, {"heads"}),
        ({"calibration_rows": 9}, {"heads"}),
        ({"training_steps": 5}, set()),
        ({"seed": 5}, set()),
    ],
)
def test_steps_that_do_not_depend_on_a_change_are_kept(
    changed: dict[str, Any], kept: set[str], inputs: Path, model: tuple[LoadedModel, Data], tmp_path: Path
) -> None:
    fields = {"macs": "60%", "distill": True, "distill_steps": 9, "force": True}

    def opened(**fields: Any) -> tuple[Store, ...]:
        if not fields["distill"]:
            fields.pop("distill_steps")
        recipe = learning_recipe(inputs, tmp_path / "out", **fields)
        return open_stores(steps_of(recipe), recipe, *model, tmp_path / "learning", PartialState())[0]

    stores = opened(**fields)
    assert [store.path.name for store in stores] == ["heads", "units", "distill"]
    for store in stores:
        store.unfinished(PLAN).mkdir()
    opened(**{**fields, **changed})
    assert {store.path.name for store in stores if store.unfinished(PLAN).is_dir()} == kept


def test_progress_is_read_from_the_last_complete_checkpoint(
    inputs: Path, model: tuple[LoadedModel, Data], tmp_path: Path
) -> None:
    recipe, path = learning_recipe(inputs, tmp_path / "out"), tmp_path / "learning"
    store, codes = open_store(recipe, model, path)
    assert codes == []
    for step, state in (
        (9, '{"global_step": 9, "max_steps": 40}'),
        (10, '{"global_step": 10, "max_steps": 40}'),
        (20, "{"),
    ):
        folder = store.unfinished(PLAN) / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(state)
    _, (note,) = open_stores(steps_of(recipe), recipe, *model, path, PartialState())
    assert note.code is NoteCode.RESUMED
    assert "step 10 of 40" in note.text


def test_a_run_refuses_the_work_of_another_recipe(inputs: Path, tmp_path: Path) -> None:
    store = tmp_path / "out.partial" / "learning" / "heads"
    (store / "plan").mkdir(parents=True)
    (tmp_path / "out.partial" / ".compress").touch()
    write_json(store / "key.json", ANOTHER)
    (store / "plan" / "done.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        compressor.compress(learning_recipe(inputs, tmp_path / "out"))
    assert caught.value.code is ErrorCode.RUN_DIFFERS
    assert (store / "plan" / "done.json").is_file()


def test_a_store_without_progress_is_replaced(inputs: Path, model: tuple[LoadedModel, Data], tmp_path: Path) -> None:
    folder = tmp_path / "learning" / "heads"
    folder.mkdir(parents=True)
    write_json(folder / "key.json", ANOTHER)
    _, codes = open_store(learning_recipe(inputs, tmp_path / "out"), model, folder.parent)
    assert codes == [NoteCode.STARTED_AFRESH]


@pytest.mark.parametrize("stage", ["exporting", "measuring memory"])
def test_a_full_disk_leaves_no_files(stage: str, inputs: Path, tmp_path: Path) -> None:
    def fill_the_disk() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.onnx.data")

    recipe = Recipe(model=inputs / "model", out=tmp_path / "out", batch=(1,), seconds=0.01, threads=1)
    with pytest.raises(InputError) as caught:
        compressor.compress(recipe, RecordingListener(stage, fill_the_disk))
    assert caught.value.code is ErrorCode.DISK_FULL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.zoo
@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([(signal.SIGINT, 130)], id="ctrl-c"),
        pytest.param([(signal.SIGINT, 130), (signal.SIGKILL, -9)], id="ctrl-c, kill"),
    ],
)
def test_ctrl_c_and_kill_leave_no_output(
    signals: list[tuple[signal.Signals, int]], inputs: Path, tmp_path: Path
) -> None:
    """A separate process is interrupted while learning; resumed, then killed."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    flags = [
        "--keep",
        "1",
        "--training-steps",
        "400",
        "--batch-size",
        "8",
        "--max-length",
        "8",
        "--batch",
        "1",
        "--seq",
        "8",
    ]
    arguments = [inputs / "model", "--data", inputs / "rows.tsv", *flags, "--seconds", "0.01", "-o", out, "--quiet"]
    for signal_number, code in signals:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *map(str, arguments)],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=enable_ctrl_c,
        )
        wait_until(lambda: any(partial.glob("learning/heads/*/checkpoints/checkpoint-*/trainer_state.json")))
        process.send_signal(signal_number)
        _, error = process.communicate(timeout=600)
        assert process.returncode == code, error
        assert not out.exists()
        if code == 130:
            assert str(partial) in error
            assert len(error.splitlines()) == 1
    shutil.rmtree(partial)


def search(recipe: Recipe, store: Path, on_progress: ProgressCallback = ignore_progress) -> SelectedPlan:
    """Run only the step that learns."""
    steps = steps_of(recipe)
    loaded = load_model(recipe, steps)
    data, folder = read_rows(recipe, steps, loaded), loaded.folder
    opened, _ = open_store(recipe, (loaded, data), store)

    def select(work: Path) -> SelectedPlan:
        return signed(learn(folder.model, loaded.sites, data, step_of_flags(recipe, Heads), work, on_progress), folder)

    return opened.memo(PLAN, {}, select, PlanFiles(folder.access))


def test_an_interrupted_search_resumes_with_its_evaluations(inputs: Path, tmp_path: Path) -> None:
    """The same command measures no subset twice, and arrives at the same plan."""
    torch.manual_seed(0)
    config = BertConfig(**{**folders.SIZES, "num_hidden_layers": 2})
    folders.save(BertForSequenceClassification(config), tmp_path / "model")
    recipe = learning_recipe(inputs, tmp_path / "out", model=tmp_path / "model", method="astar", training_steps=None)
    expected = search(recipe, tmp_path / "whole")

    def stop(finished: int, total: int) -> None:
        if finished:
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        search(recipe, tmp_path / "store", stop)
    assert not Store(tmp_path / "store" / "heads").has(PLAN)
    resumed = search(recipe, tmp_path / "store")
    assert resumed.plan == expected.plan
    once, again = (selected.curves[-1].values for selected in (expected, resumed))
    assert again["eval_accuracy"] == once["eval_accuracy"]
    # The forwards before the interruption count, as do those that are repeated in order to resume.
    assert again["forwards"] >= once["forwards"] > 0


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("the condition never held")
