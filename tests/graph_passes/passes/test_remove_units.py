"""Heads whose gate is zero are cut out of every tensor that holds them."""

from __future__ import annotations

import pytest

from graph_passes.passes import RemoveUnits
from tests.graph_passes.graphs import graph, operators, shape
from tests.graph_passes.layers import SEPARATE, SOME_LAYERS
from tests.graph_passes.passes.checks import assert_untouched, rewritten
from tests.graph_passes.passes.gated_layers import gate, gated_layer, set_gate


@pytest.mark.parametrize("name", SOME_LAYERS)
def test_dropped_heads_are_cut_and_the_numbers_stay(name: str) -> None:
    model = gated_layer(name, [1, 0, 1, 0])
    result = rewritten(RemoveUnits(), model)
    assert result.report.refused == ()
    assert result.report.nodes > 0
    assert set(gate(result.model)) == {1.0}
    assert len(gate(result.model)) == len(gate(model)) // 2


def test_weights_are_cut_under_their_names() -> None:
    result = rewritten(RemoveUnits(), gated_layer("separate", [0, 1, 1, 1]))
    shapes = {name: shape(result.model, name) for name in ("Wq", "bq", "Wk", "Wv", "bv", "Wo")}
    assert shapes == {"Wq": (8, 9), "bq": (9,), "Wk": (8, 9), "Wv": (8, 9), "bv": (9,), "Wo": (9, 8)}


def test_nodes_that_need_the_same_heads_share_a_cut_weight() -> None:
    body = """
        h = MatMul(x, W)  g = Mul(h, "a.head_gate")
        a = Mul(g, scale)  b = Mul(a, scale)  y = MatMul(b, Wo)
    """
    model = graph(body, "float[8, 12] W", 'float[12] "a.head_gate"', "float[12] scale", "float[12, 8] Wo")
    set_gate(model, [1, 0, 1, 1])
    result = rewritten(RemoveUnits(), model)
    assert shape(result.model, "scale") == (9,)
    assert len(result.model.graph.initializers["scale"].uses()) == 2


@pytest.mark.parametrize("index", ["int64 index = {-2}", "int64[1] index = {-1}", "int64 index = {1}"])
def test_a_row_of_a_table_may_be_counted_from_its_end(index: str) -> None:
    body = """
        h = MatMul(x, W)  row = Gather(table, index)  sum = Add(h, row)  g = Mul(sum, "a.head_gate")  y = MatMul(g, Wo)
    """
    model = graph(body, "float[8, 12] W", 'float[12] "a.head_gate"', "float[2, 12] table", index, "float[12, 8] Wo")
    set_gate(model, [1, 0, 1, 1])
    assert rewritten(RemoveUnits(), model).report.refused == ()


def test_a_weight_that_another_node_needs_whole_stays_next_to_its_cut() -> None:
    body = """
        h = MatMul(x, W)  g = Mul(h, "a.head_gate")  a = MatMul(g, Wo)
        b = MatMul(x, W)  c = MatMul(b, Wo)  y = Add(a, c)
    """
    model = graph(body, "float[8, 12] W", 'float[12] "a.head_gate"', "float[12, 8] Wo")
    set_gate(model, [1, 0, 0, 1])
    result = rewritten(RemoveUnits(), model)
    assert {name: shape(result.model, name) for name in result.model.graph.initializers} == {
        "W": (8, 12),
        "Wo": (12, 8),
        "W.cut0": (8, 6),
        "Wo.cut0": (6, 8),
        "a.head_gate": (6,),
    }


def test_a_site_that_meets_an_operator_without_a_rule_stays_whole() -> None:
    body = SEPARATE.body.replace("k1 = MatMul (x, Wk)", "k0 = MatMul (x, Wk)  k1, order = TopK <axis = -1> (k0, all)")
    model = graph(body, SEPARATE.weights, "int64[1] all = {12}")
    set_gate(model, [1, 0, 1, 1])
    report = assert_untouched(RemoveUnits(), model)
    assert report.nodes == 0
    assert [(refusal.sites, refusal.op) for refusal in report.refused] == [(frozenset(("a",)), "TopK")]


def test_a_refused_site_does_not_keep_another_from_being_cut() -> None:
    body = """
        h = MatMul(x, W)  g = Mul(h, "a.head_gate")  n = Cos(g)  x1 = MatMul(n, Wo)
        h1 = MatMul(x1, W1)  g1 = Mul(h1, "b.head_gate")  y = MatMul(g1, Wo1)
    """
    weights = [f"float[8, 12] W{n}, float[12, 8] Wo{n}" for n in ("", "1")]
    model = graph(body, *weights, 'float[12] "a.head_gate"', 'float[12] "b.head_gate"')
    for site in "ab":
        set_gate(model, [1, 0, 1, 1], site)
    result = rewritten(RemoveUnits(), model)
    assert [sorted(refusal.sites) for refusal in result.report.refused] == [["a"]]
    assert (shape(result.model, "W"), shape(result.model, "W1")) == ((8, 12), (8, 9))
    assert operators(result.model) == operators(model)


def test_a_graph_that_keeps_every_head_stays() -> None:
    assert assert_untouched(RemoveUnits(), gated_layer("separate", [0.5, 2, 1, 1])).nodes == 0
