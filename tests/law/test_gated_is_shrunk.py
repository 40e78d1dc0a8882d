"""For any plan of any family, the shrunk graph computes what the gated graph computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compressor.units import Attention, keep_all
from graph_passes import Plan, load, shrink
from graph_passes.attention.gate_initializers import find_gates
from tests.law.outputs import relative_error, run
from tests.law.references import Reference, gated, reference, write_graph
from tests.law.removed_parameters import removed_parameters
from tests.random_plans import random_groups
from tests.zoo import FAMILIES

TOLERANCE = 1e-4
FORMS: list[tuple[int, Attention]] = [(18, "eager"), (18, "sdpa"), (23, "eager"), (23, "sdpa")]
CASES: list[tuple[str, int, Attention]] = [("gpt2", 18, "sdpa")]
"""Fused projections in one form; `make zoo` proves all families in all forms."""


def prove(family: str, graph: Reference, plan: Plan) -> None:
    """Check one plan: equal outputs, the heads that are removed, and exactly their parameters removed."""
    feeds = list(graph.feeds())
    shrunk = shrink(load(graph.path), plan)
    assert not shrunk.refused
    assert not find_gates(shrunk.model.graph)
    assert {removed.group: removed.units for removed in shrunk.removed} == {
        group.name: group.dropped for group in plan.groups if group.dropped
    }
    outputs = run(write_graph(shrunk.model, "shrunk.onnx"), feeds)
    assert relative_error(run(gated(graph.path, plan), feeds), outputs) <= TOLERANCE
    removed = removed_parameters(family, plan)
    crossing = [site for site in plan.sites if site.kind == "cross"]
    if crossing and not any(site.kept for site in crossing):
        # Nothing reads the encoder: all of it is removed, even the heads that its sites keep.
        decoder = Plan(groups=tuple(group for group in plan.groups if "encoder" not in group.name.split(".")))
        encoder = sum(size for name, size in graph.dense.items() if "encoder" in name.split("."))
        removed = removed_parameters(family, decoder) + encoder
    assert sum(graph.dense.values()) - sum(graph.weights(shrunk.model).values()) == removed


@pytest.mark.parametrize(("family", "opset", "attention"), CASES)
def test_shrunk_graph_equals_gated_graph(family: str, opset: int, attention: Attention) -> None:
    graph = reference(family, opset, attention)
    for seed in range(2):
        prove(family, graph, random_groups(graph.groups, np.random.default_rng(seed)))


@pytest.mark.zoo
@pytest.mark.parametrize(("opset", "attention"), FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_shrunk_graph_equals_gated_graph_in_every_form(family: str, opset: int, attention: Attention) -> None:
    graph = reference(family, opset, attention)
    for seed in [0, 1, 2, *range(100, 120)]:
        prove(family, graph, random_groups(graph.groups, np.random.default_rng(seed)))


@pytest.mark.zoo
@pytest.mark.parametrize("family", ["t5", "whisper", "bart", "marian"])
def test_an_encoder_that_nothing_reads_is_removed_entirely(family: str) -> None:
    graph = reference(family, 18, "eager")
    plan = random_groups(graph.groups, np.random.default_rng(5))
    prove(
        family,
        graph,
        plan.replace_groups(replace(site, kept=(), scale=()) for site in plan.sites if site.kind == "cross"),
    )


@pytest.mark.zoo
@pytest.mark.parametrize("family", ["all_attention", "transformer_xl"])
def test_a_graph_with_memory_loses_every_head(family: str) -> None:
    graph = reference(family, 23, "eager")
    groups = [replace(group, kept=(), scale=()) for group in keep_all(graph.groups).groups]
    prove(family, graph, Plan(groups=tuple(groups)))
