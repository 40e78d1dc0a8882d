"""Learn with fewer blocks: watch the maps, cut masks, let the planner choose sites, and train on with the masks."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedModel

from compressor.block_masks.attention_maps import AttentionMaps
from compressor.block_masks.collect_maps import collect_attention_maps, remembered
from compressor.block_masks.masks_from_maps import build_masks, unreached
from compressor.errors import InputError, UsageError
from compressor.model_folder import fingerprint
from compressor.model_folder.example_inputs import token_limit
from compressor.progress import ProgressCallback
from compressor.results import CurvePoint
from compressor.selection.learn import schedule_options
from compressor.config.run import Recipe
from compressor.selection.options import defaults, read_options
from compressor.selection.plan_and_curves import joint_curves
from compressor.tasks import Data
from compressor.tasks.segment_streams import Streams
from compressor.training.fit import fit, processes
from compressor.training.schedule import Schedule
from compressor.units import Site, gated
from compressor.units.entmax import with_entmax
from compressor.workdir import write_json
from graph_passes import BlockMask, Kind, Plan, SitePlan

EPOCHS = 3.0
"""Passes over the rows where the recipe does not say."""


@dataclass(frozen=True)
class MaskedTraining:
    """What was learned.

    Attributes:
        plan: with the masks.
        curves: what was measured while the model learned with them.
        notes: what a reader must know.
    """

    plan: Plan
    curves: tuple[CurvePoint, ...]
    notes: tuple[str, ...]


class Chooser(Protocol):
    """Of all masks those that pay where the model will run, and what a reader must know of the choice."""

    def __call__(self, plan: Plan, masks: Mapping[str, BlockMask]) -> tuple[Mapping[str, BlockMask], Sequence[str]]: ...

    @property
    def timed(self) -> Any:
        """What the choice rests on, as JSON."""
        ...


def shares(recipe: Recipe, sites: Sequence[Site | SitePlan]) -> dict[Kind, float]:
    """The share that goes of each kind of attention in the model.

    Raises:
        UsageError: a kind that the model has not.
    """
    kinds = list(dict.fromkeys(site.kind for site in sites))
    for kind in recipe.blocks.drop_blocks_by_kind:
        if kind not in kinds:
            raise UsageError(f"--prune {kind}: the model has no such attention; it has {', '.join(kinds)}")
    return {kind: recipe.blocks.drop_blocks_by_kind.get(kind, recipe.blocks.drop_blocks or 0.0) for kind in kinds}


def reach(model: PreTrainedModel, data: Data, recipe: Recipe) -> int:
    """Positions that masks reach over: the longest row that there can be, whether or not one is there."""
    if isinstance(data.task, Streams):
        return max(1, *(length - 1 for length in data.train["length"]))
    longest = token_limit(model)
    return recipe.rows.max_length if longest is None else min(recipe.rows.max_length, longest)


def opened_maps(path: Path, model: PreTrainedModel, sites: Sequence[Site], length: int) -> AttentionMaps:
    """Maps of an earlier run.

    Args:
        path: their file.
        model: to cut masks for.
        sites: its sites.
        length: positions that the masks have to reach over.

    Raises:
        InputError: there are none, they are another model's, or too short.
    """
    maps = AttentionMaps.load(path)
    maps.check(sites, remembered(model))
    if maps.length < length:
        raise InputError(
            f"{path}: the maps reach over {maps.length} positions, rows have up to {length}; lower --max-length, or"
            " watch longer rows"
        )
    return maps


def learn_blocks(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    recipe: Recipe,
    plan: Plan,
    store: Path,
    planner: Chooser,
    tell: ProgressCallback,
    *,
    start: Mapping[str, Tensor] | None = None,
) -> MaskedTraining:
    """Cut masks for a model with the heads of `plan`, and train it with them, in place.

    The maps are kept as `maps.safetensors` in `store`, so that an interrupted run does not watch again and masks of
    other densities can be cut from them.

    Args:
        model: with the weights that maps are watched of.
        sites: its sites.
        data: rows to watch and to learn from.
        recipe: shares, block size, schedule.
        plan: the heads that are there.
        store: keeps the maps, and checkpoints.
        planner: chooses among the masks.
        tell: called with (step, steps).
        start: weights to learn on from; None: those that the maps are of.

    Raises:
        UsageError: an option or a share that does not fit the model.
        InputError: maps of another model, or shorter than the rows.
    """
    state = PartialState()
    share, length = shares(recipe, sites), reach(model, data, recipe)
    kept = store / "maps.safetensors"
    if recipe.blocks.maps is not None:
        maps = opened_maps(recipe.blocks.maps, model, sites, length)
        if state.is_main_process and not kept.is_file():
            store.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(recipe.blocks.maps, kept)
    elif kept.is_file():
        maps = AttentionMaps.load(kept)
    else:
        if torch.cuda.is_available():
            model.to(state.device)
        with _sharp(model, data, recipe, plan, store, tell) if recipe.blocks.entmax else nullcontext():
            maps = collect_attention_maps(
                model,
                sites,
                data,
                plan,
                length=length,
                batch_size=recipe.selection.batch_size,
                rows=recipe.blocks.map_rows,
                seed=recipe.selection.seed,
            )
        if state.is_main_process:
            store.mkdir(parents=True, exist_ok=True)
            maps.save(kept)
            shutil.rmtree(store / "entmax", ignore_errors=True)  # nothing goes on from there any more
    state.wait_for_everyone()
    notes = []
    if recipe.blocks.maps is not None:
        own = (("rows", maps.data, data.train_hash), ("weights", maps.model, fingerprint(model)))
        others = [what for what, has, mine in own if has != mine]
        if others:
            notes.append(f"masks are cut from the maps of other {' and '.join(others)} ({recipe.blocks.maps})")
    if maps.length > length:
        notes.append(f"the maps reach over {maps.length} positions, rows over {length}: the first {length} count")
        maps = maps.cropped(length)
    masks = build_masks(
        maps,
        plan,
        share,
        recipe.blocks.block_size,
        seed=recipe.selection.seed if recipe.blocks.random_blocks else None,
        count_causal_zeros=recipe.blocks.count_causal_zeros,
        weigh_by_rows=recipe.blocks.weight_by_count,
        empty_rows=recipe.blocks.allow_empty_rows,
    )
    if left := unreached(maps, masks, recipe.blocks.block_size):
        notes.append(
            f"{left:.1%} of the blocks are reached by no row that was watched: no share is taken of them, they stay"
            " (smaller blocks, --block-size, follow short rows closer)"
        )
    # Every process, and a run that goes on, learns with what the main process planned once: times differ.
    planned = store / "planned.json"
    if state.is_main_process and not planned.is_file():
        chosen, why = planner(plan, masks)
        plan.masked(chosen).save(store / "plan.json")
        write_json(planned, {"notes": [*notes, *why], "times": planner.timed})
    state.wait_for_everyone()
    masked, told = Plan.load(store / "plan.json"), tuple(json.loads(planned.read_text())["notes"])
    if not masked.masks:
        return MaskedTraining(masked, (), told)
    if start is not None:
        model.load_state_dict(start)
    curves = retrain(model, data, recipe, masked, store / "checkpoints", tell)
    return MaskedTraining(masked, curves, told)


@contextmanager
def _sharp(
    model: PreTrainedModel, data: Data, recipe: Recipe, plan: Plan, store: Path, tell: ProgressCallback
) -> Iterator[None]:
    """The model as it becomes when it learns with entmax in place of softmax; its own weights again afterwards."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with with_entmax(model):
            retrain(model, data, recipe, plan, store / "entmax", tell)
            yield
    finally:
        model.load_state_dict(before)


def retrain(
    model: PreTrainedModel, data: Data, recipe: Recipe, plan: Plan, checkpoints: Path, tell: ProgressCallback
) -> tuple[CurvePoint, ...]:
    """Train a model in place with the masks and heads of `plan`, at the recipe's pace; the best evaluation wins.

    Returns:
        What was measured, by step.
    """
    known = defaults(schedule_options)  # a head method's own options had their turn
    paced = {name: value for name, value in recipe.selection.options.items() if name in known}
    (pace,) = read_options("learning with masks", paced, schedule_options)
    rows = recipe.selection.batch_size * processes()
    steps = recipe.selection.steps or math.ceil((recipe.selection.epochs or EPOCHS) * len(data.train) / rows)
    schedule = Schedule(steps, recipe.selection.batch_size, recipe.selection.learning_rate, recipe.selection.seed, **pace)
    masks = sorted(
        (name, mask.block, hashlib.sha256(mask.kept.tobytes()).hexdigest()) for name, mask in plan.masks.items()
    )
    if not isinstance(data.task, Streams):
        data = replace(data, task=data.task.chooser)
    with gated(model, plan):
        log = fit(model, data, schedule, {"masks": masks, **pace}, checkpoints, tell)
    return joint_curves(log, data.task.metric)
