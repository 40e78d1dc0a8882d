"""The plan of a run: read from a file, learned, or every head where there are no rows to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compressor.block_masks.mask_selector import MaskSelector
from compressor.block_masks.train_masked import learn_blocks
from compressor.config.fields import flag_of
from compressor.config.run import Recipe
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder, fingerprint
from compressor.progress import ProgressCallback
from compressor.results import Note, NoteCode
from compressor.run.fitted_weights import require_fitted_weights
from compressor.run.learning_store import LearningStore
from compressor.run.load import load_folder, load_named_folder
from compressor.run.products import LoadedModel, SelectedPlan
from compressor.selection.learn import learn
from compressor.selection.options import option_names
from compressor.selection.plan_and_curves import LearningResult
from compressor.tasks import Data
from compressor.training.processes import process_state
from compressor.units import PrunableGroup, check_plan, keep_all
from graph_passes import Plan

_LEARNING_FIELDS = ("keep", "method", "certify", "options")
"""Fields without effect where a plan is followed, besides those of budgets (`run_notes`)."""


def load_plan(recipe: Recipe, model: LoadedModel) -> SelectedPlan | None:
    """The plan of a file, or a plan that keeps every head where there are no rows; None if a plan is to be learned.

    Raises:
        InputError: the plan belongs to another model, or to weights that do not lie beside it.
        PlanError: the plan cannot be read.
    """
    folder, sites = model.folder, model.sites
    if recipe.start_plan_file is not None:
        _start_plan(recipe, model)  # one that cannot be used ends the run before maps are computed
    if recipe.budget.start_from is not None and recipe.prunes:
        _earlier_plan(recipe, model)  # likewise, before the graph is exported
    if recipe.plan_file is None:
        if recipe.learns:
            return None
        rows = "" if recipe.rows.data else "rows to learn from (--data) and "
        learned = "the number of heads to keep (--keep)" if sites else "a budget, e.g. --macs 70%"
        advice = "" if recipe.selection.keep is not None else f"; add {rows}{learned}, or a plan (--plan)"
        text = f"nothing was learned: the model is exported and built with every unit{advice}"
        note = Note(code=NoteCode.NOTHING_LEARNED, text=text)
        return SelectedPlan(_signed(keep_all(sites), folder), notes=(note,))
    plan, weights = Plan.load(recipe.plan_file), None
    if plan.model not in (None, folder.fingerprint):
        weights = require_fitted_weights(recipe, plan, recipe.plan_file, folder)
    check_plan(plan, sites, source=str(recipe.plan_file))
    followed = _signed(plan, folder) if weights is None else plan
    return SelectedPlan(followed, trained=weights is not None, notes=(_followed(recipe, weights),), weights=weights)


def load_weights(recipe: Recipe, model: LoadedModel, followed: SelectedPlan) -> SelectedPlan:
    """A plan that is followed, whose weights the model has afterwards."""
    if followed.weights is not None:
        model.folder.model.load_state_dict(load_folder(recipe, followed.weights).model.state_dict())
    return replace(followed, weights=None)


def load_start(recipe: Recipe, model: LoadedModel, groups: Sequence[PrunableGroup]) -> Plan:
    """The plan of an earlier run's output folder (`--start-from`); the model gets the weights of the folder.

    Args:
        recipe: names the folder, and how it may be loaded.
        model: the model that the run compressed.
        groups: the groups of which more units are to be removed.

    Raises:
        InputError: the folder cannot be read, holds another model or no plan, or keeps parts of what `groups` keep or
            drop together.
        PlanError: the plan cannot be read.
    """
    plan, path = _earlier_plan(recipe, model), recipe.budget.start_from
    weights = load_named_folder(recipe, "start_from").model.state_dict()
    network = model.folder.model
    shapes, needed = ({name: tensor.shape for name, tensor in part.items()} for part in (weights, network.state_dict()))
    if shapes != needed:
        raise _other_model_error(recipe, model)
    divided = next((group for group in groups if not group.can_keep(plan[group.name].kept)), None)
    if divided is not None:
        raise InputError(
            f"{path}: the heads that it keeps of {divided.name} cannot be kept or dropped as --group-by"
            f" {recipe.budget.group_by} does; use the --group-by of that run, or --prune-units neurons",
            code=ErrorCode.FILE_MISMATCH,
            field="group_by",
            path=path,
        )
    network.load_state_dict(weights)
    return plan


def _earlier_plan(recipe: Recipe, model: LoadedModel) -> Plan:
    """The plan in an earlier run's output folder (`--start-from`).

    Raises:
        InputError: the folder has no plan, or that of another model.
        PlanError: the plan cannot be read.
    """
    path = recipe.budget.start_from
    assert path is not None
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
        raise _other_model_error(recipe, model)
    return plan


def _other_model_error(recipe: Recipe, model: LoadedModel) -> InputError:
    path = recipe.budget.start_from
    return InputError(
        f"{path}: it is not the output of a run under a budget on {model.folder.path}; name the output folder of such a"
        " run (--start-from)",
        code=ErrorCode.FILE_MISMATCH,
        field="start_from",
        path=path,
    )


def _followed(recipe: Recipe, weights: Path | None) -> Note:
    unused = [flag_of(name) for name in _LEARNING_FIELDS if name in recipe.fields_set]
    location = "" if recipe.selection.plan else ", which lies in the model folder"
    source = "" if weights is None else f", and the weights are those of {weights}"
    effect = f", and {' and '.join(unused)} had no effect" if unused else ""
    learned = "no unit was selected" if recipe.distills else "nothing was learned"
    return Note(
        code=NoteCode.PLAN_FOLLOWED,
        text=f"the plan is {recipe.plan_file}{location}{source}: {learned}{effect}",
    )


def learn_plan(
    recipe: Recipe,
    model: LoadedModel,
    data: Data,
    store: LearningStore,
    selector: MaskSelector,
    on_progress: ProgressCallback,
) -> SelectedPlan:
    """Learn which heads and blocks to keep, or resume an interrupted run.

    Under `accelerate launch` every process calls this, and only the main process writes into the store. The model is
    left with the weights that the plan belongs to.

    Args:
        recipe: method, number of heads, shares of blocks, schedule.
        model: the model.
        data: the rows.
        store: folder of the checkpoints and of the result.
        selector: selects the masks that make the engine faster on this machine.
        on_progress: called with (step, steps).
    """
    folder = model.folder
    if (finished := store.load_finished_plan(folder.model)) is not None:
        return finished
    return store_learned(_learn(recipe, model, data, store, selector, on_progress), folder, store)


def store_learned(learned: LearningResult, folder: ModelFolder, store: LearningStore) -> SelectedPlan:
    """The plan that was learned, signed for the weights of the model, which the main process stores with it."""
    folder.model.to("cpu")  # type: ignore[arg-type]  # a trainer with a GPU leaves the model there
    signature = fingerprint(folder.model) if learned.trained else folder.fingerprint
    selected = SelectedPlan(
        plan=learned.plan.model_copy(update={"model": signature}),
        curves=learned.curves,
        trained=learned.trained,
        notes=learned.notes,
        certificate=learned.certificate,
    )
    if process_state().is_main_process:
        store.finish(selected, folder.model)
    return selected


def _learn(
    recipe: Recipe,
    model: LoadedModel,
    data: Data,
    store: LearningStore,
    selector: MaskSelector,
    on_progress: ProgressCallback,
) -> LearningResult:
    """Select heads first, if they are to be selected, then blocks of the remaining attention."""
    network, sites = model.folder.model, model.sites
    from_original = recipe.blocks.from_original_weights
    original = {name: tensor.clone() for name, tensor in network.state_dict().items()} if from_original else None
    heads = _start_plan(recipe, model)
    if recipe.selects_heads:
        selection = recipe.selection
        if recipe.blocks.drops_any:  # options of learning with masks are not the method's
            known = option_names(selection.method)
            options = {name: value for name, value in selection.options.items() if name in known}
            selection = selection.model_copy(update={"options": options})
        heads = learn(network, sites, data, selection, store.checkpoints, on_progress)
    if not recipe.blocks.drops_any:
        return heads
    masked = learn_blocks(network, sites, data, recipe, heads.plan, store.blocks, selector, on_progress, start=original)
    last = max((point.step for point in heads.curves), default=0)
    later = (point.model_copy(update={"step": last + point.step}) for point in masked.curves)
    return LearningResult(
        plan=masked.plan,
        curves=(*heads.curves, *later),
        trained=heads.trained or bool(masked.plan.masks),
        notes=(*heads.notes, *masked.notes),
    )


def _start_plan(recipe: Recipe, model: LoadedModel) -> LearningResult:
    """Every head, or, where blocks are dropped after an earlier run, the units of the plan in its output folder.

    Raises:
        InputError: the plan belongs to other weights than the folder has, or has no heads or masks already.
        PlanError: the plan cannot be read.
    """
    file, folder = recipe.start_plan_file, model.folder
    if file is None:
        return LearningResult(_signed(keep_all(model.sites), folder), (), trained=False)
    plan = Plan.load(file)
    check_plan(plan, model.sites, source=str(file))
    reason = "it has masks already" if plan.masks else "" if plan.heads_kept else "it keeps no heads"
    if plan.model not in (None, folder.fingerprint):
        reason = "it belongs to other weights"
    if reason:
        raise InputError(
            f"{file}: no blocks can be dropped from its heads, because {reason}; use the output folder of a run that"
            " kept heads and dropped no blocks as the model, or omit --drop-blocks",
            code=ErrorCode.PLAN_MISMATCH,
            path=file,
        )
    text = f"blocks are dropped from the heads that the plan {file} keeps; its other units stay as they are"
    note = Note(code=NoteCode.PLAN_FOLLOWED, text=text)
    return LearningResult(_signed(plan, folder), (), trained=False, notes=(note,))


def _signed(plan: Plan, folder: ModelFolder) -> Plan:
    return plan.model_copy(update={"model": folder.fingerprint})
