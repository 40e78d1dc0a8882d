"""The sizes of caches are computed from the mask and the new tokens."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graph_passes.flow.caches import record_caches
from graph_passes.passes import CountPositions
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten

INPUTS = "int64[B, S] input_ids, int64[B, T] attention_mask, float[B, 2, P, 3] past, float[B, 2, S, 3] new"
CALLS = ({"B": 2, "S": 5, "P": 0, "T": 5}, {"B": 3, "S": 1, "P": 6, "T": 7}, {"B": 1, "S": 2, "P": 3, "T": 5})


def reading(nodes: str, inputs: str = INPUTS) -> ir.Model:
    """A graph that reads sizes of a cache."""
    model = graph(
        f"present = Concat <axis = 2> (past, new)  {nodes}  y = Identity(sizes)",
        inputs=inputs,
        outputs="int64[N] y, float[B, 2, T, 3] present",
    )
    record_caches(model, [("past", "present")])
    return model


@pytest.mark.parametrize("cache", ["past", "present"])
@pytest.mark.parametrize("axes", ["", "<start = 2, end = 3>", "<start = 0, end = 1>", "<start = -2>", "<end = 3>"])
def test_sizes_of_caches_are_those_of_the_mask(cache: str, axes: str) -> None:
    result = rewritten(CountPositions(), reading(f"sizes = Shape {axes} ({cache})"), sizes=CALLS)
    shapes = [node.inputs[0] for node in result.model.graph if node.op_type == "Shape"]
    assert {value.name for value in shapes if value is not None} <= {"input_ids", "attention_mask"}
    assert len(result.report) == 1


@pytest.mark.parametrize(("axes", "reads_ids"), [("B, S", True), ("1, S", False)])
def test_sizes_of_positions_are_those_of_the_ids(axes: str, *, reads_ids: bool) -> None:
    model = reading("sizes = Shape (position_ids)", f"int64[{axes}] position_ids, {INPUTS}")
    if not reads_ids:
        assert_untouched(CountPositions(), model)
        return
    result = rewritten(CountPositions(), model, sizes=CALLS)
    assert len(result.report) == 1
    inputs = {value.name: value for value in result.model.graph.inputs}
    assert not inputs["position_ids"].uses()


def test_fixed_sizes_and_other_tensors_are_read_as_before() -> None:
    assert_untouched(CountPositions(), reading("sizes = Shape <start = 3> (past)"))
    assert_untouched(CountPositions(), reading("sizes = Shape <start = 2> (new)"))


def test_a_graph_without_a_mask_counts_in_its_caches() -> None:
    inputs = INPUTS.replace("attention_mask", "other_mask")
    model = reading("sizes = Shape <start = 2> (past)", inputs)
    assert_untouched(CountPositions(), model)
    assert "Shape" in operators(model)
