"""The one law: shrunk computes what gated computes, for any plan, and loses exactly the weights of dropped heads."""

from __future__ import annotations

import pytest

from graph_passes import Plan, count_parameters
from graph_passes.attention.gate_initializers import find_gates
from tests.graph_passes.graphs import plan, shape, shrink_and_compare, site
from tests.graph_passes.layers import LAYERS

KEPT = [[0, 2], [3], [1, 2, 3], [0, 1, 2, 3]]


def of_layer(name: str, kept: list[int], scale: list[float]) -> Plan:
    return plan(site(kept, kv_heads=LAYERS[name].kv_heads, scale=scale))


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_loses_exactly_the_weights_of_its_dropped_heads(name: str, kept: list[int]) -> None:
    layer = LAYERS[name]
    model = layer.graph()
    shrunk = shrink_and_compare(model, of_layer(name, kept, [0.5 + 0.25 * head for head in kept]))
    assert shrunk.refused == ()
    assert shrunk.folded == ("a",)
    assert not find_gates(shrunk.model.graph)
    assert [(one.site, one.heads) for one in shrunk.removed] == [("a", tuple({0, 1, 2, 3} - set(kept)))] * (
        len(kept) < 4
    )
    gate = find_gates(model.graph)["a"].const_value
    assert gate is not None
    before, after = shrunk.parameters
    assert before - after == layer.weights_of([0, 1, 2, 3]) - layer.weights_of(kept) + gate.size
    assert after == count_parameters(shrunk.model)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_without_heads_computes_nothing_of_it(name: str) -> None:
    shrunk = shrink_and_compare(LAYERS[name].graph(), of_layer(name, [], []))
    assert shrunk.refused == ()
    assert not {"Softmax", "MatMul"} & {node.op_type for node in shrunk.model.graph}


@pytest.mark.parametrize("name", LAYERS)
def test_shrinking_by_a_plan_that_keeps_all_changes_no_number_and_no_weight(name: str) -> None:
    model = LAYERS[name].graph()
    shrunk = shrink_and_compare(model, of_layer(name, [0, 1, 2, 3], []), tolerance=0)
    assert shrunk.removed == ()
    for weight, value in shrunk.model.graph.initializers.items():
        if value.dtype is not None and value.dtype.is_floating_point():
            assert shape(shrunk.model, weight) == shape(model, weight)
