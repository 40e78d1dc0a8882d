"""Heads and neurons that compete for a budget: their bundles, and what each bundle costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from transformers import PreTrainedModel

from compressor.progress import ProgressCallback, ignore_progress
from compressor.selection.gates.capacity import UnitBudget
from compressor.selection.pruners.base import Batch
from compressor.selection.pruners.mask_gradients import mask_gradients
from compressor.units import Bundles, PrunableGroup


@dataclass(frozen=True)
class UnitPool:
    """Bundles of units that compete for budgets.

    Attributes:
        bundles: the groups, each in bundles.
        costs: for each budget, the cost of each bundle, in the order of `bundles`.
        limits: the budgets, without what is not in the pool.
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
        """What the bundles that a gate keeps may cost."""
        return UnitBudget(self.costs, self.limits)

    def to_json(self) -> dict[str, Any]:
        """The pool as JSON, without the sizes of its groups."""
        orders = {member.name: member.order for member in self.bundles}
        return {"orders": orders, "costs": self.costs, "limits": self.limits}

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
    """The groups in bundles: heads in their own order, neurons from the most important to the least.

    Neighbouring neurons have nothing in common, so a bundle of them would hold important and unimportant ones. Ordered
    by importance, a bundle holds neurons of about equal importance. Importance is the Fisher information of a mask on
    the model's own answers, as in `FisherPruner`: the sum over rows of the squared gradient.

    Args:
        model: the model; it runs in evaluation mode, and is restored afterwards.
        groups: the groups.
        batches: rows, whose labels are not read.
        outputs: names of the model's outputs that the task scores.
        on_progress: called with (batches, all batches).
    """
    neurons = [group for group in groups if group.type == "neurons"]
    gradients = mask_gradients(model, neurons, batches, outputs, on_progress) if neurons else {}
    orders = {
        name: np.argsort(-np.square(gradient.astype(np.float64)).sum(0), kind="stable").tolist()
        for name, gradient in gradients.items()
    }
    return [Bundles(group, tuple(orders.get(group.name, range(group.units)))) for group in groups]
