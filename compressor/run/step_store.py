"""The folders in which the steps of a run keep their work, from which an interrupted run resumes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from accelerate import PartialState
from transformers import PreTrainedModel

from compressor.config.fields import fields_with
from compressor.config.run import Recipe
from compressor.config.sections import RowsConfig, SourceConfig
from compressor.config.steps import Blocks, Distill, Step, Units
from compressor.errors import ErrorCode, UsageError
from compressor.results import BudgetRow, CertifiedLoss, CostShare, CurvePoint, Note, NoteCode, Row
from compressor.run.run_context import LoadedModel, SelectedPlan
from compressor.tasks import Data
from compressor.workdir import ATTEMPTS, CHOSEN_ENGINE, DELIVERED_ENGINE, MAPS, TIMES, TRIALS
from graph_passes import Plan
from graph_passes.files import write_text

_CHECKPOINTS = {
    "checkpoints": "learning",
    "blocks/entmax": "learning with entmax",
    "blocks/checkpoints": "learning with masks",
    "distillation": "distillation",
}
"""Folder of checkpoints inside that of a step, and what resumes from them."""
_FINISHED, _KEY, _PLAN, _WEIGHTS, _PRUNING = "done.json", "key", "plan.json", "model.safetensors", "pruning"
_DECIDES = "decides_plan"
_FORM = 4
"""Form of plans and checkpoints that an interrupted run leaves; those of another form are learned again."""
_OF_ENGINES = ("target", "provider", "precision", "threads", "batch", "seq", "shapes")
_OF_GRAPHS = ("keep_unread_positions", "pool_in_graph", "opset", "attention")
_OF_BLOCKS = ("provider", "precision", "threads", "batch", "seq")
"""Settings of the run that decide the times of engines, their graphs, and whether a mask pays."""


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
class StepStore:
    """The folder of one step.

    Attributes:
        path: the folder.
        key: hash of everything that the result of the step depends on, earlier steps included.
    """

    path: Path
    key: str = ""

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the selection of heads or units."""
        return self.path / "checkpoints"

    @property
    def pruning(self) -> Path:
        """Statistics and losses of pruning under a budget, in a folder for each version of them."""
        return self.path / _PRUNING

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

    @property
    def is_finished(self) -> bool:
        """Whether the plan and its weights are stored."""
        return (self.path / _FINISHED).is_file()

    def load_finished_plan(self, model: PreTrainedModel) -> SelectedPlan | None:
        """The plan that an interrupted run finished learning, or None. The model gets the weights of the plan."""
        if not self.is_finished:
            return None
        finished = _FinishedPlan.model_validate_json((self.path / _FINISHED).read_bytes())
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


def open_stores(
    steps: Sequence[Step], recipe: Recipe, model: LoadedModel, data: Data, path: Path, state: PartialState
) -> tuple[tuple[StepStore, ...], tuple[Note, ...]]:
    """Open the stores of the steps of a run. Work is kept where everything that it depends on is the same.

    Every process of a distributed run calls this; only the main process writes.

    Args:
        steps: the steps, in order.
        recipe: the settings of the run, some of which are part of the keys.
        model: the model, whose fingerprint is part of the keys, as are its pooling and the source of its own task.
        data: the rows, whose hashes are part of the keys.
        path: the folder of the stores.
        state: the processes of the run.

    Returns:
        One store for each step; and what is used of an interrupted run, or that its work was discarded.

    Raises:
        UsageError: work of another run would be lost, and the recipe does not allow to discard it (`force`).
    """
    notes: list[Note] = []
    hashes = {"train": data.train_hash or "", "eval": data.eval_hash or "", "model": model.folder.fingerprint}
    keys = step_keys(steps, recipe, {**hashes, **model.folder.surroundings})
    stores = [StepStore(path / name, key) for name, key in keys.items()]
    if state.is_main_process:
        notes = [*_discard_others(path, stores, force=recipe.output.force), *_resumed(stores, steps)]
        for store in stores:
            store.path.mkdir(parents=True, exist_ok=True)
            (store.path / _KEY).write_text(store.key)
    state.wait_for_everyone()
    return tuple(stores), tuple(notes)


def step_keys(steps: Sequence[Step], recipe: Recipe, hashes: Mapping[str, Any]) -> dict[str, str]:
    """Name of the folder of each step -> its key, which covers the steps before it.

    Args:
        steps: the steps, in order.
        recipe: the settings of the run.
        hashes: of the model, with what surrounds it, and of the rows.
    """
    names = {*fields_with(SourceConfig.model_fields, _DECIDES), *fields_with(RowsConfig.model_fields, _DECIDES)}
    names.add("match_dense")
    content: dict[str, Any] = {
        "form": _FORM,
        **{name: value for name, value in recipe.flat().items() if name in names},
        **hashes,
    }
    keys: dict[str, str] = {}
    for step in steps:
        read = {name for part in step.parts for name in _settings_read(part)}
        settings = {name: value for name, value in recipe.flat().items() if name in read}
        files = {name: _content_hash(path) for name, path in step.contents.items()}
        uses_kernel = any(isinstance(part, Blocks | Units) for part in step.parts)
        kernel = _content_hash(recipe.engine.kernel) if uses_kernel else ""
        content = {"before": content, "step": step.name, **step.settings, **settings, "files": files, "kernel": kernel}
        content = {"key": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}
        count = sum(earlier.name == step.name for earlier in steps[: len(keys)])
        keys[f"{step.name}-{count + 1}" if count else step.name] = content["key"]
    return keys


