"""Plans that a run reads: that of a file, that of an earlier run, one that keeps every unit, or one in a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compressor.config.methods import METHODS
from compressor.config.run import Recipe
from compressor.config.step_list import extended_plan
from compressor.config.steps import Blocks, Distill, Follow, Step, Units, part_of, parts_of
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.model_folder.access import ModelAccess
from compressor.model_folder.fingerprints import record_weights, weight_fingerprints
from compressor.results import Note, NoteCode
from compressor.run.load import load_folder, load_named_folder
from compressor.run.run_context import LoadedModel
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.store import Json
from compressor.tasks import Data
from compressor.units import PrunableGroup, check_plan, keep_all
from compressor.units.prunable import KnowsGroups
from compressor.workdir import read_json
from graph_passes import WEIGHTS, Plan

_FIELDS = Json[SelectedPlan](SelectedPlan)


@dataclass(frozen=True)
class PlanFiles:
    """A plan and the weights that it belongs to, as files of a store.

    Attributes:
        model: has the weights when a plan is written, and gets them when it is read.
    """

    model: ModelAccess
    _PLAN, _WEIGHTS = "plan.json", "model.safetensors"

    def save(self, selected: SelectedPlan, folder: Path) -> None:
        """Write a plan, and the weights of the model if they were trained with it."""
        if selected.trained:
            self.model.save_state(folder / self._WEIGHTS)
        selected.plan.save(folder / self._PLAN)  # with its masks
        _FIELDS.save(selected, folder)

    def load(self, folder: Path) -> SelectedPlan:
        """Read a plan, and give the model its weights."""
        selected = replace(_FIELDS.load(folder), plan=Plan.load(folder / self._PLAN))
        if selected.trained:
            self.model.read_state(folder / self._WEIGHTS)
        return selected


def load_plan(steps: Sequence[Step], recipe: Recipe, model: LoadedModel) -> SelectedPlan | None:
    """The plan that the first step of a run follows; None: it follows none.

    Raises:
        InputError: the plan belongs to another model, or to weights that do not lie beside it.
        PlanError: the plan cannot be read.
    """
    if not steps or not isinstance(steps[0], Follow):
        return None
    folder, file, weights = model.folder, steps[0].plan, None
    plan = Plan.load(file)
    _require_groups(plan, file, folder)
    if plan.model not in (None, folder.fingerprint):
        distills = any(isinstance(part, Distill) and part.teacher is None for part in parts_of(steps))
        weights = _fitted_weights(recipe, plan, file, folder, distills=distills)
    check_plan(plan, model.sites, source=str(file))
    followed = _signed(plan, folder) if weights is None else plan
    notes = () if part_of(steps, Blocks) is not None else (_followed(file, steps, folder, weights),)
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
                _fitted_weights(recipe, plan, stored, folder, distills=False)
        except InputError as error:
            reason = str(error)
        else:
            text = f"{stored.parent} goes on from {first}: the result is compared with that model"
            plans = {} if recipe.steps is not None else {"plan": stored}  # a list has it
            return recipe.updated(model=first, **plans), (Note(code=NoteCode.DENSE_CHOSEN, text=text),)
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
        model.folder.access.load_state(load_folder(recipe, followed.weights).access.state())
    return replace(followed, weights=None)


def load_start(step: Units, recipe: Recipe, model: LoadedModel) -> Plan:
    """The plan of an earlier run's output folder (`--start-from`); the model gets the weights of the folder.

    Raises:
        InputError: the folder cannot be read, or holds another model or no plan.
        PlanError: the plan cannot be read.
    """
    path = step.start_from
    assert path is not None
    plan, weights = check_start(path, model), load_named_folder(recipe, "start_from", path).access.state()
    access = model.folder.access
    shapes, needed = ({name: values.shape for name, values in part.items()} for part in (weights, access.state()))
    if shapes != needed:
        raise _other_model_error(path, model)
    access.load_state(weights)
    return plan


def check_bundles(step: Units, plan: Plan, groups: Sequence[PrunableGroup], source: str) -> None:
    """Raise InputError if an earlier plan, from `source`, keeps parts of what groups keep or drop together."""
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
    """The plan in an earlier run's output folder (`--start-from`) on the same model.

    Raises:
        InputError: the folder has no plan, or that of another model.
        PlanError: the plan cannot be read.
    """
    file = path / "plan.json"
    if not file.is_file():
        text = f"{path}: there is no plan.json; name the output folder of a run under a budget (--start-from)"
        raise InputError(text, code=ErrorCode.FILE_MISSING, field="start_from", path=path)
    plan = Plan.load(file)
    units, planned = ({group.name: group.units for group in part} for part in (model.groups, plan.groups))
    if planned != units or plan.masks:  # after masks units would have to be refitted again
        raise _other_model_error(path, model)
    return plan


def _other_model_error(path: Path, model: LoadedModel) -> InputError:
    text = (
        f"it is not the output of a run under a budget on {model.folder.path}, without masks; name the output folder of"
        " such a run (--start-from)"
    )
    return InputError.of_file(path, text, ErrorCode.FILE_MISMATCH, field="start_from")


def selection_notes(folder: ModelFolder, selected: SelectedPlan, data: Data | None) -> Iterator[Note]:
    """How the compressed model was made, and what its numbers leave out."""
    names = (selected.plan.method or "").split("+")
    methods = [METHODS[name] for name in names if name in METHODS]
    refits = bool(methods) and methods[-1].kind == "budget" and not selected.plan.masks
    codes = {note.code for note in selected.notes}
    if selected.trained and refits:
        adjusted = "adjusted on training rows whose labels were not used" if methods[-1].reads_rows else "unchanged"
        adjusted += ", and then distilled" if NoteCode.DISTILLED in codes else ""
        yield Note(
            code=NoteCode.WEIGHTS_CHANGED,
            text=f"{names[-1]}: the weights of the compressed model are those of the kept units, {adjusted}; dense is"
            f" the {folder.kind} as it was",
        )
    distils = bool(codes & {NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN})
    trains = bool(selected.plan.masks) or (methods[0].trains_model if methods else not distils)
    if selected.trained and trains:
        selects_neurons = selected.plan.neurons_kept < selected.plan.neurons and not refits
        units = "heads and neurons" if selects_neurons else "heads"
        units = units if selected.plan.sites else "neurons"
        how = "with its masks" if selected.plan.masks else f"while its {units} were selected"
        yield Note(
            code=NoteCode.TRAINED_ALONG,
            text=f"the compressed model was trained {how}; dense is the untrained {folder.kind} with every unit,"
            " through the same export, passes and runtime",
        )
    if positions := getattr(folder.config, "memory_length", 0):
        yield Note(
            code=NoteCode.SEGMENT_MEMORY,
            text="the graph reads a text segment by segment: its inputs include one memory per layer, empty at first"
            f" and up to {positions} positions long, and its outputs the memories for the next segment;"
            " times include memories at their full length",
        )
    if data is None or not len(data.test):
        missing = "there are no rows" if data is None else "no rows have labels"
        text = f"no metric was measured, because {missing} (--data, --eval-data or --test-data)"
        yield Note(code=NoteCode.NO_METRIC, text=text)


def _followed(file: Path, steps: Sequence[Step], model: ModelFolder, weights: Path | None) -> Note:
    preposition = "in" if model.file is None else "beside"
    location = f", which lies {preposition} the {model.kind}" if file == model.path / "plan.json" else ""
    source = "" if weights is None else f", and the weights are those of {weights}"
    learned = "nothing was learned" if len(steps) == 1 else "no unit was selected"
    if part_of(steps, Units) is not None:
        learned = "units are removed from what it keeps"
    return Note(code=NoteCode.PLAN_FOLLOWED, text=f"the plan is {file}{location}{source}: {learned}")


def _signed(plan: Plan, folder: ModelFolder) -> Plan:
    return plan.model_copy(update={"model": folder.fingerprint})


def _fitted_weights(recipe: Recipe, plan: Plan, file: Path, model: ModelFolder, *, distills: bool) -> Path:
    """The folder that holds the weights of the plan of a file, which its run fitted to those of the model."""
    # Files of version 0.1 do not record weights of their own.
    methods = [METHODS[name] for name in (plan.method or "").split("+") if name in METHODS]
    changes_weights = any(method.trains_model or method.kind == "budget" for method in methods)
    has_weights = bool(plan.weights or plan.masks) or changes_weights
    original, has_file = weight_fingerprints(model.access), file.with_name(WEIGHTS).is_file()

    def missing(reason: str, output: str = "the output folder of its run") -> InputError:
        """The error for a plan that can be followed in the output folder of its run, and not on another model."""
        taught = f", with --teacher {model.path}" if distills else ""
        text = (
            f"the plan ({plan.method or 'masks'}) belongs to weights that its run changed, and {reason}; use {output}"
            f" as the model{taught}"
        )
        return InputError.of_file(file, text, ErrorCode.FILE_MISMATCH, model=plan.model)

    if not has_weights or any(original.get(name) != row.original for name, row in plan.weights.items()):
        raise _foreign(plan, file, model)
    if not plan.weights:
        text = "it does not record which weights its run began with"
        raise missing(text, str(file.parent)) if has_file else missing(text)
    pruned = file.with_name("model.onnx")
    if not has_file and model.file is not None and pruned.is_file():
        raise missing(f"{pruned} has them and follows the plan already", str(pruned))
    if not has_file:
        raise missing(f"its folder has no {WEIGHTS}")
    fitted = load_folder(recipe, file.parent)
    if fitted.fingerprint != plan.model:
        raise missing(f"the {WEIGHTS} in its folder is that of another run, or was changed")
    # Parameters without a record are those that the run did not change.
    if dict(record_weights(plan, original, fitted.access).weights) != dict(plan.weights):
        raise _foreign(plan, file, model)
    return file.parent


def _require_groups(plan: Plan, file: Path, model: ModelFolder) -> None:
    """Raise InputError unless a model that knows its groups has those of a plan, with as many units."""
    if not isinstance(model.model, KnowsGroups):  # those of a model of PyTorch are checked where it is gated
        return
    sizes = {site.name: site.heads for site in model.model.sites} | dict(model.model.feed_forwards)
    group = next((group for group in plan.groups if sizes.get(group.name) != group.units), None)
    if group is not None:
        units = sizes.get(group.name, "no")
        text = (
            f"the plan of another graph: {group.name} has {group.units} {group.type} there, and {units} in"
            f" {model.source}; use the graph that it was learned on, or learn again"
        )
        raise InputError.of_file(
            file, text, ErrorCode.FILE_MISMATCH, model=plan.model, group=group.name, graph=model.source
        )


def _foreign(plan: Plan, file: Path, model: ModelFolder) -> InputError:
    text = (
        f"the plan of another model ({plan.model}, not {model.fingerprint}, that of {model.source}); use the model that"
        " it was learned on, or learn again"
    )
    return InputError.of_file(file, text, ErrorCode.FILE_MISMATCH, model=plan.model)
