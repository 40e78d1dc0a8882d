"""Train a model with masks: average its maps, derive masks, select the sites to mask, and train with the masks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.block_masks.attention_maps import (
    AttentionMaps,
    build_masks,
    collect_attention_maps,
    load_maps,
    notes_on_maps,
    shares_by_kind,
    unreached_notes,
    unreached_share,
)
from compressor.block_masks.mask_selector import MASKS, MASKS_FILE, MaskSelector, SelectedMasks
from compressor.config.steps import Blocks
from compressor.processes import training_device
from compressor.progress import ProgressCallback
from compressor.results import CurvePoint
from compressor.selection.checks import TRAINING_WITH_MASKS
from compressor.selection.options import ScheduleOptions, read_options
from compressor.selection.plan_and_curves import SelectedPlan, training_curves
from compressor.store import File, Store, versioned
from compressor.tasks import Data
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import fit
from compressor.units import Site, gated
from compressor.units.entmax import with_entmax
from compressor.workdir import MAPS, MAPS_FILE
from graph_passes import Plan

EPOCHS = 3.0
"""Number of epochs, unless the step sets it."""
_CHECKPOINTS = "checkpoints"
"""Folder of checkpoints in that of unfinished work, of the training with masks or with entmax."""
logger = logging.getLogger(__name__)


def learn_blocks(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    step: Blocks,
    plan: Plan,
    length: int,
    store: Store,
    work: Path,
    selector: MaskSelector,
    on_progress: ProgressCallback,
    *,
    start: Mapping[str, Tensor] | None = None,
) -> SelectedPlan:
    """Derive masks for a model with the heads of `plan`, and train it with them, in place.

    The maps are stored in `store`, so that an interrupted run does not compute them again and masks of other densities
    can be derived from them. Maps are computed with the current weights of the model.

    Args:
        length: number of positions that the masks cover, see `mask_length`.
        work: folder of unfinished work, for the checkpoints of the training.
        start: initial weights of the training; None: the weights with which the maps are computed.

    Returns:
        The plan with the masks, and the curves of the training; the curves are empty if no site is masked.

    Raises:
        UsageError: an option or a share does not fit the model.
        InputError: the maps are of another model, or shorter than the rows.
    """
    shares = shares_by_kind(step, sites)
    source = None if step.maps is None else load_maps(step.maps, model, sites, length)

    @versioned(1, "compressor.block_masks.attention_maps", "compressor.units.entmax", "compressor.training.fit")
    def collect(folder: Path) -> AttentionMaps:
        if source is not None:
            return source
        if torch.cuda.is_available():
            torch.nn.Module.to(model, training_device())
        options = dict[str, Any](batch_size=step.batch_size, rows=step.map_rows, seed=step.seed)
        with _entmax_weights(model, data, step, plan, folder, on_progress) if step.entmax else nullcontext():
            return collect_attention_maps(model, sites, data, plan, length=length, on_progress=on_progress, **options)

    maps = store.memo(MAPS, {}, collect, File(MAPS_FILE, AttentionMaps.save, AttentionMaps.load))
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
    notes += unreached_notes(unreached_share(maps, masks, step.block_size))

    def select(_: Path) -> SelectedMasks:
        selected, reasons = selector.select(plan, masks)
        logger.debug("%d of %d sites are masked", len(selected), len(masks))
        return SelectedMasks(tuple(selected), (*notes, *reasons), dict(selector.timed))

    # Times vary, so all processes, and a resumed run, train with the masks that the main process selected once.
    selected = store.memo(MASKS, {}, select, MASKS_FILE, by_main=True)
    masked = plan.masked({name: masks[name] for name in selected.sites})
    if not masked.masks:
        return SelectedPlan(masked, (), trained=False, notes=selected.notes)
    if start is not None:
        model.load_state_dict(start)
    curves = train_with_masks(model, data, step, masked, work / _CHECKPOINTS, on_progress)
    return SelectedPlan(masked, curves, trained=True, notes=selected.notes)


@contextmanager
def _entmax_weights(
    model: PreTrainedModel, data: Data, step: Blocks, plan: Plan, work: Path, on_progress: ProgressCallback
) -> Iterator[None]:
    """The model trained with entmax instead of softmax; its own weights are restored on exit."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with with_entmax(model):
            train_with_masks(model, data, step, plan, work / _CHECKPOINTS, on_progress)
            yield
    finally:
        model.load_state_dict(weights)


def train_with_masks(
    model: PreTrainedModel, data: Data, step: Blocks, plan: Plan, checkpoint_dir: Path, on_progress: ProgressCallback
) -> tuple[CurvePoint, ...]:
    """Train a model in place with the heads and masks of `plan`; it ends with the weights of the best evaluation.

    An interrupted run resumes from the checkpoints in `checkpoint_dir`. Returns values that were measured, by step.
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
