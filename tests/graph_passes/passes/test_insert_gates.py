"""Gates are inserted at the attentions of a graph that has none, and checked in a graph that has some."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import BlockMask, Plan, PlanError, find_attention
from graph_passes.attention.gate_initializers import find_gates
from graph_passes.errors import GraphErrorCode
from graph_passes.passes import InsertGates
from graph_passes.passes.insert_gates import FINGERPRINT
from tests.graph_passes.graphs import gated, run, shrink_and_compare, site
from tests.graph_passes.layers import LAYERS, SEPARATE, SOME_LAYERS
from tests.graph_passes.passes.checks import assert_untouched, rewritten
from tests.graph_passes.passes.gated_layers import gate
from tests.graph_passes.stacked_attention import keeping, stack

ALL = Plan(sites=(keeping(0, 1, 2, 3, name="one"),))
OPEN = Plan(sites=(site([0, 1, 2, 3], name="one"),))


def test_an_open_gate_multiplies_the_heads_of_an_attention() -> None:
    result = rewritten(InsertGates(OPEN), stack("one"), tolerance=0)
    assert result.report == ("one",)
    (product,) = [node for node in result.model.graph if node.op_type == "Mul"]
    assert [value.name for value in product.inputs if value is not None] == ["heads0", "one.head_gate"]
    assert gate(result.model, "one") == [1.0, 1.0, 1.0, 1.0]


def test_a_gate_holds_the_scales_of_the_plan() -> None:
    result = InsertGates(Plan(sites=(keeping(1, 3, name="one"),)))(stack("one"))
    assert gate(result.model, "one") == [0.0, 1.5, 0.0, 3.5]
    assert find_gates(result.model.graph)["one"].shape == ir.Shape((4, 1, 1))


@pytest.mark.parametrize("kept", [(), (1,), (0, 1, 3), (0, 1, 2, 3)])
def test_a_module_that_is_called_twice_shares_one_gate(kept: tuple[int, ...]) -> None:
    model = stack("group.attention", "group.attention", "last.attention", shared=True)
    plan = Plan(sites=(keeping(*kept, name="group.attention"), keeping(*kept, name="last.attention")))
    assert InsertGates(plan)(model.clone()).report == ("group.attention", "last.attention")
    assert len(find_gates(gated(model, plan).graph)) == 2
    shrunk = shrink_and_compare(model, plan)
    assert [attention.heads for attention in find_attention(shrunk.model)] == ([len(kept)] * 3 if kept else [])


def test_heads_that_the_graph_returns_are_returned_gated() -> None:
    model = stack("one")
    heads = next(value for node in model.graph for value in node.outputs if value.name == "heads0")
    model.graph.outputs.append(heads)
    heads.dtype, heads.shape = ir.DataType.FLOAT, ir.Shape(["B", 4, "S", 3])
    result = InsertGates(Plan(sites=(keeping(1, name="one"),)))(model)
    assert [value.name for value in result.model.graph.outputs] == ["y", "heads0"]
    heads_output = run(result.model, {"x": np.ones((1, 2, 8), np.float32)})[1]
    assert np.flatnonzero(heads_output.any((0, 2, 3))).tolist() == [1]


@pytest.mark.parametrize("name", SOME_LAYERS)
def test_gates_of_the_plan_are_unchanged(name: str) -> None:
    plan = Plan(sites=(site([0, 2], kv_heads=LAYERS[name].kv_heads),))
    assert assert_untouched(InsertGates(plan), LAYERS[name].graph()) == ()


@pytest.mark.parametrize(
    ("sites", "code", "details"),
    [
        (("b",), GraphErrorCode.SITE_MISSING, {"site": "b"}),
        (("a", "b"), GraphErrorCode.SITE_MISSING, {"site": "b"}),
        ((), GraphErrorCode.SITE_MISSING, {"site": "a"}),
    ],
)
def test_gates_of_another_plan_are_refused(
    sites: tuple[str, ...], code: GraphErrorCode, details: dict[str, object]
) -> None:
    plan = Plan(sites=tuple(site([0], name=name) for name in sites))
    with pytest.raises(PlanError) as error:
        InsertGates(plan)(SEPARATE.graph())
    assert (error.value.code, error.value.details) == (code, details)


def test_gates_of_other_heads_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        InsertGates(Plan(sites=(site([0], heads=3),)))(SEPARATE.graph())
    assert error.value.code is GraphErrorCode.SITE_MISMATCH
    assert error.value.details == {"site": "a", "units": 3, "gate": 4}


def test_the_graph_of_another_model_is_refused() -> None:
    model = stack("one")
    model.metadata_props[FINGERPRINT] = "sha256:graph"
    with pytest.raises(PlanError) as error:
        InsertGates(ALL.model_copy(update={"model": "sha256:plan"}))(model)
    assert error.value.code is GraphErrorCode.MODEL_MISMATCH
    assert error.value.details == {"plan": "sha256:plan", "graph": "sha256:graph"}
    assert InsertGates(ALL)(model).modified  # A plan without a fingerprint is for any model.


def test_a_mask_that_the_graph_lacks_is_refused() -> None:
    plan = ALL.masked({"one": BlockMask(np.ones((4, 2, 2), np.bool_), 8)})
    with pytest.raises(PlanError) as error:
        InsertGates(plan)(stack("one"))
    assert (error.value.code, error.value.details) == (GraphErrorCode.MASK_MISSING, {"site": "one"})


def test_attentions_that_the_plan_does_not_name_stay_whole() -> None:
    model = stack("one", "two")
    shrunk = shrink_and_compare(model, Plan(sites=(keeping(1, 3, name="two"),)))
    assert [attention.heads for attention in find_attention(shrunk.model)] == [4, 2]
