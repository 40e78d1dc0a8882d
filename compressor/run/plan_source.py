"""Which heads to keep: as a plan says, as was learned, or all of them."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from accelerate import PartialState

from compressor.block_masks.train_masked import Chooser, learn_blocks
from compressor.config.fields import flag_of
from compressor.config.run import Recipe
from compressor.errors import InputError, UsageError
from compressor.model_folder import ModelFolder, fingerprint
from compressor.progress import Listener, ProgressCallback
from compressor.results import CurvePoint
from compressor.selection.gates import GATES
from compressor.selection.learn import Learned, known_options, learn
from compressor.tasks import Data
from compressor.units import Site, check_plan, keep_all
from compressor.workdir import MAPS, write_json
from graph_passes import Plan

NOTHING_LEARNED = (
    "nothing was learned: the model goes through as it is, with every head; add rows to learn from (--data) and how"
    " many heads to keep (--keep), or a plan (--plan)"
)

_STAGES = {
    "checkpoints": "learning",
    "blocks/entmax": "learning with entmax",
    "blocks/checkpoints": "learning with masks",
}
"""Where each stage keeps its checkpoints, in order."""


@dataclass(frozen=True)
class SelectedPlan:
    """A plan and where it came from.

    Attributes:
        plan: one entry a site, with the fingerprint of the weights that it belongs to.
        curves: what was measured while it was learned.
        trained: whether the model's weights changed on the way.
        notes: what a reader must know.
    """

    plan: Plan
    curves: tuple[CurvePoint, ...] = ()
    trained: bool = False
    notes: tuple[str, ...] = ()


def load_plan(recipe: Recipe, folder: ModelFolder, sites: Sequence[Site]) -> SelectedPlan | None:
    """The plan that the recipe or the model folder brings; the plan of all heads where there is nothing to learn from.

    Raises:
        InputError: the plan is another model's.
        PlanError: the plan does not read.
    """
    if recipe.plan_file is None:
        return None if recipe.rows.data else SelectedPlan(_signed(keep_all(sites), folder), notes=(NOTHING_LEARNED,))
    plan = Plan.load(recipe.plan_file)
    if plan.model not in (None, folder.fingerprint):
        if plan.masks or (plan.method in GATES and GATES[plan.method].trains_model):
            beside, by = recipe.plan_file.parent, plan.method or "masks"
            raise InputError(
                f"{recipe.plan_file}: the plan ({by}) belongs to weights that were trained along with"
                f" it, not to those of {folder.path}; they lie in the output folder of the run that made it:"
                f" compress {beside if (beside / 'model.safetensors').is_file() else 'out/'} ..."
            )
        raise InputError(
            f"{recipe.plan_file}: the plan of another model ({plan.model}, not {folder.fingerprint}); give the"
            " model that it was learned on, or learn again"
        )
    try:
        check_plan(plan, sites)
    except InputError as error:
        raise InputError(f"{recipe.plan_file}: {str(error).removeprefix('plan: ')}") from error
    unused = [flag_of(name) for name in ("keep", "method", "certify", "options") if name in recipe.fields_set]
    note = f"the heads are those of {recipe.plan_file}" + (
        "" if recipe.selection.plan else ", which lies in the model folder"
    )
    note += ": nothing was learned" + (f", and {' and '.join(unused)} had no effect" if unused else "")
    return SelectedPlan(_signed(plan, folder), notes=(note,))


def learn_plan(
    recipe: Recipe,
    folder: ModelFolder,
    sites: Sequence[Site],
    data: Data,
    store: Path,
    state: PartialState,
    listen: Listener,
    tell: ProgressCallback,
    planner: Chooser,
) -> SelectedPlan:
    """Learn which heads and blocks to keep, or go on where an interrupted run of the same recipe stopped.

    Under `accelerate launch` every process calls this, and the main one alone writes into `store`. `folder.model` is
    left with the weights that the plan belongs to.

    Raises:
        UsageError: an interrupted run of another recipe, model or rows left something there (`recipe.output.force`).
    """
    if state.is_main_process:
        rows = {"train": data.train_hash or "", "eval": data.eval_hash or ""}
        _open_store(store, recipe.learning_key(model=folder.fingerprint, **rows), recipe.output.force, listen)
    state.wait_for_everyone()
    done = store / "done.json"
    weights = store / "model.safetensors"
    if done.is_file():
        stored = json.loads(done.read_text())
        if stored["trained"]:
            safetensors.torch.load_model(folder.model, str(weights))
        listen.note(f"what an earlier run learned is taken from {store}")
        curves = tuple(CurvePoint.model_validate(point) for point in stored["curves"])
        return SelectedPlan(Plan.load(store / "plan.json"), curves, stored["trained"], tuple(stored["notes"]))
    for part, stage in _STAGES.items():
        if step := _step(store / part):
            listen.note(f"{stage} goes on from {step} of an interrupted run")
    if recipe.blocks.maps is None and (store / MAPS).is_file():
        listen.note("masks are cut from the attention maps of an interrupted run")
    if any((store / "checkpoints").glob("checkpoint-*.npz")):
        listen.note("the search goes on with what an interrupted run measured")
    found = _learn(recipe, folder, sites, data, store, tell, planner)
    folder.model.to("cpu")  # type: ignore[arg-type]  # a trainer with a GPU leaves the model there
    plan = found.plan.model_copy(update={"model": fingerprint(folder.model) if found.trained else folder.fingerprint})
    if state.is_main_process:
        if found.trained:
            safetensors.torch.save_model(folder.model, str(weights))
        plan.save(store / "plan.json")
        points = [point.model_dump() for point in found.curves]
        write_json(done, {"trained": found.trained, "curves": points, "notes": found.notes})
        for part in _STAGES:
            shutil.rmtree(store / part, ignore_errors=True)
    return SelectedPlan(plan, found.curves, found.trained, found.notes)


def _learn(
    recipe: Recipe,
    folder: ModelFolder,
    sites: Sequence[Site],
    data: Data,
    store: Path,
    tell: ProgressCallback,
    planner: Chooser,
) -> SelectedPlan:
    """Heads first, where they are asked for, then blocks of what is left."""
    model = folder.model
    start = (
        {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if recipe.blocks.from_original_weights
        else None
    )
    found = Learned(_signed(keep_all(sites), folder), (), trained=False)
    if recipe.selects_heads:
        options = {
            name: value
            for name, value in recipe.selection.options.items()
            if name in known_options(recipe.selection.method)
        }
        own = recipe.updated(options=options) if recipe.blocks.drops_any else recipe
        found = learn(model, sites, data, own.selection, store / "checkpoints", tell)
    if not recipe.blocks.drops_any:
        return SelectedPlan(found.plan, found.curves, found.trained, found.notes)
    masked = learn_blocks(model, sites, data, recipe, found.plan, store / "blocks", planner, tell, start=start)
    last = max((point.step for point in found.curves), default=0)
    curves = (*found.curves, *(point.model_copy(update={"step": last + point.step}) for point in masked.curves))
    return SelectedPlan(masked.plan, curves, found.trained or bool(masked.plan.masks), (*found.notes, *masked.notes))


def _signed(plan: Plan, folder: ModelFolder) -> Plan:
    return plan.model_copy(update={"model": folder.fingerprint})


def _step(checkpoints: Path) -> str | None:
    """How far an interrupted run's last whole checkpoint is: `step 40 of 120`."""
    states = []
    for path in checkpoints.glob("checkpoint-*/trainer_state.json"):
        with contextlib.suppress(OSError, ValueError):  # cut short: learning passes it over too
            states.append(json.loads(path.read_text()))
    last = max(states, key=lambda state: int(state["global_step"]), default=None)
    return last and f"step {last['global_step']} of {last['max_steps']}"


def _open_store(store: Path, key: str, force: bool, listen: Listener) -> None:
    """Empty the store unless it was made for `key`.

    Raises:
        UsageError: it holds what another run has learned, and nobody asked to drop that.
    """
    stamp = store / "key"
    if stamp.is_file() and stamp.read_text() == key:
        return
    if store.exists():
        if not force and (left := _left(store)):
            raise UsageError(
                f"{store}: an interrupted run learned here with another recipe, model or rows ({left}); ask for the"
                " same, name another folder to write (-o), or start anew (--force)"
            )
        listen.note("the recipe, the model or the rows are not those of the interrupted run: learning starts afresh")
        shutil.rmtree(store)
    store.mkdir()
    stamp.write_text(key)


def _left(store: Path) -> str | None:
    """What an interrupted run would go on with; None: nothing."""
    if (store / "done.json").is_file():
        return "it had ended learning"
    for part in reversed(_STAGES):
        if step := _step(store / part):
            return step
    if (store / MAPS).is_file():
        return "attention maps"
    return "a search" if any((store / "checkpoints").glob("checkpoint-*.npz")) else None
