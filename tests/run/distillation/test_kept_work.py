"""What a distillation keeps: outputs of the teacher, work of an interrupted run, and what its notes say about it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import compressor
from compressor.config.run import Recipe
from compressor.engines.export import rehearsal_plan
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import example_inputs, load
from compressor.progress import ProgressCallback
from compressor.results import Note, NoteCode
from compressor.run.steps import distill
from compressor.tasks.encoding import LabelledTexts
from compressor.training import teacher_outputs
from compressor.units import find_sites
from tests.faults import fails_with
from tests.run.distillation.distilled_runs import distilled_recipe, have_same_weights, run
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import Learned, learn

STAGE = "training on the outputs"


@pytest.fixture(scope="module")
def plan(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a plan that drops a head; a run with it learns nothing but the distillation."""
    folder = load(inputs / "model")
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    rehearsal_plan(find_sites(folder.model, example_inputs(folder, 2, 8))).save(file)
    return file


def following(inputs: Path, out: Path, plan: Path, **fields: Any) -> Recipe:
    return distilled_recipe(inputs, out, macs=None, plan=plan, **fields)


def note(learned: Learned, code: NoteCode) -> Note:
    (only,) = [note for note in learned.selected.notes if note.code is code]
    return only


class StoppedTraining(RecordingListener):
    """Interrupts the training after a number of steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        def stop(finished: int, total: int) -> None:
            if STAGE in name and finished == self.steps:
                interrupt()

        with super().stage(name):
            yield stop


@pytest.mark.zoo
@pytest.mark.parametrize("shared", [False, True])
def test_an_interruption_in_the_middle_of_the_steps_changes_nothing(
    shared: bool, inputs: Path, tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setattr(LabelledTexts, "vocabulary", None)  # so that rows are read again

    def recipe(name: str) -> Recipe:
        folder = {"teacher_outputs": tmp_path / f"outputs of {name}"} if shared else {}
        return following(inputs, tmp_path / name, plan, **folder)

    with pytest.raises(KeyboardInterrupt):
        compressor.compress(recipe("interrupted"), StoppedTraining(40))
    assert list((tmp_path).rglob("outputs.npz")), "no outputs were kept"
    resumed, whole = learn(recipe("interrupted")), learn(recipe("whole"))
    assert NoteCode.RESUMED in resumed.codes
    assert NoteCode.DISTILLED in resumed.codes
    assert NoteCode.OUTPUTS_NOT_KEPT not in resumed.codes
    assert have_same_weights(resumed.weights, whole.weights)


def test_outputs_of_a_shorter_training_serve_a_longer_one(inputs: Path, tmp_path: Path, plan: Path) -> None:
    folder, kept = tmp_path / "outputs", list[int]()
    for steps in (40, 120):
        learned = learn(following(inputs, tmp_path / str(steps), plan, teacher_outputs=folder, distill_steps=steps))
        assert NoteCode.OUTPUTS_NOT_KEPT not in learned.codes
        (index,) = folder.rglob("outputs.npz")
        kept.append(len(np.load(index)["keys"]))
    alone = learn(following(inputs, tmp_path / "alone", plan, teacher_outputs=tmp_path / "other", distill_steps=120))
    (index,) = (tmp_path / "other").rglob("outputs.npz")
    assert kept[0] < kept[1] == len(np.load(index)["keys"])
    assert have_same_weights(learned.weights, alone.weights)


def test_outputs_that_do_not_fit_on_the_disk_are_noted(
    inputs: Path, tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, actual = tmp_path / "outputs", shutil.disk_usage

    def disk_usage(path: Any) -> Any:
        return SimpleNamespace(free=10) if Path(path) == folder else actual(path)

    folder.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    learned = learn(following(inputs, tmp_path / "out", plan, teacher_outputs=folder, distill_steps=2))
    assert "disk" in note(learned, NoteCode.OUTPUTS_NOT_KEPT).text
    assert not list(folder.rglob("outputs.*"))


@pytest.mark.parametrize(
    ("steps", "shared", "noted"),
    [(2, True, True), (2, False, False), pytest.param(60, False, True, marks=pytest.mark.zoo)],
)
def test_several_processes_keep_no_outputs_and_say_so(
    steps: int,
    shared: bool,
    noted: bool,
    inputs: Path,
    tmp_path: Path,
    plan: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (distill, teacher_outputs):
        monkeypatch.setattr(module, "process_count", lambda: 2)
    monkeypatch.setattr(LabelledTexts, "vocabulary", None)  # so that rows are read again
    folder = {"teacher_outputs": tmp_path / "outputs"} if shared else {}
    learned = learn(following(inputs, tmp_path / "out", plan, distill_steps=steps, **folder))
    codes = {note.code for note in learned.selected.notes}
    assert (NoteCode.OUTPUTS_NOT_KEPT in codes) == noted
    assert not (tmp_path / "outputs").exists()


def test_the_note_names_the_loss(inputs: Path, tmp_path: Path, plan: Path) -> None:
    learned = learn(following(inputs, tmp_path / "out", plan, temperature=3.5, hidden_weight=0.25))
    text = note(learned, NoteCode.DISTILLED).text
    assert "3.5" in text
    assert "0.25" in text


def test_minutes_that_do_not_suffice_leave_the_units_that_were_pruned(
    inputs: Path, tmp_path: Path, pruned: tuple[Recipe, Learned]
) -> None:
    recipe, before = pruned
    shutil.copytree(recipe.output.out.with_name("out.partial"), tmp_path / "out.partial")
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field="minutes"):
        run(inputs, tmp_path / "out", minutes=1e-9)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    listener = RecordingListener(STAGE, interrupt)
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(distilled_recipe(inputs, tmp_path / "out", minutes=9), listener)
    assert NoteCode.RESUMED in listener.codes
    assert not any("refitting" in stage for stage in listener.stages)
    resumed = learn(distilled_recipe(inputs, tmp_path / "out", minutes=9), STAGE, "units")
    assert resumed.selected.plan.groups == before.selected.plan.groups
    assert have_same_weights(resumed.weights, before.weights)