def _settings_read(step: Step) -> tuple[str, ...]:
    """Settings of the run by which a step measures what its result costs."""
    if isinstance(step, Units) and not step.learns:
        return (*_OF_ENGINES, *_OF_GRAPHS, "calibration_rows", "allow_float_products")
    if isinstance(step, Units):
        return (*_OF_GRAPHS, "batch", "seq")
    if isinstance(step, Distill) and step.quantized_share:
        return ("target", "precision")
    return _OF_BLOCKS if isinstance(step, Blocks) else ()


def _content_hash(path: Path | None) -> str:
    """Hash of the content of a file, or of the files of a folder without its subfolders; empty where there is none."""
    if path is None or not path.exists():
        return ""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    hashes = "".join(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()} " for file in files)
    return hashlib.sha256(hashes.encode()).hexdigest()


def _discard_others(path: Path, stores: Sequence[StepStore], *, force: bool) -> Iterator[Note]:
    """Remove the folders of steps whose key has changed, and of steps that the run does not have."""
    kept = {store.path for store in stores if _has_key(store.path, store.key)}
    changed = [folder for folder in path.iterdir() if folder not in kept] if path.is_dir() else []
    if not changed:
        return
    lost = next(filter(None, map(_progress, changed)), None)
    if lost and not force:
        raise UsageError(
            f"{path}: an interrupted run with another recipe, model, task or rows learned here ({lost}); run it to its"
            " end, write to another folder (-o), or discard what depends on the change (--force)",
            code=ErrorCode.RUN_DIFFERS,
            path=path,
        )
    for folder in changed:
        _discard(folder)
    yield Note(
        code=NoteCode.STARTED_AFRESH,
        text="the recipe, the model, the task or the rows differ from those of the interrupted run: what depends on"
        " them is learned again",
    )


def _discard(folder: Path) -> None:
    """Remove the folder of a step, but for statistics, which are keyed by all that they depend on."""
    if not folder.is_dir() or folder.is_symlink():
        folder.unlink()
        return
    for path in list(folder.iterdir()):
        if path.name != _PRUNING:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _has_key(folder: Path, key: str) -> bool:
    return (folder / _KEY).is_file() and (folder / _KEY).read_text() == key


def _resumed(stores: Sequence[StepStore], steps: Sequence[Step]) -> Iterator[Note]:
    """Notes on the work of an interrupted run that is used."""
    for store, step in zip(stores, steps, strict=True):
        if store.is_finished:
            text = f"the plan was learned by an interrupted run and is taken from {store.path}"
            yield Note(code=NoteCode.RESUMED, text=text)
            continue
        for part, stage in _CHECKPOINTS.items():
            if training_step := _last_step(store.path / part):
                text = f"{stage} resumes from {training_step} of an interrupted run"
                yield Note(code=NoteCode.RESUMED, text=text)
        if isinstance(step, Blocks) and step.maps is None and (store.path / MAPS).is_file():
            yield Note(code=NoteCode.RESUMED, text="masks are derived from the attention maps of an interrupted run")
        if (attempts := store.path / ATTEMPTS).is_file():
            count = len(json.loads(attempts.read_text()))
            text = f"{step.name} goes on with the {count} attempts of an interrupted run"
            yield Note(code=NoteCode.RESUMED, text=text)
        if any(store.pruning.glob("*/checkpoint-*")):
            yield Note(code=NoteCode.RESUMED, text="pruning resumes with the statistics of an interrupted run")
        if any(store.checkpoints.glob("checkpoint-*.npz")):
            yield Note(code=NoteCode.RESUMED, text="the search resumes with the evaluations of an interrupted run")


def _last_step(checkpoints: Path) -> str | None:
    """The step of an interrupted run's last complete checkpoint, e.g. `step 40 of 120`; None without one."""
    states = []
    for path in checkpoints.glob("checkpoint-*/trainer_state.json"):
        with contextlib.suppress(OSError, ValueError):  # an incomplete checkpoint, which learning ignores too
            states.append(json.loads(path.read_text()))
    last = max(states, key=lambda state: int(state["global_step"]), default=None)
    return last and f"step {last['global_step']} of {last['max_steps']}"


def _progress(folder: Path) -> str | None:
    """The work in the folder of a step, in words; None: none would be lost without it."""
    if (folder / _FINISHED).is_file():
        return "learning had finished"
    for part in reversed(_CHECKPOINTS):
        if step := _last_step(folder / part):
            return step
    if (folder / ATTEMPTS).is_file():
        return "attempts"
    if (folder / MAPS).is_file():
        return "attention maps"
    return "a search" if any((folder / "checkpoints").glob("checkpoint-*.npz")) else None
