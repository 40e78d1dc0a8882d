"""Operators that divide an axis lose dropped heads in every operator set."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from tests.graph_passes.graphs import graph, plan, shrink_and_compare
from tests.graph_passes.layer_parts import CORE, OUTPUT, SPLIT, TO_HEADS
from tests.graph_passes.layers import FUSED_PROJECTION


@pytest.mark.parametrize("opset", [11, 13, 17])
def test_a_split_in_equal_parts_has_the_sizes_of_what_is_left(opset: int) -> None:
    body = FUSED_PROJECTION + "q1, k1, v1 = Split <axis = 2> (qkv)" + TO_HEADS + CORE
    model = graph(body, f"float[8, 36] Wqkv, float[36] bqkv, {SPLIT}, {OUTPUT}", opset=opset)
    shrunk = shrink_and_compare(model, plan([0, 2, 3]))
    assert shrunk.refused == ()
    onnx.checker.check_model(ir.to_proto(shrunk.model), full_check=True)
