"""Select units by gradient: train a gate on heads, or on heads and neurons that compete for a budget."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from transformers import PreTrainedModel

from compressor.config.methods import METHODS
from compressor.config.steps import Heads, Units
from compressor.progress import ProgressCallback, ignore_progress
from compressor.selection.gates import Gate, PerKindGate
from compressor.selection.gates.base import Keep
from compressor.selection.gates.capacity import UnitBudget
from compressor.selection.options import check_option_names, option_names, read_method_options
from compressor.selection.plan_and_curves import SelectedPlan, recorded, training_curves
from compressor.selection.pruners.base import Batch
from compressor.selection.pruners.fisher import mask_gradients
from compressor.selection.search import all_heads
from compressor.tasks.data import Data
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import GateSetup, fit
from compressor.units import Bundles, PrunableGroup, Site, keep_all, keep_only
from graph_passes import Plan


@dataclass(frozen=True)
class UnitPool:
    """Bundles of units that compete for budgets.

    Attributes:
        costs: for each budget, the cost of each bundle, in the order of `bundles`.
        limits: the budgets, without the cost of everything outside the pool.
    """

    bundles: tuple[Bundles, ...]
    costs: tuple[tuple[float, ...], ...]
    limits: tuple[float, ...]

    @property
    def layers(self) -> list[int]:
        """Number of bundles of each group."""
        return [member.count for member in self.bundles]

    @property
    def budget(self) -> UnitBudget:
        """The most that the bundles which a gate keeps may cost."""
        return UnitBudget(self.costs, self.limits)

    def to_json(self) -> dict[str, Any]:
        """The pool as JSON, without the sizes of its groups."""
        return {"orders": {part.name: part.order for part in self.bundles}, "costs": self.costs, "limits": self.limits}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], groups: Sequence[PrunableGroup]) -> Self:
        """The pool that `to_json` gave, with its groups among `groups`."""
        by_name = {group.name: group for group in groups}
        bundles = tuple(Bundles(by_name[name], tuple(order)) for name, order in content["orders"].items())
        return cls(bundles, tuple(map(tuple, content["costs"])), tuple(content["limits"]))

    @property
    def digest(self) -> str:
        """Hash of everything that the pool holds."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()


def make_bundles(
    model: PreTrainedModel,
    groups: Sequence[PrunableGroup],
    batches: Sequence[Batch],
    outputs: Sequence[str],
    on_progress: ProgressCallback = ignore_progress,
) -> list[Bundles]:
    """The groups in bundles: heads in order, neurons from the most important to the least.

    So a bundle holds neurons of about equal importance. Importance is the Fisher information of a mask on the model's
    own answers, as in `FisherPruner`: the sum over rows of the squared gradient.

    Args:
        batches: rows, whose labels are not read.
    """
    neurons = [group for group in groups if group.type == "neurons"]
    gradients = mask_gradients(model, neurons, batches, outputs, on_progress) if neurons else {}
    orders = {
        name: np.argsort(-np.square(gradient.astype(np.float64)).sum(0), kind="stable").tolist()
        for name, gradient in gradients.items()
    }
    return [Bundles(group, tuple(orders.get(group.name, range(group.units)))) for group in groups]


def train_gate(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    selection: Heads,
    keep: int | None,
    checkpoint_dir: Path,
    on_progress: ProgressCallback,
) -> SelectedPlan:
    """Train the gate of `selection.method` and keep the heads that it selects, at their scales; see `learn`.

    Without a number of heads, the heads are kept that the penalty leaves open.

    Raises:
        UsageError: an option does not exist or is out of range.
        DivergedError: see `fit`.
    """
    training = _GateTraining(selection, data)
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
) -> SelectedPlan:
    """Train the gate of `selection.method` on the units of a pool and keep those that it selects within the budgets.

    The same seed on the same machine gives the same plan, and so does a run that was interrupted and started again
    with the same `checkpoint_dir`. Groups that are not in the pool keep all units.

    Raises:
        UsageError: an option does not exist or is out of range.
        DivergedError: see `fit`.
    """
    if not data.task.reads_streams:  # training on streams uses the reported metric
        data = data.of_chooser()
    training = _GateTraining(selection, data)
    gate = training.make_gate(pool.layers, pool.budget, selection.seed)
    checkpoints = Checkpoints(checkpoint_dir, {"units": pool.digest, **training.options})
    log = training.fit(model, gate, pool.bundles, checkpoints, on_progress)
    parts = gate.scale().detach().cpu().split(pool.layers)
    plans = [member.plan(part) for member, part in zip(pool.bundles, parts, strict=True)]
    return training.result(keep_all(groups).replace_groups(plans), log)


class _GateTraining:
    """Trains the gate of a selection; UsageError if an option does not exist or is out of range."""

    def __init__(self, selection: Heads | Units, data: Data) -> None:
        name, options = selection.method, selection.options
        check_option_names(name, options, option_names(name))
        self._selection, self._data, self._method = selection, data, METHODS[name]
        self._gate_options, schedule, pool = models = read_method_options(name, options, data.task.name)
        self._schedule = schedule.schedule_of_epochs(selection, len(data.train), self._method.epochs)
        self.pool: str = pool.pool
        self.options: dict[str, Any] = {name: value for model in models for name, value in model.model_dump().items()}

    def make_gate(self, layers: Sequence[int], keep: Keep | None, seed: int) -> Gate:
        """The gate over groups of so many units."""
        gate: Gate = self._method.load()(layers, keep, self._schedule.steps, seed, self._gate_options)
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
        setup = GateSetup(gate, groups, trains_model=self._method.trains_model)
        return fit(model, self._data, self._schedule, checkpoints, gating=setup, on_progress=on_progress)

    def result(self, plan: Plan, log: Sequence[Mapping[str, Any]]) -> SelectedPlan:
        """The plan with its record, and the curves of the training."""
        plan = recorded(plan, self._selection, self.options, self._data)
        return SelectedPlan(plan, training_curves(log, self._data.task.metric), self._method.trains_model)
