"""Convolutions: channels that are summed, and channels that stay apart, as neurons do between two linears."""

from __future__ import annotations

import pytest

from graph_passes import NeuronPlan, Plan, shrink
from graph_passes.flow.refusal import RefusalCode
from graph_passes.passes import DropUnreadPositions
from tests.graph_passes.graphs import SIZES, assert_same, graph, plan, shape, shrink_and_compare
from tests.graph_passes.layers import MERGED_BATCH

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
def test_depthwise_channels_are_cut(body: str, bias: str) -> None:
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


@pytest.mark.parametrize("convolution", ["Conv <pads = [0, 0, 0, 0]>", 'Conv <auto_pad = "SAME_UPPER">'])
def test_images_of_two_axes_are_cut_alike(convolution: str) -> None:
    body = f"""
        image = Unsqueeze (x, last) columns = Transpose <perm = [0, 2, 1, 3]> (image)
        h = {convolution} (columns, up, bias) r = Relu (h) rows = Transpose <perm = [0, 2, 3, 1]> (r)
        g = Mul (rows, "a.neuron_gate") back = Transpose <perm = [0, 3, 1, 2]> (g) mixed = Conv (back, down)
        flat = Squeeze (mixed, last) y = Transpose <perm = [0, 2, 1]> (flat)
    """
    weights = ("float[6, 8, 1, 1] up", "float[6] bias", "float[8, 6, 1, 1] down", "int64[1] last = {3}")
    shrunk = shrink_and_compare(graph(body, GATE, *weights), PLAN)
    assert shrunk.refused == ()
    assert [shape(shrunk.model, name) for name in ("up", "down")] == [(3, 8, 1, 1), (8, 3, 1, 1)]


@pytest.mark.parametrize(
    ("addition", "weights"),
    [
        ("c = Transpose <perm = [0, 2, 1]> (g2) d = Conv (c, mixer, shift) e = Transpose <perm = [0, 2, 1]> (d)",
         "float[3, 3, 1] mixer, float[3] shift"),
        ("flat2 = Reshape (g2, lines) f = Gemm (flat2, mixer, shift) e = Reshape (f, flat)",
         "float[3, 3] mixer, float[3] shift, int64[2] lines = {-1, 3}"),
    ],
    ids=["Conv", "Gemm"],
)  # fmt: skip
def test_a_bias_that_is_added_to_rows_and_heads_is_refused(addition: str, weights: str) -> None:
    # The gate of a head multiplies rows of a batch of rows and heads; the bias comes after it.
    body = MERGED_BATCH.body.replace(
        "back = Transpose <perm = [0, 2, 1, 3]> (gated)",
        f"g2 = Reshape (gated, flat) {addition} e4 = Reshape (e, unmerge) back = Transpose <perm = [0, 2, 1, 3]> (e4)",
    )
    (refusal,) = shrink_and_compare(graph(body, f"{MERGED_BATCH.weights}, {weights}"), plan([0, 2])).refused
    assert refusal.code is RefusalCode.NOT_LINEAR


@pytest.mark.parametrize("positions", ["{1}", "{0, 2}"])
@pytest.mark.parametrize("kernel", ["Conv <pads = [1, 1]> (c, wide)", "Conv <group = 8, pads = [1, 1]> (c, narrow)"])
def test_positions_before_a_convolution_stay(positions: str, kernel: str) -> None:
    body = f"""
        h = MatMul (x, up) c = Transpose <perm = [0, 2, 1]> (h) d = {kernel} e = Transpose <perm = [0, 2, 1]> (d)
        f = MatMul (e, up) y = Gather <axis = 1> (f, read)
    """
    count = positions.count(",") + 1
    weights = ("float[8, 8] up", "float[8, 8, 3] wide", "float[8, 1, 3] narrow", f"int64[{count}] read = {positions}")
    model = graph(body, *weights, outputs=f"float[B, {count}, 8] y")
    cut = DropUnreadPositions()(model.clone())
    assert_same(cut.model, model, SIZES, 1e-5)


def test_positions_before_a_convolution_that_mixes_none_are_dropped() -> None:
    body = """
        h = MatMul (x, up) c = Transpose <perm = [0, 2, 1]> (h) d = Conv (c, kernel)
        e = Transpose <perm = [0, 2, 1]> (d) y = Gather <axis = 1> (e, read)
    """
    weights = ("float[8, 8] up", "float[8, 8, 1] kernel", "int64[1] read = {1}")
    model = graph(body, *weights, outputs="float[B, 1, 8] y")
    cut = DropUnreadPositions()(model.clone())
    assert cut.modified
    assert_same(cut.model, model, SIZES, 1e-5)


UNMIXED = """
    h = MatMul (x, up) image = Unsqueeze (h, first) mixed = Conv {form} (image, kernel, bias)
    flat = Squeeze (mixed, first) r = Relu (flat) g = Mul (r, "a.neuron_gate") y = MatMul (g, down)
"""
ON_COLUMNS = (GATE, "float[8, 6] up", "float[6, 8] down", "float[1] bias", "int64[1] first = {1}")


def test_units_on_an_axis_of_the_pixels_that_is_not_mixed_are_cut() -> None:
    model = graph(UNMIXED.format(form="<pads = [1, 0, 1, 0]>"), *ON_COLUMNS, "float[1, 1, 3, 1] kernel")
    shrunk = shrink_and_compare(model, PLAN)
    assert shrunk.refused == ()
    assert [shape(shrunk.model, name) for name in ("up", "down")] == [(8, 3), (3, 8)]


@pytest.mark.parametrize(
    ("form", "kernel", "size"),
    [
        ("<pads = [0, 1, 0, 1]>", "float[1, 1, 1, 3] kernel", 6),
        ("<strides = [1, 2], pads = [0, 3, 0, 3]>", "float[1, 1, 1, 1] kernel", 6),
        ("<pads = [0, 1, 0, 1]>", "float[1, 1, 1, 1] kernel", 8),
    ],
    ids=["kernel", "stride", "padding"],
)
def test_what_leads_to_an_axis_of_the_pixels_that_is_mixed_stays(form: str, kernel: str, size: int) -> None:
    weights = (f'float[{size}] "a.neuron_gate"', "float[8, 6] up", f"float[{size}, 8] down", *ON_COLUMNS[3:], kernel)
    model = graph(UNMIXED.format(form=form), *weights)
    shrunk = shrink_and_compare(model, Plan(groups=(NeuronPlan("a", size, (0, 2, 5), (1.0, 0.5, -2.0)),)))
    assert [shape(shrunk.model, name) for name in ("up", "down")] == [(8, 6), (3, 8)]
