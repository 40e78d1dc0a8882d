"""A pool of the heads and neurons of a tiny classifier, with costs of their own."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from compressor.models.forwards import tensors_of
from compressor.progress import ProgressCallback, ignore_progress
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.selection.train_gate import UnitPool, make_bundles, train_pool
from compressor.units import PrunableGroup, find_groups
from graph_passes import Plan
from tests.selection import tiny

NEURONS = 68
"""Eight bundles of eight, and four neurons that are left over."""
HEAD, BUNDLE = 50.0, 22.0
"""Costs of a head and of a bundle of neurons."""


def classifier(seed: int = 0) -> PreTrainedModel:
    return tiny.classifier(seed, neurons=NEURONS)


def groups_of(model: PreTrainedModel) -> list[PrunableGroup]:
    return find_groups(model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)})


def make_pool(model: PreTrainedModel, share: float, types: tuple[str, ...] = ("heads", "neurons")) -> UnitPool:
    """The units of some types, and a budget of a share of their cost."""
    rows = tiny.data()
    batch = tensors_of(rows.task.collate(list(rows.train)))
    batches = [{name: value for name, value in batch.items() if name != "labels"}]
    groups = [group for group in groups_of(model) if group.type in types]
    bundles = tuple(make_bundles(model, groups, batches, ("logits",)))
    costs = tuple(HEAD if member.group.type == "heads" else BUNDLE for member in bundles for _ in range(member.count))
    return UnitPool(bundles, (costs,), (share * sum(costs),))


def cost(plan: Plan) -> float:
    """The cost of a plan, as the pool counts it."""
    neurons = sum(len(group.kept) // 8 for group in plan.feed_forwards)
    return HEAD * plan.heads_kept + BUNDLE * neurons


def learn(
    folder: Path,
    method: str = "dsp",
    share: float = 0.5,
    seed: int = 0,
    on_progress: ProgressCallback = ignore_progress,
    model: PreTrainedModel | None = None,
    types: tuple[str, ...] = ("heads", "neurons"),
    steps: int = 6,
) -> SelectedPlan:
    """Learn a plan within a budget in a few steps."""
    network = classifier() if model is None else model
    pool = make_pool(network, share, types)
    config = tiny.units(method=method, seed=seed, training_steps=steps, options={"evaluations": steps // 2})
    return train_pool(network, groups_of(network), pool, tiny.data(), config, folder, on_progress)
