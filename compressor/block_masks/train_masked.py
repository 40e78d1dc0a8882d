"""Train a model with masks: average its maps, derive masks, select the sites to mask, and train with the masks."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor
from transformers import PreTrainedModel

from compressor.block_masks.attention_maps import (
    AttentionMaps,
    build_masks,
    shares_by_kind,
    unreached_share,
)
from compressor.block_masks.collect_maps import collect_attention_maps, load_maps, notes_on_maps, store_copy
from compressor.block_masks.mask_selector import MaskSelector
from compressor.config.steps import Blocks
from compressor.progress import ProgressCallback
from compressor.results import CurvePoint, Note, NoteCode
from compressor.selection.checks import TRAINING_WITH_MASKS
from compressor.selection.options import ScheduleOptions, read_options
from compressor.selection.plan_and_curves import LearningResult, training_curves
from compressor.tasks import Data
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import fit
from compressor.training.processes import process_state
from compressor.units import Site, gated
from compressor.units.entmax import with_entmax
from compressor.workdir import MAPS, write_json
from graph_passes import BlockMask, Plan

EPOCHS = 3.0
"""Number of epochs, unless the step sets it."""
_ENTMAX, _CHECKPOINTS, _PLAN, _PLANNED = "entmax", "checkpoints", "plan.json", "planned.json"
"""Checkpoint folders of the trainings with entmax and with masks, and files of the selected plan, notes and times."""
_NOTES = TypeAdapter(tuple[Note, ...])
logger = logging.getLogger(__name__)


def learn_blocks(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    step: Blocks,
    plan: Plan,
    length: int,
    store: Path,
    selector: MaskSelector,
    on_progress: ProgressCallback,
    *,
    start: Mapping[str, Tensor] | None = None,
) -> LearningResult:
    """Derive masks for a model with the heads of `plan`, and train it with them, in place.

    The maps are stored in `store`, so that an interrupted run does not compute them again and masks of other densities
    can be derived from them.

    Args:
        model: the model; maps are computed with its current weights.
        sites: its sites.
        data: rows for the maps and for training.
        step: shares, block size, schedule.
        plan: the heads that are kept.
        length: number of positions that the masks cover, see `mask_length`.
        store: folder of maps, selected masks and checkpoints.
        selector: selects the masks to train with.
        on_progress: called with (step, steps).
        start: initial weights of the training; None: the weights with which the maps are computed.

    Returns:
        The plan with the masks, and the curves of the training; the curves are empty if no site is masked.

    Raises:
        UsageError: an option or a share does not fit the model.
        InputError: the maps are of another model, or shorter than the rows.
    """
    state = process_state()
    shares = shares_by_kind(step, sites)
    maps = _maps(model, sites, data, step, plan, store, length, on_progress)
    state.wait_for_everyone()
    notes = list(notes_on_maps(maps, model, data, length, step.maps))
    maps = maps.cropped(length)
    masks = build_masks(
        maps,
        plan,
        shares,
        step.block_size,
        seed=step.seed if step.random_blocks else None,
        count_causal_zeros=step.count_causal_zeros,
        weight_by_count=step.weight_by_count,
        allow_empty_rows=step.allow_empty_rows,
    )
    if unreached := unreached_share(maps, masks, step.block_size):
        text = (
            f"{unreached:.1%} of the blocks are kept because no row that was read reaches them; if no row is longer, a"
            " lower --max-length leaves them out"
        )
        notes.append(Note(code=NoteCode.BLOCKS_UNREACHED, text=text))
    # Times vary, so all processes, and a resumed run, train with the masks that the main process selected once.
    if state.is_main_process and not (store / _PLANNED).is_file():
        _select(plan, masks, selector, notes, store)
    state.wait_for_everyone()
    masked = Plan.load(store / _PLAN)
    stored_notes = _NOTES.validate_python(json.loads((store / _PLANNED).read_text(encoding="utf-8"))["notes"])
    if not masked.masks:
        return LearningResult(masked, (), trained=False, notes=stored_notes)
    if start is not None:
        model.load_state_dict(start)
    curves = train_with_masks(model, data, step, masked, store / _CHECKPOINTS, on_progress)
    return LearningResult(masked, curves, trained=True, notes=stored_notes)


def _maps(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    step: Blocks,
    plan: Plan,
    store: Path,
    length: int,
    on_progress: ProgressCallback,
) -> AttentionMaps:
    """The maps that the step names, or those of an interrupted run, else new ones; all are stored."""
    state, path = process_state(), store / MAPS.name
    if step.maps is not None:
        maps = load_maps(step.maps, model, sites, length)
        if state.is_main_process:
            store_copy(step.maps, path)
        return maps
    if path.is_file():
        return AttentionMaps.load(path)
    if torch.cuda.is_available():
        model.to(state.device)
    with _entmax_weights(model, data, step, plan, store, on_progress) if step.entmax else nullcontext():
        maps = collect_attention_maps(
            model,
            sites,
            data,
            plan,
            length=length,
            batch_size=step.batch_size,
            rows=step.map_rows,
            seed=step.seed,
            on_progress=on_progress,
        )
    if state.is_main_process:
        store.mkdir(parents=True, exist_ok=True)
        maps.save(path)
        shutil.rmtree(store / _ENTMAX, ignore_errors=True)  # not needed to resume once the maps are stored
    return maps


def _select(
    plan: Plan, masks: Mapping[str, BlockMask], selector: MaskSelector, notes: Sequence[Note], store: Path
) -> None:
    """Select the masks to train with, and store the plan with them, the notes and the times."""
    selected, reasons = selector.select(plan, masks)
    logger.debug("%d of %d sites are masked", len(selected), len(masks))
    plan.masked(selected).save(store / _PLAN)
    stored = [note.model_dump(mode="json") for note in (*notes, *reasons)]
    write_json(store / _PLANNED, {"notes": stored, "times": selector.timed})


@contextmanager
def _entmax_weights(
    model: PreTrainedModel, data: Data, step: Blocks, plan: Plan, store: Path, on_progress: ProgressCallback
) -> Iterator[None]:
    """The model trained with entmax instead of softmax; its own weights are restored on exit."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with with_entmax(model):
            train_with_masks(model, data, step, plan, store / _ENTMAX, on_progress)
            yield
    finally:
        model.load_state_dict(weights)


def train_with_masks(
    model: PreTrainedModel, data: Data, step: Blocks, plan: Plan, checkpoint_dir: Path, on_progress: ProgressCallback
) -> tuple[CurvePoint, ...]:
    """Train a model in place with the heads and masks of `plan`; it ends with the weights of the best evaluation.

    Args:
        model: the model.
        data: rows to train on and to evaluate on.
        step: schedule and its options.
        plan: heads and masks.
        checkpoint_dir: folder of the checkpoints, from which an interrupted run resumes.
        on_progress: called with (step, steps).

    Returns:
        Values that were measured during training, by step.
    """
    schedule_options = read_options(TRAINING_WITH_MASKS, step.options, ScheduleOptions)
    schedule = schedule_options.schedule_of_epochs(step, len(data.train), EPOCHS)
    masks = sorted(
        (name, mask.block, hashlib.sha256(mask.kept.tobytes()).hexdigest()) for name, mask in plan.masks.items()
    )
    if not data.task.reads_streams:
        data = data.of_chooser()
    checkpoints = Checkpoints(checkpoint_dir, {"masks": masks, **schedule_options.model_dump()})
    with gated(model, plan):
        log = fit(model, data, schedule, checkpoints, on_progress=on_progress)
    return training_curves(log, data.task.metric)
