"""Graphs hold what TensorRT's parser takes: its published table stands in for the parser itself, which needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import pytest

from compressor.targets import Precision
from compressor.targets.tensorrt.bindings import Api
from compressor.targets.tensorrt.graph import element_types, prepare
from graph_passes import load, save, shrink
from tests.engines import pruned
from tests.test_lower_block_sparse import exported
from tests.test_trt import NEW, OLD
from tests.zoo import FAMILIES

_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")
_WHOLE = ("INT32", "INT64")
_NUMBERS = (*_FLOATS, *_WHOLE)
_ANY = (*_NUMBERS, "BOOL")
TAKEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys("And Not Or Xor".split(), ("BOOL",)),
    **dict.fromkeys("Conv Cos Erf Exp Gemm LayerNormalization Log MatMul Reciprocal".split(), _FLOATS),
    **dict.fromkeys("ReduceMax ReduceMean ReduceSum Relu Sigmoid Sin Softmax Sqrt Tanh".split(), _FLOATS),
    **dict.fromkeys("Abs Add ArgMax CumSum Div Equal Greater GreaterOrEqual Less LessOrEqual".split(), _NUMBERS),
    **dict.fromkeys("Max Min Mul Neg Pad Pow ScatterElements ScatterND Sub".split(), _NUMBERS),
    **dict.fromkeys("Cast Concat Constant Expand Gather GatherElements GatherND Identity".split(), _ANY),
    **dict.fromkeys("Reshape Shape Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where".split(), _ANY),
    "Range": _WHOLE,  # 8.6 counts floats only where it knows the bounds
}
"""Operators by name, and the types of their data, that 8.6 and 10 both take (onnx-tensorrt, docs/operators.md); its
importers of CumSum and ArgMax take whole numbers too."""


def foreign(path: Path) -> Iterator[str]:
    """Operators of a graph that the parser does not take, in words."""
    kinds, model = element_types(path), load(path)
    kinds |= {str(value.name): value.dtype for value in model.graph.inputs if value.dtype is not None}
    kinds |= {name: value.dtype for name, value in model.graph.initializers.items() if value.dtype is not None}
    for node in model.graph.all_nodes():
        data = node.inputs[1 if node.op_type == "Where" else 0] if node.inputs else None
        kind = kinds.get(str(data.name)) if data is not None else ir.DataType.FLOAT
        if node.op_type not in TAKEN or (kind is not None and kind.name not in TAKEN[node.op_type]):
            yield f"{node.op_type} of {kind} ({node.name})"


@pytest.mark.parametrize(("api", "precision"), [(OLD, "fp32"), (OLD, "fp16"), (NEW, "fp16"), (NEW, "bf16")])
@pytest.mark.parametrize(
    "family",
    [name if name in ("bert", "transformer_xl") else pytest.param(name, marks=pytest.mark.zoo) for name in FAMILIES],
)
def test_every_operator_is_one_that_the_parser_takes(
    family: str, api: Api, precision: Precision, tmp_path: Path
) -> None:
    prepare(pruned(family).shrunk, tmp_path / "graph.onnx", precision, api)
    assert list(foreign(tmp_path / "graph.onnx")) == []


@pytest.mark.parametrize("api", [OLD, NEW])
def test_so_is_every_one_of_block_sparse_attention(api: Api, tmp_path: Path) -> None:
    plan, reference = exported("bert", "eager", 18)
    save(shrink(load(reference), plan).model, tmp_path / "graph.onnx")
    prepare(tmp_path / "graph.onnx", tmp_path / "out.onnx", "fp16", api)
    assert list(foreign(tmp_path / "out.onnx")) == []
