"""Convolutions: channels that are summed, and channels that stay apart, as neurons do between two linears."""

from __future__ import annotations

import pytest

from graph_passes import NeuronPlan, Plan, shrink
from graph_passes.flow.refusal import RefusalCode
from tests.graph_passes.graphs import graph, shape, shrink_and_compare

PLAN = Plan(groups=(NeuronPlan("a", 6, (0, 2, 5), (1.0, 0.5, -2.0)),))
GATE = 'float[6] "a.neuron_gate"'
BEFORE = """
    h = MatMul (x, up) columns = Transpose <perm = [0, 2, 1]> (h) mixed = {convolution}
    rows = Transpose <perm = [0, 2, 1]> (mixed) r = Relu (rows) g = Mul (r, "a.neuron_gate") y = MatMul (g, down)
"""
AFTER = """
    h = MatMul (x, up) r = Relu (h) g = Mul (r, "a.neuron_gate") columns = Transpose <perm = [0, 2, 1]> (g)
    mixed = {convolution} rows = Transpose <perm = [0, 2, 1]> (mixed) y = MatMul (rows, down)
"""
DEPTHWISE = "Conv <group = 6, pads = [1, 1]> (columns, kernel{bias})"
WEIGHTS = (GATE, "float[8, 6] up", "float[6, 8] down", "float[6, 1, 3] kernel", "float[6] bias")


@pytest.mark.parametrize(("body", "bias"), [(BEFORE, ", bias"), (BEFORE, ""), (AFTER, "")])
def test_channels_that_stay_apart_are_cut(body: str, bias: str) -> None:
    model = graph(body.replace("{convolution}", DEPTHWISE.replace("{bias}", bias)), *WEIGHTS)
    shrunk = shrink_and_compare(model, PLAN)
    assert shrunk.refused == ()
    assert [shape(shrunk.model, name) for name in ("up", "down", "kernel")] == [(8, 3), (3, 8), (3, 1, 3)]
    assert not bias or shape(shrunk.model, "bias") == (3,)
    (convolution,) = (node for node in shrunk.model.graph if node.op_type == "Conv")
    assert convolution.attributes.get_int("group") == 3


def test_a_bias_after_the_gate_is_refused() -> None:
    model = graph(AFTER.replace("{convolution}", DEPTHWISE.replace("{bias}", ", bias")), *WEIGHTS)
    (refusal,) = shrink_and_compare(model, PLAN).refused
    assert (refusal.op, refusal.code) == ("Conv", RefusalCode.NOT_LINEAR)


@pytest.mark.parametrize("bias", ["", ", bias"])
def test_channels_that_are_summed_are_cut(bias: str) -> None:
    body = f"""
        h = MatMul (x, up) r = Relu (h) g = Mul (r, "a.neuron_gate") columns = Transpose <perm = [0, 2, 1]> (g)
        mixed = Conv (columns, kernel{bias}) y = Transpose <perm = [0, 2, 1]> (mixed)
    """
    shrunk = shrink_and_compare(graph(body, GATE, "float[8, 6] up", "float[8, 6, 1] kernel", "float[8] bias"), PLAN)
    assert shrunk.refused == ()
    assert shrunk.folded == ("a",)
    assert [shape(shrunk.model, name) for name in ("up", "kernel")] == [(8, 3), (8, 3, 1)]


def test_channels_of_a_convolution_that_neurons_come_from_are_cut() -> None:
    body = """
        columns = Transpose <perm = [0, 2, 1]> (x) h = Conv <pads = [1, 1]> (columns, kernel, bias)
        r = Relu (h) rows = Transpose <perm = [0, 2, 1]> (r) g = Mul (rows, "a.neuron_gate") y = MatMul (g, down)
    """
    shrunk = shrink_and_compare(graph(body, GATE, "float[6, 8] down", "float[6, 8, 3] kernel", "float[6] bias"), PLAN)
    assert shrunk.refused == ()
    assert [shape(shrunk.model, name) for name in ("kernel", "bias")] == [(3, 8, 3), (3,)]


def test_groups_of_several_channels_are_refused() -> None:
    body = BEFORE.replace("{convolution}", "Conv <group = 2> (columns, kernel)")
    model = graph(body, GATE, "float[8, 6] up", "float[6, 8] down", "float[6, 3, 1] kernel")
    (refusal,) = shrink(model, PLAN).refused
    assert (refusal.op, refusal.code) == ("Conv", RefusalCode.UNSUPPORTED_FORM)
