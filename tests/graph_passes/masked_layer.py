"""An attention layer on x [B, S, 8] whose scores are masked by blocks, as the export of a masked model writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from graph_passes import BlockMask, Kind, Plan, SitePlan
from tests.graph_passes.graphs import graph

HEADS, HEAD_DIM, BLOCK = 2, 4, 8
SIZES = ({"B": 2, "S": 5}, {"B": 2, "S": 21}, {"B": 1, "S": 32})
"""Sizes at which masks of four blocks of eight positions are compared."""
INPUTS = "float[B, S, 8] x, int64[B, S] attention_mask"

Form = Literal["decomposed", "operator"]

_POSITIONS = """
    length = Shape <start = 1, end = 2> (x)  count = Squeeze (length, first)
    position = Range (i0, count, i1)  block_of = Div (position, block)
"""
_PADDING = """
    padding = Cast <to = 9> (attention_mask)  keys = Unsqueeze (padding, middle)
    padded = Where (keys, zero, lowest)
"""
_CAUSAL = """
    column = Unsqueeze (position, last)  past = GreaterOrEqual (column, position)  past4 = Unsqueeze (past, outer)
    unpadded = Greater (padded, half)  visible = And (unpadded, past4)  native = Where (visible, zero, lowest)
"""
_BLOCKS = """
    rows{0} = Gather <axis = 1> ("a.block_mask", block_of)  entries{0} = Gather <axis = 2> (rows{0}, block_of)
    blocks{0} = Unsqueeze (entries{0}, first)  seen{0} = Greater (native, half)  allowed{0} = And (blocks{0}, seen{0})
    mask{0} = Where (allowed{0}, native, lowest)
    numbers{0} = Cast <to = 7> (allowed{0})  any{0} = ReduceMax <keepdims = 1> (numbers{0}, last)
    by_query{0} = Transpose <perm = [0, 2, 1, 3]> (any{0})  attends{0} = Cast <to = 1> (by_query{0})
"""
_PROJECT = """
    {1}p{0} = MatMul ({2}, W{1})  {1}s{0} = Reshape ({1}p{0}, split)
    {1}{0} = Transpose <perm = [0, 2, 1, 3]> ({1}s{0})
"""
_ATTENTION = {
    "decomposed": """
        kt{0} = Transpose <perm = [0, 1, 3, 2]> (k{0})  product{0} = MatMul (q{0}, kt{0})
        scaled{0} = Mul (product{0}, scale)  scores{0} = Add (scaled{0}, mask{0})
        p{0} = Softmax <axis = -1> (scores{0})  heads{0} = MatMul (p{0}, v{0})
    """,
    "operator": "heads{0} = Attention <scale = 0.5> (q{0}, k{0}, v{0}, mask{0})",
}
_OUTPUT = """
    back{0} = Transpose <perm = [0, 2, 1, 3]> (heads{0})  zeroed{0} = Mul (back{0}, attends{0})
    merged{0} = Reshape (zeroed{0}, merge)  {1} = MatMul (merged{0}, Wo)
"""
_CONSTANTS = [
    "int64[1] first = {0}, int64[1] last = {-1}, int64[2] middle = {1, 2}, int64[2] outer = {0, 1}",
    "int64 i0 = {0}, int64 i1 = {1}, int64 block = {8}, int64[4] split = {0, 0, 2, 4}, int64[3] merge = {0, 0, 8}",
    "float zero = {0.0}, float lowest = {-3.4028234663852886e38}, float half = {-1.7e38}, float scale = {0.5}",
    "float[8, 8] Wq, float[8, 8] Wk, float[8, 8] Wv, float[8, 8] Wo",
]


@dataclasses.dataclass(frozen=True)
class MaskedLayer:
    """A graph of one or two calls of one masked attention.

    Attributes:
        mask: the mask of site `a`.
        causal: whether keys after the query are hidden.
        form: how the attention is written.
        calls: number of calls, each on the output of the call before.
    """

    mask: BlockMask
    causal: bool = False
    form: Form = "decomposed"
    calls: int = 1

    def graph(self) -> ir.Model:
        """The graph, without gates."""
        body = _POSITIONS + _PADDING + (_CAUSAL if self.causal else "native = Identity (padded)")
        for call in range(self.calls):
            source, target = "x" if not call else f"x{call}", "y" if call == self.calls - 1 else f"x{call + 1}"
            body += _BLOCKS.format(call)
            body += "".join(_PROJECT.format(call, operand, source) for operand in "qkv")
            body += _ATTENTION[self.form].format(call) + _OUTPUT.format(call, target)
        opset = 23 if self.form == "operator" else 18
        model = graph(body, *_CONSTANTS, 'bool[2, 4, 4] "a.block_mask"', inputs=INPUTS, opset=opset)
        set_mask(model, self.mask)
        return model

    @property
    def plan(self) -> Plan:
        """The plan that keeps every head under the mask."""
        kind: Kind = "causal" if self.causal else "bidirectional"
        return Plan(sites=(SitePlan("a", kind, HEADS, HEADS, HEAD_DIM, tuple(range(HEADS))),)).masked({"a": self.mask})


def set_mask(model: ir.Model, mask: BlockMask) -> None:
    """Write a mask into the initializer of site `a`."""
    value = model.graph.initializers["a.block_mask"]
    value.const_value = ir.tensor(mask.kept, name=value.name)
    value.shape = ir.Shape(mask.kept.shape)


def random_mask(density: float = 0.5, seed: int = 0, unused: Sequence[int] = ()) -> BlockMask:
    """A mask of 4 x 4 blocks; every head keeps a block, and no head keeps a column of `unused`."""
    kept = np.random.default_rng(seed).random((HEADS, 4, 4)) < density
    kept[:, 0, 0] = True
    kept[:, :, list(unused)] = False
    return BlockMask(kept, BLOCK)
