"""Graphs with equally many query heads of every key/value head: gated equals shrunk, and counts decide the form."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from compressor.engines.export import rehearsal_plan
from compressor.pruning.costs import keep_counts
from compressor.units import Attention, PrunableGroup, find_groups, keep_all
from graph_passes import Plan, count_parameters, find_attention, load, shrink
from tests.law.outputs import relative_error, run
from tests.law.references import gated, grouped, write_graph
from tests.zoo import GROUPED, text

FORMS = [
    (18, "eager"),
    pytest.param(18, "sdpa", marks=pytest.mark.zoo),
    pytest.param(23, "sdpa", marks=pytest.mark.zoo),
]


def heads_of(groups: list[PrunableGroup]) -> list[PrunableGroup]:
    return [group for group in groups if group.type == "heads"]


def random_queries(groups: list[PrunableGroup], count: int, rng: np.random.Generator) -> Plan:
    """A plan that keeps `count` query heads at each site, as many of every key/value head."""
    plans = []
    for group in heads_of(groups):
        size = group.units // group.parts
        parts = [part * size + rng.permutation(size)[: count // group.parts] for part in range(group.parts)]
        plans.append(group.plan(sorted(int(unit) for unit in np.concatenate(parts))))
    return keep_all(groups).replace_groups(plans)


@pytest.mark.zoo
@pytest.mark.parametrize(("opset", "attention"), FORMS)
def test_counts_decide_the_form_of_the_graph(opset: int, attention: Attention) -> None:
    model, inputs = GROUPED(0)
    groups, path = find_groups(model, inputs, attention=attention, group_by="query"), grouped(opset, attention)
    feeds = [
        {name: value.numpy() for name, value in text(batch=batch, length=length).items()}
        for batch, length in ((3, 9), (1, 5))
    ]
    rng = np.random.default_rng(0)
    for count in heads_of(groups)[0].counts:
        plan = random_queries(groups, count, rng)
        shrunk = shrink(load(path), plan)
        assert not shrunk.refused
        outputs = run(write_graph(shrunk.model, "shrunk-queries.onnx"), feeds)
        assert relative_error(run(gated(path, plan), feeds), outputs) <= 1e-4
        counts = {group.name: count for group in heads_of(groups)}
        timed = shrink(load(path), keep_counts(keep_all(groups), groups, counts)).model
        assert count_parameters(timed) == count_parameters(shrunk.model)
        assert operators(timed) == operators(shrunk.model)
        if count:
            assert {(site.heads, site.kv_heads) for site in find_attention(shrunk.model)} == {(count, 2)}


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


@pytest.mark.zoo
def test_query_heads_that_are_left_unevenly_have_keys_of_their_own() -> None:
    model, inputs = GROUPED(0)
    groups, path = find_groups(model, inputs), grouped(18, "eager")
    feeds = [{name: value.numpy() for name, value in inputs.items()}]
    for kept in ((0, 1, 2, 6), (1, 4, 5, 7), (3,), (2, 5, 6)):
        plan = keep_all(groups)
        plan = plan.replace_groups(replace(site, kept=kept, scale=()) for site in plan.sites)
        outputs = run(write_graph(shrink(load(path), plan).model, "shrunk-unevenly.onnx"), feeds)
        assert relative_error(run(gated(path, plan), feeds), outputs) <= 1e-4


def test_a_rehearsal_drops_the_fewest_units() -> None:
    model, inputs = GROUPED(0)
    kept = {}
    for group_by in ("kv", "query"):
        plan = rehearsal_plan(find_groups(model, inputs, group_by=group_by))
        kept[group_by] = {site.kept for site in plan.sites}
        assert {neurons.dropped for neurons in plan.feed_forwards} == {(0,)}
    assert kept == {"kv": {(4, 5, 6, 7)}, "query": {(1, 2, 3, 5, 6, 7)}}
