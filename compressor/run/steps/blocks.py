"""Drop blocks of the attention maps, and train the model with the masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compressor.block_masks.attention_maps import mask_length, shares_by_kind
from compressor.block_masks.train_masked import learn_blocks
from compressor.config.steps import Blocks, Step, Units
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import ModelFolder
from compressor.model_folder.feeds import takes_text
from compressor.results import Note, NoteCode
from compressor.run.load import load_folder
from compressor.run.plan_source import PlanFiles
from compressor.run.run_context import RunInputs
from compressor.run.steps.base import PLAN, State, StepContext, StepFunctions, signed
from compressor.selection.checks import check_options
from compressor.selection.plan_and_curves import SelectedPlan, joined_curves
from compressor.store import Store, versioned
from compressor.units.entmax import entmax_function
from compressor.units.projections import require_interface


def _check_options(step: Blocks) -> None:
    check_options(step)
    if step.entmax:
        entmax_function()


def _check(step: Blocks, inputs: RunInputs, earlier: Sequence[Step]) -> None:
    folder, sites = inputs.model.folder, inputs.model.sites
    if step.from_original_weights and any(each.part(Units) is not None for each in earlier):
        raise UsageError(
            "--from-original-weights: units are removed before, and the weights that remain are refitted; omit it",
            code=ErrorCode.CONTRADICTION,
            field="from_original_weights",
        )
    shares_by_kind(step, sites)
    require_interface(folder.network, sites, "block masks")
    if not takes_text(folder):  # masks are learned for lengths in tokens
        text = f"--drop-blocks: {folder.path} takes no text, and masks of attention maps are learned on texts; omit it"
        raise UsageError(text, code=ErrorCode.UNSUPPORTED_MODEL, field="drop_blocks")
    if inputs.followed is not None:
        _require_heads_alone(inputs.followed, folder)


def _require_heads_alone(followed: SelectedPlan, folder: ModelFolder) -> None:
    """Raise InputError for a plan from whose heads no blocks can be dropped."""
    plan = followed.plan
    reason = "it has masks already" if plan.masks else "" if plan.heads_kept else "it keeps no heads"
    if plan.model != folder.fingerprint:
        reason = "it belongs to other weights"
    if reason:
        raise InputError(
            f"{folder.path / 'plan.json'}: no blocks can be dropped from its heads, because {reason}; use the output"
            " folder of a run that kept heads and dropped no blocks as the model, or omit --drop-blocks",
            code=ErrorCode.PLAN_MISMATCH,
            path=folder.path / "plan.json",
        )


@versioned(2, "compressor.block_masks.train_masked", "compressor.training.fit")
def _run(step: Blocks, state: State, context: StepContext, store: Store) -> State:
    """The plan with masks where they make attention faster; the model is trained with them."""
    run, folder, selector = context.run, context.run.model.folder, context.run.selector
    assert selector is not None

    def drop(work: Path) -> SelectedPlan:
        selected = state.selected
        start = load_folder(run.recipe, folder.path).network.state_dict() if step.from_original_weights else None
        with run.log.stage("learning which blocks to drop") as on_progress:
            masked = learn_blocks(
                folder.network,
                run.model.sites,
                run.rows,
                step,
                selected.plan,
                mask_length(folder.network, run.rows, run.recipe.rows.max_length),
                store,
                work,
                selector,
                on_progress,
                start=start,
            )
        text = f"blocks are dropped from the heads that the plan in {folder.path} keeps"
        note = Note(code=NoteCode.PLAN_FOLLOWED, text=f"{text}; its other units stay as they are")
        learned = replace(
            selected,
            plan=masked.plan,
            curves=joined_curves(selected.curves, masked.curves),
            trained=selected.trained or masked.trained,
            notes=(*selected.notes, *([] if run.followed is None else [note]), *masked.notes),
        )
        return signed(learned, folder)

    selected = store.memo(PLAN, {}, drop, PlanFiles(folder.access))
    selector.recall(store)
    return replace(state, selected=selected)


FUNCTIONS = StepFunctions(_run, _check_options, _check)
