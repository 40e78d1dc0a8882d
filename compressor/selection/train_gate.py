"""Select units by gradient: train a gate together with the model, or on a frozen model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from compressor.config.methods import METHODS
from compressor.config.steps import Heads, Units
from compressor.progress import ProgressCallback, ignore_progress
from compressor.selection.gates import Gate, PerKindGate
from compressor.selection.gates.base import Keep
from compressor.selection.options import (
    MethodOptions,
    PoolOptions,
    ScheduleOptions,
    check_option_names,
    option_names,
    read_options,
)
from compressor.selection.plan_and_curves import LearningResult, all_heads, record_of, to_plan, training_curves
from compressor.selection.unit_pool import UnitPool
from compressor.tasks.data import Data
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import GateSetup, fit
from compressor.training.processes import process_count
from compressor.training.schedule import Schedule
from compressor.units import PrunableGroup, Site, keep_all


def train_gate(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    selection: Heads,
    keep: int | None,
    checkpoint_dir: Path,
    on_progress: ProgressCallback,
) -> LearningResult:
    """Train the gate of `selection.method` and keep the heads that it selects, at their scales.

    Args:
        model: trained in place, unless the method is pipelined.
        sites: its sites, in call order.
        data: encoded rows, with the task by which heads are selected.
        selection: method, options, schedule, seed.
        keep: number of heads to keep; None: as many as the penalty leaves open.
        checkpoint_dir: folder of the checkpoints, from which an interrupted run resumes.
        on_progress: called with (step, steps).

    Raises:
        UsageError: an option does not exist or is out of range.
        DivergedError: see `fit`.
    """
    method, settings = METHODS[selection.method], _settings_of(selection, data)
    layers, kinds, pool = [site.heads for site in sites], [site.kind for site in sites], settings.pool
    if pool == "model":
        gate = settings.make_gate(layers, keep, selection.seed)
    else:
        only = None if pool == "kind" else pool
        gate = PerKindGate(settings.make_gate, layers, kinds, keep, selection.seed, only=only)
    log = fit(
        model,
        data,
        settings.schedule,
        Checkpoints(checkpoint_dir, {"keep": keep, **settings.options}),
        gating=GateSetup(gate, sites, trains_model=method.trains_model),
        on_progress=on_progress,
    )
    heads, mask = all_heads(sites), gate.harden().tolist()
    scales = {head: scale for head, scale, kept in zip(heads, gate.scale().tolist(), mask, strict=True) if kept}
    plan = to_plan(sites, scales, selection, settings.options, data)
    return LearningResult(plan, training_curves(log, data.task.metric), method.trains_model)


def train_pool(
    model: PreTrainedModel,
    groups: Sequence[PrunableGroup],
    pool: UnitPool,
    data: Data,
    selection: Units,
    checkpoint_dir: Path,
    on_progress: ProgressCallback = ignore_progress,
) -> LearningResult:
    """Train the gate of `selection.method` on the units of a pool and keep those that it selects within the budgets.

    The same seed on the same machine gives the same plan, and so does a run that was interrupted and started again
    with the same `checkpoint_dir`.

    Args:
        model: a float32 model, trained in place, unless the method is pipelined.
        groups: every group of the plan; those that are not in the pool keep all units.
        pool: the units that compete, and their budgets.
        data: encoded rows; units are selected by `Task.chooser`.
        selection: method, options, schedule, seed.
        checkpoint_dir: folder of the checkpoints, from which an interrupted run resumes.
        on_progress: called with (step, steps).

    Raises:
        UsageError: an option does not exist or is out of range.
        DivergedError: see `fit`.
    """
    method = METHODS[selection.method]
    if not data.task.reads_streams:  # training on streams uses the reported metric
        data = data.of_chooser()
    settings = _settings_of(selection, data)
    gate = settings.make_gate(pool.layers, pool.budget, selection.seed)
    log = fit(
        model,
        data,
        settings.schedule,
        Checkpoints(checkpoint_dir, {"units": pool.digest, **settings.options}),
        gating=GateSetup(gate, pool.bundles, trains_model=method.trains_model),
        on_progress=on_progress,
    )
    parts = gate.scale().detach().cpu().split(pool.layers)
    plans = [member.plan(part) for member, part in zip(pool.bundles, parts, strict=True)]
    record = record_of(selection, settings.options, data)
    plan = keep_all(groups).replace_groups(plans).model_copy(update=record)
    return LearningResult(plan, training_curves(log, data.task.metric), method.trains_model)


@dataclass(frozen=True)
class _Settings:
    """How a gate is trained.

    Attributes:
        method: name of the method.
        gate_options: options of its gate.
        schedule: length, optimizer and learning rate.
        pool: which heads compete.
        options: all options of the method by name.
    """

    method: str
    gate_options: MethodOptions
    schedule: Schedule
    pool: str
    options: Mapping[str, Any]

    def make_gate(self, layers: Sequence[int], keep: Keep | None, seed: int) -> Gate:
        """The gate over groups of so many units."""
        gate: Gate = METHODS[self.method].load()(layers, keep, self.schedule.steps, seed, self.gate_options)
        return gate


def _settings_of(selection: Heads | Units, data: Data) -> _Settings:
    """How the gate of a selection is trained.

    Raises:
        UsageError: an option does not exist or is out of range.
    """
    name, options = selection.method, selection.options
    check_option_names(name, options, option_names(name))
    method = METHODS[name]
    gate_options = read_options(name, options, method.load().options_class, data.task.name)
    schedule_options = read_options(name, options, ScheduleOptions)
    pool = read_options(name, options, PoolOptions)
    rows_per_step = selection.batch_size * process_count()
    steps = selection.training_steps or math.ceil((selection.epochs or method.epochs) * len(data.train) / rows_per_step)
    schedule = schedule_options.schedule(steps, selection.batch_size, selection.learning_rate, selection.seed)
    all_options = {**gate_options.model_dump(), **schedule_options.model_dump(), **pool.model_dump()}
    return _Settings(name, gate_options, schedule, pool.pool, all_options)
