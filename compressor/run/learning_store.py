"""The folder of what a run learns, from which an interrupted run resumes."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import safetensors.torch
from accelerate import PartialState
from transformers import PreTrainedModel

from compressor.config.run import Recipe
from compressor.errors import ErrorCode, UsageError
from compressor.results import BudgetRow, CertifiedLoss, CostShare, CurvePoint, Note, NoteCode, Row
from compressor.run.products import LoadedModel, SelectedPlan
from compressor.tasks import Data
from compressor.workdir import CHOSEN_ENGINE, DELIVERED_ENGINE, MAPS, TIMES, TRIALS
from graph_passes import Plan
from graph_passes.files import write_text

_CHECKPOINTS = {
    "checkpoints": "learning",
    "blocks/entmax": "learning with entmax",
    "blocks/checkpoints": "learning with masks",
    "distillation": "distillation",
}
"""Folder of the checkpoints of each stage, in order."""
Stage = Literal["heads", "pruned"]
"""What is learned first: the heads that another method selects, and the units that a budget removes."""
_FINISHED, _KEY, _PLAN, _WEIGHTS, _PRUNING = "done.json", "key", "plan.json", "model.safetensors", "pruning"


class _FinishedPlan(Row):
    """The fields of a `SelectedPlan` that are stored beside its plan and its weights."""

    trained: bool
    curves: tuple[CurvePoint, ...]
    notes: tuple[Note, ...]
    budget: tuple[BudgetRow, ...] = ()
    costs: tuple[CostShare, ...] = ()
    certificate: CertifiedLoss | None = None
    engine: str = ""


@dataclass(frozen=True)
class LearningStore:
    """The folder of what a run learns.

    Attributes:
        path: the folder.
        notes: what is used of an interrupted run, or that its work was discarded.
        keys: what each stage depends on, by which it outlives a change of later ones; empty in worker processes.
    """

    path: Path
    notes: tuple[Note, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the selection of heads."""
        return self.path / "checkpoints"

    @property
    def pruning(self) -> Path:
        """Statistics and losses of pruning under a budget, in a folder for each version of them."""
        return self.path / _PRUNING

    def stage(self, name: Stage) -> LearningStore:
        """The store of a stage that others follow; the last stage of a run has this store itself."""
        store = LearningStore(self.path / name, keys=self.keys)
        store.path.mkdir(exist_ok=True)
        if name in self.keys:
            (store.path / _KEY).write_text(self.keys[name])
        return store

    @property
    def distillation(self) -> Path:
        """Checkpoints of the distillation."""
        return self.path / "distillation"

    @property
    def teacher_outputs(self) -> Path:
        """Outputs of the teacher on the training rows."""
        return self.path / "teacher"

    @property
    def blocks(self) -> Path:
        """Attention maps, masks, and checkpoints of learning with them."""
        return self.path / "blocks"

    def load_finished_plan(self, model: PreTrainedModel) -> SelectedPlan | None:
        """The plan that an interrupted run finished learning, or None. The model gets the weights of the plan."""
        file = self.path / _FINISHED
        if not file.is_file():
            return None
        finished = _FinishedPlan.model_validate_json(file.read_bytes())
        if finished.trained:
            safetensors.torch.load_model(model, str(self.path / _WEIGHTS))
        return SelectedPlan(plan=Plan.load(self.path / _PLAN), **dict(finished))

    @property
    def times(self) -> Path:
        """File of the times by which a plan is chosen."""
        return self.path / TIMES

    @property
    def trials(self) -> Path:
        """File of the scores of the plans that a bisection tries."""
        return self.path / TRIALS

    @property
    def engines(self) -> list[str]:
        """Labels of the engine that units are pruned for and of its runner-up, if any; empty before it is chosen."""
        file = self.path / CHOSEN_ENGINE
        return file.read_text().splitlines() if file.is_file() else []

    def keep_engines(self, labels: Sequence[str]) -> None:
        """Store the labels of the engine that units are pruned for and of its runner-up, so that a resumed run has the
        same."""
        (self.path / CHOSEN_ENGINE).write_text("\n".join(labels))

    @property
    def delivered(self) -> str:
        """Label of the engine that is delivered; empty before it is chosen."""
        file = self.path / DELIVERED_ENGINE
        return file.read_text() if file.is_file() else ""

    def keep_delivered(self, label: str) -> None:
        """Store the label of the engine that is delivered, for which weights are trained."""
        (self.path / DELIVERED_ENGINE).write_text(label)

    def finish(self, selected: SelectedPlan, model: PreTrainedModel) -> None:
        """Store a plan and its weights, so that a run that is interrupted later does not learn again."""
        if selected.trained:
            safetensors.torch.save_model(model, str(self.path / _WEIGHTS))
        selected.plan.save(self.path / _PLAN)
        finished = _FinishedPlan(**{name: getattr(selected, name) for name in _FinishedPlan.model_fields})
        write_text(self.path / _FINISHED, finished.model_dump_json())
        for part in (*_CHECKPOINTS, _PRUNING, "teacher"):
            shutil.rmtree(self.path / part, ignore_errors=True)
        for file in (self.times, self.trials):
            file.unlink(missing_ok=True)


