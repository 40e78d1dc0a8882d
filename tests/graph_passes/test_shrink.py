"""For any plan, a shrunk graph computes what the gated graph computes, without the weights of dropped heads."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import BlockMask, Plan, PlanError, count_parameters, find_attention, shrink
from graph_passes.attention.gate_initializers import find_gates
from graph_passes.block_sparse.masks import REACH
from graph_passes.errors import GraphErrorCode
from graph_passes.flow.refusal import RefusalCode
from tests.graph_passes.graphs import assert_same, graph, operators, plan, shape, shrink_and_compare, site
from tests.graph_passes.layers import LAYERS, SEPARATE, SOME_LAYERS
from tests.graph_passes.masked_layer import HEADS, SIZES, MaskedLayer, random_mask
from tests.graph_passes.passes.checks import content
from tests.graph_passes.stacked_attention import keeping, stack
from tests.quick_cases import quick

KEPT = [[0, 2], [3], [1, 2, 3], [0, 1, 2, 3]]


def of_layer(name: str, kept: list[int], scale: list[float]) -> Plan:
    return plan(site(kept, kv_heads=LAYERS[name].kv_heads, scale=scale))


@pytest.mark.parametrize("kept", quick(KEPT, [[0, 2]]), ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_loses_exactly_the_weights_of_its_dropped_heads(name: str, kept: list[int]) -> None:
    layer = LAYERS[name]
    model = layer.graph()
    shrunk = shrink_and_compare(model, of_layer(name, kept, [0.5 + 0.25 * head for head in kept]))
    assert shrunk.refused == ()
    assert shrunk.folded == ("a",)
    assert not find_gates(shrunk.model.graph)
    dropped = tuple({0, 1, 2, 3} - set(kept))
    assert [(removed.group, removed.units) for removed in shrunk.removed] == [("a", dropped)] * bool(dropped)
    gate = find_gates(model.graph)["a"].const_value
    assert gate is not None
    before, after = shrunk.parameters
    assert before - after == layer.weights_of([0, 1, 2, 3]) - layer.weights_of(kept) + gate.size
    assert after == count_parameters(shrunk.model)


@pytest.mark.parametrize("name", SOME_LAYERS)
def test_a_layer_without_heads_computes_nothing(name: str) -> None:
    shrunk = shrink_and_compare(LAYERS[name].graph(), of_layer(name, [], []))
    assert shrunk.refused == ()
    assert not {"Softmax", "MatMul"} & {node.op_type for node in shrunk.model.graph}


@pytest.mark.parametrize("name", SOME_LAYERS)
def test_a_plan_that_keeps_every_head_changes_no_number_and_no_weight(name: str) -> None:
    model = LAYERS[name].graph()
    shrunk = shrink_and_compare(model, of_layer(name, [0, 1, 2, 3], []), tolerance=0)
    assert shrunk.removed == ()
    for weight, value in shrunk.model.graph.initializers.items():
        if value.dtype is not None and value.dtype.is_floating_point():
            assert shape(shrunk.model, weight) == shape(model, weight)


def test_a_refused_site_stays_gated_and_is_named() -> None:
    body = SEPARATE.body.replace("k1 = MatMul (x, Wk)", "k0 = MatMul (x, Wk)  k1, order = TopK <axis = -1> (k0, all)")
    shrunk = shrink_and_compare(graph(body, SEPARATE.weights, "int64[1] all = {12}"), plan([0, 2]))
    (refusal,) = shrunk.refused
    assert (refusal.op, refusal.code, refusal.sites) == ("TopK", RefusalCode.NO_RULE, {"a"})
    assert (shrunk.removed, shrunk.folded) == ((), ())
    assert shrunk.obstacle == f"a: {refusal}"
    assert shrink(SEPARATE.graph(), plan([0, 2])).obstacle is None
    several = dataclasses.replace(shrunk, refused=(refusal, refusal, refusal))
    assert several.obstacle == f"a: {refusal} (and 2 more)"


def test_outputs_keep_their_names_if_heads_are_returned() -> None:
    model = stack("one")
    heads = next(value for node in model.graph for value in node.outputs if value.name == "heads0")
    model.graph.outputs.append(heads)
    heads.dtype, heads.shape = ir.DataType.FLOAT, ir.Shape(["B", 4, "S", 3])
    every_head = Plan(sites=(dataclasses.replace(keeping(0, 1, 2, 3, name="one"), scale=(1.0,) * 4),))
    shrunk = shrink_and_compare(model, every_head)
    assert [value.name for value in shrunk.model.graph.outputs] == ["y", "heads0"]


MASKED = {
    "bidirectional": MaskedLayer(random_mask()),
    "causal": MaskedLayer(random_mask(), causal=True),
    "operator": MaskedLayer(random_mask(), form="operator"),
}


@pytest.mark.parametrize("kept", quick([(0, 1), (1,)], [(1,)]))
@pytest.mark.parametrize("name", MASKED)
def test_masked_sites_compute_the_blocks_of_the_heads_kept(name: str, kept: tuple[int, ...]) -> None:
    layer = MASKED[name]
    (whole,) = layer.plan.sites
    pruned = dataclasses.replace(whole, kept=kept, scale=(0.5, 2.0)[: len(kept)])
    heads = Plan(sites=(pruned,)).masked({"a": layer.mask})
    lowered = shrink_and_compare(layer.graph(), heads, SIZES)
    assert (lowered.lowered, lowered.dense) == (("a",), ())
    assert json.loads(lowered.model.metadata_props[REACH]) == {}  # Its inputs are not token ids.
    dense = shrink(layer.graph(), heads, lower=())
    assert (dense.lowered, dense.dense) == ((), ())
    assert_same(dense.model, lowered.model, SIZES, 1e-5)
    for result in (lowered, dense):
        assert [attention.heads for attention in find_attention(result.model)] == [len(kept)]


def test_blocks_that_no_head_uses_are_reported() -> None:
    layer = MaskedLayer(random_mask(0.7, unused=(1, 2)))
    shrunk = shrink_and_compare(layer.graph(), layer.plan, SIZES)
    assert shrunk.unused == {"a": 2}


def test_a_site_that_cannot_be_lowered_is_reported() -> None:
    layer = MaskedLayer(random_mask())
    entries = Plan(sites=layer.plan.sites).masked({"a": BlockMask(layer.mask.kept, 1)})
    shrunk = shrink(layer.graph(), entries)
    (refusal,) = shrunk.dense
    assert (refusal.sites, refusal.code) == ({"a"}, RefusalCode.UNSUPPORTED_MASK)
    assert "Softmax" in operators(shrunk.model)


def test_a_site_without_a_mask_cannot_be_lowered() -> None:
    layer = MaskedLayer(random_mask())
    graph = layer.graph()
    before = content(graph)
    with pytest.raises(ValueError, match=r"^lower: b: .*; "):
        shrink(graph, layer.plan, lower=["b"])
    assert content(graph) == before


def test_a_head_whose_mask_keeps_nothing_is_removed() -> None:
    mask = random_mask()
    mask.kept[1] = False
    layer = MaskedLayer(mask)
    shrunk = shrink_and_compare(layer.graph(), layer.plan, SIZES)
    assert [(removed.group, removed.units) for removed in shrunk.removed] == [("a", (1,))]
    assert shrunk.plan.sites[0].kept == (0,)
    again = shrink(layer.graph(), shrunk.plan)
    assert content(again.model) == content(shrunk.model)


def test_causality_can_leave_a_head_without_blocks() -> None:
    mask = random_mask()
    mask.kept[1] = ~np.tri(4, dtype=np.bool_)
    assert shrink(MaskedLayer(mask, causal=True).graph(), MaskedLayer(mask, causal=True).plan).plan.sites[0].kept == (
        0,
    )
    assert shrink(MaskedLayer(mask).graph(), MaskedLayer(mask).plan).plan.sites[0].kept == tuple(range(HEADS))


def test_a_lowered_graph_refuses_another_mask() -> None:
    layer = MaskedLayer(random_mask())
    lowered = shrink(layer.graph(), layer.plan).model
    with pytest.raises(PlanError) as error:
        shrink(lowered, layer.plan.masked({"a": random_mask(seed=1)}))
    assert (error.value.code, error.value.details) == (GraphErrorCode.MASK_MISSING, {"site": "a"})
