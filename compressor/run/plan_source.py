"""Plans that a run reads: that of a file, that of an earlier run, one that keeps every unit, or one in a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
from transformers import PreTrainedModel

from compressor.config.run import Recipe
from compressor.config.step_list import extended_plan
from compressor.config.steps import Step, Units
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.results import Note, NoteCode
from compressor.run.fitted_weights import require_fitted_weights, require_groups
from compressor.run.load import load_folder, load_named_folder
from compressor.run.run_context import LoadedModel, SelectedPlan
from compressor.store import Json
from compressor.units import PrunableGroup, check_plan, keep_all
from compressor.workdir import read_json
from graph_passes import Plan

_FIELDS = Json[SelectedPlan](SelectedPlan)


@dataclass(frozen=True)
class PlanFiles:
    """A plan and the weights that it belongs to, as files of a store.

    Attributes:
        model: has the weights when a plan is written, and gets them when it is read.
    """

    model: PreTrainedModel
    _PLAN, _WEIGHTS = "plan.json", "model.safetensors"

    def save(self, selected: SelectedPlan, folder: Path) -> None:
        """Write a plan, and the weights of the model if they were trained with it."""
        if selected.trained:
            safetensors.torch.save_model(self.model, str(folder / self._WEIGHTS))
        selected.plan.save(folder / self._PLAN)  # with its masks
        _FIELDS.save(selected, folder)

    def load(self, folder: Path) -> SelectedPlan:
        """Read a plan, and give the model its weights."""
        selected = replace(_FIELDS.load(folder), plan=Plan.load(folder / self._PLAN))
        if selected.trained:
            safetensors.torch.load_model(self.model, str(folder / self._WEIGHTS))
        return selected


def load_plan(steps: Sequence[Step], recipe: Recipe, model: LoadedModel) -> SelectedPlan | None:
    """The plan that the first step follows; None: it follows none.

    Args:
        steps: the steps of the run.
        recipe: the settings of the run.
        model: the model.

    Raises:
        InputError: the plan belongs to another model, or to weights that do not lie beside it.
        PlanError: the plan cannot be read.
    """
    folder, file = model.folder, steps[0].follows if steps else None
    if file is None:
        return None
    plan, weights = Plan.load(file), None
    require_groups(plan, file, folder)
    if plan.model not in (None, folder.fingerprint):
        distills = any(step.distill is not None and step.distill.teacher is None for step in steps)
        weights = require_fitted_weights(recipe, plan, file, folder, distills=distills)
    check_plan(plan, model.sites, source=str(file))
    followed = _signed(plan, folder) if weights is None else plan
    notes = () if any(step.blocks for step in steps) else (_followed(file, steps, folder, weights),)
    return SelectedPlan(followed, trained=weights is not None, notes=notes, weights=weights)


def on_first_model(recipe: Recipe) -> tuple[Recipe, tuple[Note, ...]]:
    """The recipe on the model that the run of a plan began with, if it removes more units than that; and a note.

    Without that model, the result is compared with what the plan keeps of the model folder.
    """
    stored = extended_plan(recipe)
    if stored is None:
        return recipe, ()
    report = read_json(stored.with_name("report.json")) or {}
    first = Path(report.get("recipe", {}).get("model") or stored.parent)
    reason = "no other model is named there"
    if recipe.source.trust_remote_code or recipe.source.allow_pickle:
        reason = f"code is trusted in {stored.parent}, and not in a folder that it names"
    elif first.resolve() != stored.parent.resolve():
        try:
            plan, folder = Plan.load(stored), load_folder(recipe, first)
            if plan.model != folder.fingerprint:
                require_fitted_weights(recipe, plan, stored, folder, distills=False)
        except InputError as error:
            reason = str(error)
        else:
            text = f"{stored.parent} goes on from {first}: the result is compared with that model"
            plan_field = {} if recipe.steps is not None else {"plan": stored}
            return recipe.updated(model=first, **plan_field), (Note(code=NoteCode.DENSE_CHOSEN, text=text),)
    text = f"the result is compared with {stored.parent}, not with a model that it was made from: {reason}"
    return recipe, (Note(code=NoteCode.DENSE_CHOSEN, text=text),)


def compared_plan(recipe: Recipe, model: LoadedModel, followed: SelectedPlan | None) -> Plan | None:
    """The plan of the model that results are compared with; None: it has every unit."""
    if followed is None or extended_plan(recipe) is None:
        return None
    return keep_all(model.groups).replace_groups(followed.plan.groups)


def whole_plan(model: LoadedModel) -> SelectedPlan:
    """The plan with which a run begins: it keeps every unit."""
    return SelectedPlan(_signed(keep_all(model.sites), model.folder))


def load_weights(recipe: Recipe, model: LoadedModel, followed: SelectedPlan) -> SelectedPlan:
    """A plan that is followed, whose weights the model has afterwards."""
    if followed.weights is not None:
        model.folder.model.load_state_dict(load_folder(recipe, followed.weights).model.state_dict())
    return replace(followed, weights=None)


def load_start(step: Units, recipe: Recipe, model: LoadedModel) -> Plan:
    """The plan of an earlier run's output folder (`--start-from`); the model gets the weights of the folder.

    Args:
        step: names the folder.
        recipe: says how it may be loaded.
        model: the model that the run compressed.

    Raises:
        InputError: the folder cannot be read, or holds another model or no plan.
        PlanError: the plan cannot be read.
    """
    path = step.start_from
    assert path is not None
    plan, weights = check_start(path, model), load_named_folder(recipe, "start_from", path).model.state_dict()
    network = model.folder.model
    shapes, needed = ({name: tensor.shape for name, tensor in part.items()} for part in (weights, network.state_dict()))
    if shapes != needed:
        raise _other_model_error(path, model)
    network.load_state_dict(weights)
    return plan


def check_bundles(step: Units, plan: Plan, groups: Sequence[PrunableGroup], source: str) -> None:
    """Raise InputError if an earlier plan keeps parts of what groups keep or drop together.

    Args:
        step: says how heads are grouped.
        plan: the earlier plan.
        groups: the groups of which more units are to be removed.
        source: where the plan is from.
    """
    kept = {part.name: part.kept for part in plan.groups}
    divided = next((group for group in groups if group.name in kept and not group.can_keep(kept[group.name])), None)
    if divided is not None:
        raise InputError(
            f"{source}: the heads that it keeps of {divided.name} cannot be kept or dropped as --group-by"
            f" {step.group_by} does; use the --group-by of that run, or --prune-units neurons",
            code=ErrorCode.FILE_MISMATCH,
            field="group_by",
            path=step.start_from,
        )


def check_start(path: Path, model: LoadedModel) -> Plan:
    """The plan in an earlier run's output folder (`--start-from`).

    Args:
        path: the folder.
        model: the model that the run compressed.

    Raises:
        InputError: the folder has no plan, or that of another model.
        PlanError: the plan cannot be read.
    """
    file = path / "plan.json"
    if not file.is_file():
        raise InputError(
            f"{path}: there is no plan.json; name the output folder of a run under a budget (--start-from)",
            code=ErrorCode.FILE_MISSING,
            field="start_from",
            path=path,
        )
    plan = Plan.load(file)
    units, planned = ({group.name: group.units for group in part} for part in (model.groups, plan.groups))
    if planned != units:
        raise _other_model_error(path, model)
    return plan


def _other_model_error(path: Path, model: LoadedModel) -> InputError:
    return InputError(
        f"{path}: it is not the output of a run under a budget on {model.folder.path}; name the output folder of such a"
        " run (--start-from)",
        code=ErrorCode.FILE_MISMATCH,
        field="start_from",
        path=path,
    )


def _followed(file: Path, steps: Sequence[Step], model: ModelFolder, weights: Path | None) -> Note:
    preposition = "in" if model.file is None else "beside"
    location = f", which lies {preposition} the {model.kind}" if file == model.path / "plan.json" else ""
    source = "" if weights is None else f", and the weights are those of {weights}"
    learned = "nothing was learned" if len(steps) == 1 else "no unit was selected"
    if any(isinstance(step, Units) for step in steps):
        learned = "units are removed from what it keeps"
    return Note(code=NoteCode.PLAN_FOLLOWED, text=f"the plan is {file}{location}{source}: {learned}")


def _signed(plan: Plan, folder: ModelFolder) -> Plan:
    return plan.model_copy(update={"model": folder.fingerprint})