def open_learning_store(
    recipe: Recipe, model: LoadedModel, data: Data, path: Path, state: PartialState
) -> LearningStore:
    """Open the store of a run. The work of the same run is kept; that of another recipe, model or rows is discarded.

    Every process of a distributed run calls this; only the main process writes.

    Args:
        recipe: the recipe, whose fields that decide what is learned are part of the store's key.
        model: the model, whose fingerprint is part of the key, as are its pooling and the source of its own task.
        data: the rows, whose hashes are part of the key.
        path: folder of the store.
        state: the processes of the run.

    Raises:
        UsageError: the store holds the work of another run, and the recipe does not allow to discard it (`force`).
    """
    notes: tuple[Note, ...] = ()
    keys: dict[str, str] = {}
    if state.is_main_process:
        hashes = {"train": data.train_hash or "", "eval": data.eval_hash or ""}
        hashes |= {"model": model.folder.fingerprint, **model.folder.surroundings}
        key = recipe.learning_key(None, **hashes)
        uses = {"heads": recipe.prunes, "pruned": recipe.distills}
        keys = {stage: recipe.learning_key(stage, **hashes) for stage in get_args(Stage) if uses[stage]}
        claimed = _claim(path, key, keys, force=recipe.output.force)
        notes = (*claimed, *_resumed(path, own_maps=recipe.blocks.maps is None))
    state.wait_for_everyone()
    return LearningStore(path, notes, keys)


def _claim(store: Path, key: str, keys: Mapping[str, str], *, force: bool) -> Iterator[Note]:
    """Empty the store unless it has this key, except for stages that have theirs."""
    stamp = store / _KEY
    if stamp.is_file() and stamp.read_text() == key:
        return
    if store.exists():
        if not force and (progress := _lost_progress(store, keys)):
            raise UsageError(
                f"{store}: an interrupted run with another recipe, model, task or rows learned here ({progress}); run"
                " it to its end, write to another folder (-o), or discard what depends on the change (--force)",
                code=ErrorCode.RUN_DIFFERS,
                path=store,
            )
        yield Note(
            code=NoteCode.STARTED_AFRESH,
            text="the recipe, the model, the task or the rows differ from those of the interrupted run: what depends on"
            " them is learned again",
        )
        _discard(store, keys)
    store.mkdir(exist_ok=True)
    stamp.write_text(key)


def _discard(store: Path, keys: Mapping[str, str]) -> None:
    """Remove everything from a store but the stages that have their key, and what is keyed by all it depends on."""
    for path in list(store.iterdir()):
        if not path.is_dir() or path.is_symlink():
            path.unlink()
        elif path.name == _PRUNING:
            continue
        elif path.name not in keys:
            shutil.rmtree(path)
        elif not _has_its_key(path, keys):
            _discard(path, keys)
            if not any(path.iterdir()):
                path.rmdir()


def _resumed(store: Path, *, own_maps: bool) -> Iterator[Note]:
    """Notes on the work of an interrupted run that is used."""
    if (store / _FINISHED).is_file():
        yield Note(code=NoteCode.RESUMED, text=f"the plan was learned by an interrupted run and is taken from {store}")
        return
    for stage in get_args(Stage):
        if (store / stage).is_dir():
            yield from _resumed(store / stage, own_maps=own_maps)
    for part, stage in _CHECKPOINTS.items():
        if step := _last_step(store / part):
            yield Note(code=NoteCode.RESUMED, text=f"{stage} resumes from {step} of an interrupted run")
    if own_maps and (store / MAPS).is_file():
        yield Note(code=NoteCode.RESUMED, text="masks are derived from the attention maps of an interrupted run")
    if any((store / _PRUNING).glob("*/checkpoint-*")):
        yield Note(code=NoteCode.RESUMED, text="pruning resumes with the statistics of an interrupted run")
    if any((store / "checkpoints").glob("checkpoint-*.npz")):
        yield Note(code=NoteCode.RESUMED, text="the search resumes with the evaluations of an interrupted run")


def _last_step(checkpoints: Path) -> str | None:
    """The step of an interrupted run's last complete checkpoint, e.g. `step 40 of 120`; None without one."""
    states = []
    for path in checkpoints.glob("checkpoint-*/trainer_state.json"):
        with contextlib.suppress(OSError, ValueError):  # an incomplete checkpoint, which learning ignores too
            states.append(json.loads(path.read_text()))
    last = max(states, key=lambda state: int(state["global_step"]), default=None)
    return last and f"step {last['global_step']} of {last['max_steps']}"


def _has_its_key(stage: Path, keys: Mapping[str, str]) -> bool:
    """Whether the folder of a stage has the stage's key, so that its work is used."""
    return (stage / _KEY).is_file() and (stage / _KEY).read_text() == keys.get(stage.name)


def _lost_progress(store: Path, keys: Mapping[str, str]) -> str | None:
    """The progress of an interrupted run in words, without stages that have their key; None: none would be lost."""
    if (store / _FINISHED).is_file():
        return "learning had finished"
    for stage in (store / name for name in get_args(Stage)):
        if stage.is_dir() and not _has_its_key(stage, keys) and (progress := _lost_progress(stage, keys)):
            return progress
    for part in reversed(_CHECKPOINTS):
        if step := _last_step(store / part):
            return step
    if (store / MAPS).is_file():
        return "attention maps"
    return "a search" if any((store / "checkpoints").glob("checkpoint-*.npz")) else None
