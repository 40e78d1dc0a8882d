"""Graphs have only operators that TensorRT's parser accepts, by its published table; the parser needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import pytest

from compressor.targets import Precision
from compressor.targets.tensorrt.bindings import Features
from compressor.targets.tensorrt.graph import element_types, prepare
from graph_passes import load
from tests.quantization.graphs import symmetric
from tests.targets.graphs import masked, pruned
from tests.targets.tensorrt.machines import NEW, OLD
from tests.zoo import FAMILIES

_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")
_INTEGERS = ("INT32", "INT64")
_NUMBERS = (*_FLOATS, *_INTEGERS)
_ANY = (*_NUMBERS, "BOOL")
SUPPORTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys("And Not Or Xor".split(), ("BOOL",)),
    **dict.fromkeys("Conv Cos Erf Exp Gemm LayerNormalization Log MatMul Reciprocal".split(), _FLOATS),
    **dict.fromkeys("ReduceMax ReduceMean ReduceSum Relu Sigmoid Sin Softmax Sqrt Tanh".split(), _FLOATS),
    **dict.fromkeys("Abs Add ArgMax CumSum Div Equal Greater GreaterOrEqual Less LessOrEqual".split(), _NUMBERS),
    **dict.fromkeys("Max Min Mul Neg Pad Pow ScatterElements ScatterND Sub".split(), _NUMBERS),
    **dict.fromkeys("Cast Concat Constant Expand Gather GatherElements GatherND Identity".split(), _ANY),
    **dict.fromkeys("Reshape Shape Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where".split(), _ANY),
    "DequantizeLinear": ("INT8", "FLOAT8E4M3FN"),
    "QuantizeLinear": _FLOATS,
    "Range": _INTEGERS,  # 8.6 accepts floats only if the bounds are constants
}
"""Operator -> element types of its data that both 8.6 and 10 take (onnx-tensorrt, docs/operators.md; the importers of
CumSum and ArgMax take integers too)."""


def unsupported(path: Path) -> Iterator[str]:
    """Operators of a graph that the parser does not accept, with the type of their data."""
    types, model = element_types(path), load(path)
    types |= {str(value.name): value.dtype for value in model.graph.inputs if value.dtype is not None}
    types |= {name: value.dtype for name, value in model.graph.initializers.items() if value.dtype is not None}
    for node in model.graph.all_nodes():
        data = node.inputs[1 if node.op_type == "Where" else 0] if node.inputs else None
        kind = types.get(str(data.name)) if data is not None else ir.DataType.FLOAT
        if node.op_type not in SUPPORTED or (kind is not None and kind.name not in SUPPORTED[node.op_type]):
            yield f"{node.op_type} of {kind} ({node.name})"


@pytest.mark.parametrize(("supported", "precision"), [(OLD, "fp32"), (OLD, "fp16"), (NEW, "fp16"), (NEW, "bf16")])
@pytest.mark.parametrize(
    "family",
    [name if name == "bert" else pytest.param(name, marks=pytest.mark.zoo) for name in FAMILIES],
)
def test_the_parser_accepts_every_operator_of_a_family(
    family: str, supported: Features, precision: Precision, tmp_path: Path
) -> None:
    prepare(pruned(family).shrunk, tmp_path / "graph.onnx", precision, supported)
    assert list(unsupported(tmp_path / "graph.onnx")) == []


@pytest.mark.parametrize("supported", [pytest.param(OLD, marks=pytest.mark.zoo), NEW])
def test_the_parser_accepts_every_operator_of_block_sparse_attention(supported: Features, tmp_path: Path) -> None:
    prepare(masked().shrunk, tmp_path / "out.onnx", "fp16", supported)
    assert list(unsupported(tmp_path / "out.onnx")) == []


@pytest.mark.parametrize(
    ("supported", "precision"), [pytest.param(OLD, "int8", marks=pytest.mark.zoo), (NEW, "int8"), (NEW, "fp8")]
)
@pytest.mark.parametrize(
    "family",
    [name if name == "bert" else pytest.param(name, marks=pytest.mark.zoo) for name in FAMILIES],
)
def test_the_parser_accepts_every_operator_of_a_symmetric_graph(
    family: str, supported: Features, precision: Precision, tmp_path: Path
) -> None:
    prepare(symmetric(family, precision).graph.path, tmp_path / "graph.onnx", precision, supported)
    assert list(unsupported(tmp_path / "graph.onnx")) == []
