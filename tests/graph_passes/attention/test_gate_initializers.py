"""Gate initializers are found by name, and hold one element for each head or for each position of the heads' axis."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes.attention.gate_initializers import find_gates, gate_content, gate_name, gated_group, set_gates
from tests.graph_passes.graphs import content, graph, plan, site

BODY = 'h = Mul (x, "b.head_gate") y = Mul (h, "a.head_gate")'


def test_gates_are_found_in_the_order_in_which_the_graph_reads_them() -> None:
    model = graph(BODY, 'float[8] "a.head_gate", float[4, 2] "b.head_gate", float[8] W')
    assert list(find_gates(model.graph)) == ["b", "a"]
    assert [gated_group(value) for value in model.graph.initializers.values()] == ["a", "b", None]
    assert gate_name(site([0])) in model.graph.initializers
    assert gated_group(model.graph.inputs[0]) is None


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("4, 1, 1", [[[0.0]], [[0.5]], [[0.0]], [[2.0]]]),
        ("12", [0.0] * 3 + [0.5] * 3 + [0.0] * 3 + [2.0] * 3),
        ("8", None),
        ("5", None),
    ],
)
def test_a_gate_repeats_each_head_s_scale_over_its_width(shape: str, expected: list[float] | None) -> None:
    model = graph('y = Mul (x, "a.head_gate")', f'float[{shape}] "a.head_gate"', inputs="float[B, S, 12] x")
    pruning = site([1, 3], scale=[0.5, 2])
    computed = gate_content(pruning, find_gates(model.graph)["a"])
    assert (None if computed is None else computed.tolist()) == expected
    before = content(model, "a.head_gate")
    set_gates(model.graph, plan(pruning))
    np.testing.assert_array_equal(content(model, "a.head_gate"), before if expected is None else expected)
