"""Masked attention becomes block-sparse attention, which computes what the masked reference computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import BlockMask, find_attention
from graph_passes.flow.refusal import RefusalCode
from graph_passes.passes import LowerBlockSparse
from tests.graph_passes.graphs import draw, operators, run
from tests.graph_passes.masked_layer import HEADS, SIZES, MaskedLayer, random_mask
from tests.graph_passes.passes.checks import assert_untouched, rewritten

LAYERS = {
    "bidirectional": MaskedLayer(random_mask()),
    "causal": MaskedLayer(random_mask(), causal=True),
    "operator": MaskedLayer(random_mask(), form="operator"),
    "causal operator": MaskedLayer(random_mask(), causal=True, form="operator"),
    "called twice": MaskedLayer(random_mask(), calls=2),
    "every block": MaskedLayer(random_mask(1.0)),
}


def calls(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "BlockSparseAttention"]


@pytest.mark.parametrize("name", LAYERS)
def test_a_masked_attention_is_lowered(name: str) -> None:
    layer = LAYERS[name]
    result = rewritten(LowerBlockSparse(layer.plan.masks), layer.graph(), sizes=SIZES)
    assert (result.report.lowered, result.report.refused) == (("a",), ())
    nodes = calls(result.model)
    assert {node.overload for node in nodes} == set(["a", "a.1"][: layer.calls])
    assert len(nodes) == layer.calls
    assert not {"Softmax", "Attention", "ReduceMax"} & set(operators(result.model))
    assert {node.attributes.get_int("causal") for node in nodes} == {int(layer.causal)}
    names = {value.name for node in nodes for value in result.model.functions[node.op_identifier()].inputs}
    assert names == {"query", "key", "value", "block_mask", "row"}
    kind = "causal" if layer.causal else "bidirectional"
    sites = [(site.name, site.kind, site.heads) for site in find_attention(result.model)]
    assert sites == [("a", kind, HEADS)] * layer.calls


def test_only_the_requested_sites_are_lowered() -> None:
    layer = LAYERS["bidirectional"]
    report = assert_untouched(LowerBlockSparse(layer.plan.masks, ()), layer.graph())
    assert (report.lowered, report.refused) == ((), ())


def refused(model: ir.Model, mask: BlockMask) -> tuple[str, RefusalCode]:
    """The operator that prevents lowering, and the code of the refusal; the graph is not changed."""
    report = assert_untouched(LowerBlockSparse({"a": mask}), model)
    assert report.lowered == ()
    (refusal,) = report.refused
    assert refusal.sites == {"a"}
    return refusal.op, refusal.code


def test_a_mask_of_single_entries_stays_dense() -> None:
    layer = LAYERS["bidirectional"]
    assert refused(layer.graph(), BlockMask(layer.mask.kept, 1)) == ("mask", RefusalCode.UNSUPPORTED_MASK)


def test_a_mask_of_other_blocks_than_the_plan_stays_dense() -> None:
    mask = BlockMask(np.ones((HEADS, 3, 3), np.bool_), 8)
    assert refused(LAYERS["bidirectional"].graph(), mask) == ("mask", RefusalCode.UNSUPPORTED_MASK)


def rename(op: str, name: str) -> Callable[[ir.Model], None]:
    """An edit that turns the first operator of one type into another."""

    def edit(model: ir.Model) -> None:
        node(model, op).op_type = name

    return edit


def set_attribute(op: str, attribute: ir.Attr) -> Callable[[ir.Model], None]:
    """An edit that sets an attribute of the first operator of a type."""

    def edit(model: ir.Model) -> None:
        node(model, op).attributes[attribute.name] = attribute

    return edit


def node(model: ir.Model, op: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == op)


@pytest.mark.parametrize(
    ("layer", "edit", "op", "code"),
    [
        ("bidirectional", rename("Softmax", "LogSoftmax"), "LogSoftmax", RefusalCode.UNMATCHED_ATTENTION),
        ("bidirectional", rename("Mul", "Pow"), "Softmax", RefusalCode.UNSUPPORTED_MASK),
        (
            "bidirectional",
            set_attribute("Softmax", ir.AttrInt64("axis", 1)),
            "Softmax",
            RefusalCode.UNMATCHED_ATTENTION,
        ),
        (
            "operator",
            set_attribute("Attention", ir.AttrFloat32("softcap", 1.0)),
            "Attention",
            RefusalCode.UNMATCHED_ATTENTION,
        ),
    ],
    ids=["another operator after the scores", "another operator before the mask", "another axis", "capped scores"],
)
def test_an_attention_of_another_form_stays_dense(
    layer: str, edit: Callable[[ir.Model], None], op: str, code: RefusalCode
) -> None:
    model = LAYERS[layer].graph()
    edit(model)
    assert refused(model, LAYERS[layer].mask) == (op, code)


def test_a_lowered_graph_does_not_depend_on_later_positions() -> None:
    layer = LAYERS["causal"]
    lowered = LowerBlockSparse(layer.plan.masks)(layer.graph()).model
    feeds = draw(lowered, {"B": 3, "S": 29})
    (before,) = run(lowered, feeds)
    feeds["x"][:, 13:] = 9
    (after,) = run(lowered, feeds)
    np.testing.assert_array_equal(after[:, :13], before[:, :13])
    assert (after[:, 13:] != before[:, 13:]).any()
