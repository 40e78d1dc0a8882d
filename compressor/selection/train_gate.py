"""Select units by gradient: train a gate together with the model, or on a frozen model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedModel

from compressor.config.methods import METHODS, Method
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
from compressor.selection.plan_and_curves import LearningResult, recorded, training_curves
from compressor.selection.search import all_heads
from compressor.selection.unit_pool import UnitPool
from compressor.tasks.data import Data
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import GateSetup, fit
from compressor.training.schedule import Schedule
from compressor.units import Bundles, PrunableGroup, Site, keep_all, keep_only
from graph_passes import Plan


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
    training = _GateTraining.of(selection, data)
    layers, kinds, pool = [site.heads for site in sites], [site.kind for site in sites], training.pool
    if pool == "model":
        gate = training.make_gate(layers, keep, selection.seed)
    else:
        only = None if pool == "kind" else pool
        gate = PerKindGate(training.make_gate, layers, kinds, keep, selection.seed, only=only)
    log = training.fit(model, gate, sites, Checkpoints(checkpoint_dir, {"keep": keep, **training.options}), on_progress)
    heads, mask = all_heads(sites), gate.harden().tolist()
    scales = {head: scale for head, scale, kept in zip(heads, gate.scale().tolist(), mask, strict=True) if kept}
    return training.result(keep_only(sites, scales), log)


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
    if not data.task.reads_streams:  # training on streams uses the reported metric
        data = data.of_chooser()
    training = _GateTraining.of(selection, data)
    gate = training.make_gate(pool.layers, pool.budget, selection.seed)
    checkpoints = Checkpoints(checkpoint_dir, {"units": pool.digest, **training.options})
    log = training.fit(model, gate, pool.bundles, checkpoints, on_progress)
    parts = gate.scale().detach().cpu().split(pool.layers)
    plans = [member.plan(part) for member, part in zip(pool.bundles, parts, strict=True)]
    return training.result(keep_all(groups).replace_groups(plans), log)


@dataclass(frozen=True)
class _GateTraining:
    """How the gate of a selection is trained.

    Attributes:
        selection: method and seed.
        data: encoded rows.
        gate_options: options of the gate.
        schedule: length, optimizer and learning rate.
        pool: which heads compete.
        options: all options of the method by name.
    """

    selection: Heads | Units
    data: Data
    gate_options: MethodOptions
    schedule: Schedule
    pool: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, selection: Heads | Units, data: Data) -> Self:
        """Read the options of a selection; raise UsageError if one does not exist or is out of range."""
        name, options = selection.method, selection.options
        check_option_names(name, options, option_names(name))
        method = METHODS[name]
        gate_options = read_options(name, options, method.load().options_class, data.task.name)
        schedule_options = read_options(name, options, ScheduleOptions)
        pool = read_options(name, options, PoolOptions)
        schedule = schedule_options.schedule_of_epochs(selection, len(data.train), method.epochs)
        all_options = {**gate_options.model_dump(), **schedule_options.model_dump(), **pool.model_dump()}
        return cls(selection, data, gate_options, schedule, pool.pool, all_options)

    @property
    def method(self) -> Method:
        return METHODS[self.selection.method]

    def make_gate(self, layers: Sequence[int], keep: Keep | None, seed: int) -> Gate:
        """The gate over groups of so many units."""
        gate: Gate = self.method.load()(layers, keep, self.schedule.steps, seed, self.gate_options)
        return gate

    def fit(
        self,
        model: PreTrainedModel,
        gate: Gate,
        groups: Sequence[Site | Bundles],
        checkpoints: Checkpoints,
        on_progress: ProgressCallback,
    ) -> list[dict[str, Any]]:
        """Train the gate, and the model unless the method is pipelined; the log of the training."""
        setup = GateSetup(gate, groups, trains_model=self.method.trains_model)
        return fit(model, self.data, self.schedule, checkpoints, gating=setup, on_progress=on_progress)

    def result(self, plan: Plan, log: Sequence[Mapping[str, Any]]) -> LearningResult:
        """The plan with its record, and the curves of the training."""
        plan = recorded(plan, self.selection, self.options, self.data)
        return LearningResult(plan, training_curves(log, self.data.task.metric), self.method.trains_model)
