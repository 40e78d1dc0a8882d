"""For any plan of a family outside the attention interface, the shrunk graph computes what the gated model does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.export import export_reference
from compressor.units import PrunableGroup, find_groups, gated, keep_all
from graph_passes import Plan, load, shrink
from graph_passes.attention.gate_initializers import find_gates
from tests.graph_passes.exporters import trace
from tests.graph_passes.graphs import error, run
from tests.projection_zoo import FAMILIES
from tests.random_plans import random_groups

TOLERANCE = 1e-4
REFUSED = frozenset(("funnel", "prophetnet"))
"""Families of which some plans are refused by name."""
FIXED = frozenset(("canine", "cpmant", "funnel"))
"""Families whose export holds at its own size only."""
SIZES = ((3, 7), (2, 11))
"""Batch sizes and lengths; the graphs are exported at the first."""


def numbers(inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in inputs.items()}


def plans(groups: Sequence[PrunableGroup]) -> list[Plan]:
    """Two random plans, and one that keeps half of every group."""
    halves = [group.plan(group.first(group.counts[len(group.counts) // 2])) for group in groups]
    return [*(random_groups(groups, np.random.default_rng(seed)) for seed in (0, 1)), Plan(groups=tuple(halves))]


def prove(name: str, model: PreTrainedModel, plan: Plan, path: Path) -> None:
    """Check that the units of a plan are gone, and that the graph computes the gated model at two sizes."""
    shrunk = shrink(load(path), plan)
    assert name in REFUSED or shrunk.refused == ()
    assert all(refusal.op and refusal.why for refusal in shrunk.refused)
    if shrunk.refused:
        return
    # The scale of a site's only head has no axis along which a weight could be scaled.
    assert all(
        gate.shape is not None and gate.shape.numpy() == (1, 1) for gate in find_gates(shrunk.model.graph).values()
    )
    assert shrunk.parameters[1] < shrunk.parameters[0]
    graph_inputs = {value.name for value in shrunk.model.graph.inputs}
    for batch, length in SIZES[:1] if name in FIXED else SIZES:
        inputs = FAMILIES[name].inputs(batch, length)
        with torch.no_grad(), gated(model, plan):
            outputs = model(**inputs)
        feeds = {name: value for name, value in numbers(inputs).items() if name in graph_inputs}
        names = [value.name or "" for value in shrunk.model.graph.outputs]
        assert error(run(shrunk.model, feeds), [outputs[name].numpy() for name in names]) <= TOLERANCE


@pytest.mark.zoo
@pytest.mark.parametrize("name", FAMILIES)
def test_a_shrunk_graph_equals_the_gated_model(name: str, tmp_path: Path) -> None:
    model, inputs = FAMILIES[name].model(), FAMILIES[name].inputs(*SIZES[0])
    groups = find_groups(model, inputs)
    export_reference(model, keep_all(groups), inputs, tmp_path / "graph.onnx")
    for plan in plans(groups):
        prove(name, model, plan, tmp_path / "graph.onnx")


def test_a_graph_without_gates_is_matched_by_the_names_of_projections(tmp_path: Path) -> None:
    model, inputs = FAMILIES["mpnet"].model(), FAMILIES["mpnet"].inputs(*SIZES[0])
    groups = [group for group in find_groups(model, inputs) if group.site is not None]
    plan = random_groups(groups, np.random.default_rng(1))
    graph = trace(model, inputs, tmp_path / "graph.onnx", opset=17, attention="eager")
    shrunk = shrink(graph, plan)
    assert shrunk.refused == ()
    assert {removed.group for removed in shrunk.removed} == {site.name for site in plan.sites if site.dropped}
    with torch.no_grad(), gated(model.eval(), plan):  # the exporter leaves it in training mode
        expected = model(**inputs).logits.numpy()
    assert error(run(shrunk.model, numbers(inputs)), [expected]) <= TOLERANCE
