"""The function equals attention over the entries of its mask, at every length that the mask covers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes import BlockMask
from graph_passes.block_sparse.function import (
    block_sparse_attention,
    call,
    is_block_sparse,
    rebuild_function,
    standalone_model,
)
from graph_passes.block_sparse.spec import AttentionSpec
from tests.graph_passes.block_sparse.cases import (
    check_causality,
    check_longer_inputs_are_refused,
    check_masked_attention,
    check_rows_without_a_key,
    check_whole_heads,
)

MASK = BlockMask(np.random.default_rng(0).random((2, 3, 3)) < 0.5, 8)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_equals_masked_attention(data: st.DataObject) -> None:
    check_masked_attention(None, data)


def test_rows_without_a_key_are_zero() -> None:
    check_rows_without_a_key(None)


def test_later_keys_never_reach_earlier_queries() -> None:
    check_causality(None)


def test_inputs_longer_than_the_mask_are_refused() -> None:
    check_longer_inputs_are_refused(None)


@pytest.mark.parametrize("causal", [False, True])
def test_a_head_that_keeps_every_block_is_dense(causal: bool) -> None:
    check_whole_heads(None, causal=causal)


def test_causality_with_a_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="no memory and no persistent vectors"):
        AttentionSpec(BlockMask(np.ones((1, 2, 3), np.bool_), 8, 8), 4, 4, scale=1.0, causal=True)


def test_attributes_of_a_call_describe_the_body_to_kernels() -> None:
    function = block_sparse_attention(AttentionSpec(MASK, 4, 6, 0.5, causal=True), row=True, site="layer.0")
    names = [str(value.name) for value in function.inputs]
    assert names == ["query", "key", "value", "block_mask", "row"]
    node = call(function, [ir.Value(name=name) for name in names])
    assert is_block_sparse(node)
    assert not is_block_sparse(ir.node("Attention", []))
    assert not is_block_sparse(None)
    assert node.overload == "layer.0"
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    assert attributes == {"block": 8, "scale": 0.5, "causal": 1, "memory": 0, "persistent": 0}


def test_equal_functions_are_equal_bit_for_bit() -> None:
    def content(function: ir.Function) -> bytes:
        return ir.serde.serialize_function(function).SerializeToString(deterministic=True)

    function = block_sparse_attention(AttentionSpec(MASK, 4, 6, 0.5, full_heads=2), row=True, site="layer.0")
    assert content(rebuild_function(function, MASK, (4, 6), 2)) == content(function)
    inverse = BlockMask(~MASK.kept, 8)
    rebuilt = rebuild_function(function, inverse, (4, 6), 2)
    assert content(rebuilt) != content(function)
    assert content(rebuilt) == content(
        block_sparse_attention(AttentionSpec(inverse, 4, 6, 0.5, full_heads=2), row=True, site="layer.0")
    )


def test_a_standalone_model_reads_what_the_function_reads() -> None:
    model = standalone_model(block_sparse_attention(AttentionSpec(MASK, 4, 6, 0.5, full_heads=1)))
    assert {value.name: value.dtype for value in model.graph.inputs} == {
        **dict.fromkeys(("query", "key", "value", "full"), ir.DataType.FLOAT),
        "block_mask": ir.DataType.BOOL,
    }
    assert [value.name for value in model.graph.outputs] == ["output"]
