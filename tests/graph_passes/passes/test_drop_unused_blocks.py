"""Keys and values of blocks that no head attends to are not projected."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import BlockMask, find_attention
from graph_passes.passes import CleanUp, DropUnusedBlocks, LowerBlockSparse
from tests.graph_passes.graphs import draw, run
from tests.graph_passes.masked_layer import HEADS, SIZES, MaskedLayer, random_mask
from tests.graph_passes.passes.checks import assert_untouched, rewritten


def lowered(layer: MaskedLayer) -> ir.Model:
    model = layer.graph()
    CleanUp()(model)
    assert LowerBlockSparse(layer.plan.masks)(model).report.lowered
    CleanUp()(model)
    return model


@pytest.mark.parametrize("form", ["decomposed", "operator"])
def test_unused_positions_are_not_projected(form: str) -> None:
    layer = MaskedLayer(random_mask(0.7, unused=(1, 2)), form=form)  # type: ignore[arg-type]
    result = rewritten(DropUnusedBlocks(), lowered(layer), sizes=SIZES)
    assert result.report == {"a": 2}
    (call,) = [node for node in result.model.graph if node.op_type == "BlockSparseAttention"]
    products = [node for node in result.model.graph if node.op_type == "MatMul"]
    gathers = [product.inputs[0].producer() for product in products if product.inputs[0] is not None]
    assert sum(node is not None and node.op_type == "Gather" for node in gathers) == 2
    mask = call.inputs[3]
    assert mask is not None
    assert mask.const_value is not None
    assert mask.const_value.numpy().shape == (HEADS, 4, 2)
    assert [(site.name, site.kind) for site in find_attention(result.model)] == [("a", "bidirectional")]


def test_the_length_of_gathered_keys_is_open() -> None:
    # A runtime lets tensors of the same named sizes share memory.
    model = DropUnusedBlocks()(lowered(MaskedLayer(random_mask(0.7, unused=(1, 2))))).model
    (call,) = [node for node in model.graph if node.op_type == "BlockSparseAttention"]
    for value in call.inputs[1:3]:
        while value is not None and (producer := value.producer()) is not None and producer.op_type != "Gather":
            assert value.shape is None or value.shape[1] != model.graph.inputs[0].shape[1]  # type: ignore[index]
            value = producer.inputs[0]


def test_positions_of_unused_blocks_do_not_matter() -> None:
    layer = MaskedLayer(random_mask(0.7, unused=(1, 2)))
    model = DropUnusedBlocks()(lowered(layer)).model
    feeds = draw(model, {"B": 1, "S": 32})
    (before,) = run(model, feeds)
    feeds["x"][:, 8:24] = 7.0
    (after,) = run(model, feeds)
    np.testing.assert_array_equal(after[:, :8], before[:, :8])


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(MaskedLayer(random_mask(0.7, unused=(1, 2)), causal=True), id="causal"),
        pytest.param(MaskedLayer(random_mask(1.0)), id="no unused block"),
        pytest.param(
            MaskedLayer(BlockMask(np.arange(4)[None, None].repeat(2, 0).repeat(4, 1) > 0, 8)),
            id="the first block, which stays",
        ),
    ],
)
def test_other_sites_stay(layer: MaskedLayer) -> None:
    assert assert_untouched(DropUnusedBlocks(), lowered(layer)) == {}


def test_keys_with_another_reader_stay() -> None:
    model = lowered(MaskedLayer(random_mask(0.7, unused=(1, 2))))
    (product, _), *_ = model.graph.initializers["Wk"].uses()
    projected = product.outputs[0]
    projected.type, projected.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["B", "S", 8])
    model.graph.append(ir.node("Relu", [projected]))
    output = model.graph[-1].outputs[0]
    output.name, output.type, output.shape = "z", projected.type, projected.shape
    model.graph.outputs.append(output)
    assert assert_untouched(DropUnusedBlocks(), model) == {}


def test_a_graph_without_block_sparse_attention_stays() -> None:
    assert assert_untouched(DropUnusedBlocks(), MaskedLayer(random_mask()).graph()) == {}
