"""Properties that every method under a budget has, on tiny models."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.config.methods import METHODS
from compressor.config.values import GroupBy
from compressor.graph.file import GraphFile
from compressor.progress import ignore_progress
from compressor.selection.allocation import Curve
from compressor.selection.pruners.base import Pruner, PruningInputs
from compressor.units import PrunableGroup, find_groups, gated, keep_all
from compressor.units.groups import linear_of
from compressor.units.layers import linear_weight
from graph_passes import Plan
from tests.selection.tiny import have_same_weights
from tests.zoo import FAMILIES, pair, text

PRUNERS: dict[str, type[Pruner[Any]]] = {
    name: method.load() for name, method in METHODS.items() if method.kind == "budget"
}
"""Every registered method that removes units under a budget."""
PAIRS = ("t5", "bart", "marian")
"""Families of encoder-decoders."""
Batches = Sequence[dict[str, Tensor]]
Result = tuple[dict[str, Curve], dict[str, list[tuple[int, ...]]], PreTrainedModel]
"""Losses, kept units at every number of units, and the model that was pruned."""


def pruning_inputs(
    model: PreTrainedModel | GraphFile,
    store: Path,
    batches: Batches | None = None,
    outputs: Sequence[str] = ("logits",),
    group_by: GroupBy = "kv",
) -> PruningInputs:
    """24 rows for statistics and 4 held out: texts, unless there are batches, of which the last one is held out."""
    batches = batches or [text(12, seed=1), text(12, length=6, seed=2), text(4, seed=3)]
    if isinstance(model, GraphFile):
        groups = model.groups({}, "eager", group_by)
    else:
        groups = find_groups(model, batches[-1], group_by=group_by)
    return PruningInputs(model, groups, batches[:-1], batches[-1:], outputs, 0, store)


def family_inputs(family: str, store: Path) -> PruningInputs:
    """The model of a family with its rows."""
    model, _ = FAMILIES[family](0)
    batches = [pair(16, seed=1), pair(16, seed=2), pair(4, seed=3)] if family in PAIRS else None
    return pruning_inputs(model, store, batches)


def ranked(method: type[Pruner[Any]], inputs: PruningInputs) -> Pruner[Any]:
    """The method with its units ranked."""
    pruner = method(inputs)
    pruner.rank(ignore_progress)
    return pruner


def plan_of(pruner: Pruner[Any], counts: Mapping[str, int]) -> Plan:
    """The plan that keeps these numbers of units."""
    groups = pruner.inputs.groups
    return keep_all(groups).replace_groups(
        [group.plan(pruner.kept(group, counts[group.name])) for group in groups if group.name in counts]
    )


def random_counts(groups: Sequence[PrunableGroup], seed: int = 0) -> dict[str, int]:
    """Numbers of units between none and all; none in the second group, all in the last one."""
    rng = np.random.default_rng(seed)
    counts = {group.name: int(rng.choice(group.counts[1:-1])) for group in groups}
    return {**counts, groups[1].name: 0, groups[-1].name: groups[-1].units}


def result_of(method: type[Pruner[Any]], inputs: PruningInputs) -> Result:
    """What a method returns from beginning to end, on a copy of the model."""
    pruner = ranked(method, replace(inputs, model=copy.deepcopy(inputs.model)))
    losses = pruner.losses(ignore_progress)
    kept = {group.name: [pruner.kept(group, count) for count in group.counts] for group in inputs.groups}
    pruner.finish(random_counts(inputs.groups), ignore_progress)
    return losses, kept, pruner.inputs.model


def are_equal(first: Result, second: Result) -> bool:
    """Whether two results are the same, bit for bit."""
    return first[:2] == second[:2] and have_same_weights(first[2], second[2])


def check_kept_counts(pruner: Pruner[Any]) -> None:
    """Every group keeps exactly as many units as requested, whole bundles, and equally many of each part."""
    for group in pruner.inputs.groups:
        for count in group.counts:
            kept = pruner.kept(group, count)
            assert kept == tuple(sorted(set(kept)))
            assert len(kept) == count
            assert set(kept) <= set(range(group.units))
            bundles = {unit // group.bundle for unit in kept}
            assert len(bundles) * group.bundle == count
            size = group.units // group.parts
            assert np.bincount([unit // size for unit in kept], minlength=group.parts).tolist() == (
                [count // group.parts] * group.parts
            )
            assert kept == pruner.kept(group, count)


def check_dropped_units_have_no_effect(pruner: Pruner[Any]) -> None:
    """After `finish`, gates change nothing, and the columns of dropped units are zero."""
    inputs = pruner.inputs
    counts = random_counts(inputs.groups)
    batch = inputs.held_out[0]
    with torch.no_grad():
        dense = inputs.model(**batch)[inputs.outputs[0]]
        pruner.finish(counts, ignore_progress)
        plan = plan_of(pruner, counts)
        pruned = inputs.model(**batch)[inputs.outputs[0]]
        with gated(inputs.model, plan):
            gated_output = inputs.model(**batch)[inputs.outputs[0]]
    torch.testing.assert_close(gated_output, pruned, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(pruned, dense, atol=1e-3)
    for group in inputs.groups:
        columns = linear_weight(linear_of(inputs.model, group)).unflatten(1, (group.units, group.width))
        dropped = sorted(set(range(group.units)) - set(pruner.kept(group, counts[group.name])))
        assert columns[:, dropped].count_nonzero() == 0


def check_labels_are_not_read(method: type[Pruner[Any]], family: str, store: Path) -> None:
    """Rows without labels and rows with different labels give the same result."""
    inputs = family_inputs(family, store)
    inputs = replace(inputs, groups=inputs.groups[:3])
    expected = result_of(method, replace(inputs, store=store / "none"))
    for seed in (0, 1):
        statistics, held_out = (_labelled(batches, family, seed) for batches in (inputs.statistics, inputs.held_out))
        labelled = replace(inputs, statistics=statistics, held_out=held_out, store=store / str(seed))
        assert are_equal(result_of(method, labelled), expected)


def _labelled(batches: Sequence[Mapping[str, Tensor]], family: str, seed: int) -> list[dict[str, Tensor]]:
    """The batches with random labels: one for each row of a classifier, else one for each token."""
    generator = torch.Generator().manual_seed(seed)
    labelled = []
    for batch in batches:
        mask = batch["attention_mask"][:, 0] if family == "bert" else batch["attention_mask"]
        labels = torch.randint(0, 2, mask.shape, generator=generator).masked_fill(mask == 0, -100)
        labelled.append({**batch, "labels": labels})
    return labelled


class InterruptionError(Exception):
    """Ends a method at a call of its progress callback."""


class Interrupter:
    """A progress callback that interrupts at its `calls`-th call."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, finished: int, total: int) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise InterruptionError
