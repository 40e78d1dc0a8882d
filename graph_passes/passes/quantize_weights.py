"""Quantize weights: store constant weights as integers that ONNX Runtime's `MatMulNBits` multiplies by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graph_passes.flow.refusal import Refusal, RefusalCode
from graph_passes.passes.base import GraphPass, ReportedResult
from graph_passes.passes.fold_weights import FoldWeights
from graph_passes.quantizers.weight_blocks import BITS, block_of, round_blocks
from graph_passes.tape import Tape, add_initializer, content_of, remove_unread

DOMAIN = "com.microsoft"
OPERATOR = "MatMulNBits"
"""ONNX Runtime's product by weights of few bits."""
_MATMULS = {"": ("MatMul", "Gemm"), DOMAIN: ("FusedMatMul",)}
_INT8_ACTIVATIONS = 4
"""Value of `accuracy_level` by which kernels may round activations to 8 bits: 8 to 100 times as fast as without."""


@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """What `QuantizeWeights` changed.

    Attributes:
        bits: name of a matrix of weights -> its bits.
        refused: matmuls with a constant factor that stay as they are, with the reason.
    """

    bits: Mapping[str, int]
    refused: tuple[Refusal, ...]


class QuantizeWeights(GraphPass[QuantizedWeights]):
    """Replace matmuls with constant weights by `MatMulNBits`, whose weights have a scale per block of inputs.

    Cases:
        1. `MatMul`, and `FusedMatMul` or `Gemm` that transposes or scales its weights: the operator, under the name of
           the matmul.
        2. `Gemm` with a third input: the operator, and an `Add`.
        3. Matmuls that read the same weights share their integers. Other readers, such as an embedding, read floats.
        4. A matmul whose first factor is transposed, or whose weights are no matrix in single precision, stays and is
           refused.

    Layout operators on weights are folded before (`FoldWeights`). Callers name matrices instead of matmuls, since
    fusions for a runtime rename matmuls.

    Args:
        bits: bits of the weights, 4 or 8.
        bits_of: name of a matrix of weights -> its bits, if not `bits`; None: it stays in floats.

    Raises:
        ValueError: a number of bits is neither 4 nor 8.
    """

    def __init__(self, bits: int, bits_of: Mapping[str, int | None] | None = None) -> None:
        self.bits, self.bits_of = bits, dict(bits_of or {})
        if unknown := {bits, *self.bits_of.values()} - {None, *BITS}:
            raise ValueError(f"{unknown}: weights are rounded to 4 or 8 bits")

    def call(self, model: ir.Model) -> ReportedResult[QuantizedWeights]:
        is_folded = FoldWeights()(model).modified
        quantized: dict[str, int] = {}
        refused: list[Refusal] = []
        shared: dict[tuple[str, bool, float, int], list[ir.Value]] = {}
        for node in list(model.graph):
            weights = weights_of(node)
            bits = None if weights is None else self.bits_of.get(str(weights.name), self.bits)
            if weights is None or bits is None:
                continue
            if obstacle := _obstacle(node, weights):
                why = f"multiplies by {obstacle}"
                name = node.name or ""
                refused.append(Refusal(frozenset(), node.op_type, name, why, RefusalCode.UNSUPPORTED_FORM))
                continue
            key = str(weights.name), bool(node.attributes.get_int("transB", 0)), _alpha(node), bits
            if key not in shared:
                shared[key] = _constants(model.graph, key, *round_blocks(matrix_of(node), bits))
            _replace(node, shared[key], bits)
            quantized[str(weights.name)] = bits
        if quantized:
            model.graph.opset_imports[DOMAIN] = 1
            remove_unread(model.graph, quantized)
        return ReportedResult(model, is_folded or bool(quantized), QuantizedWeights(quantized, tuple(refused)))


def weights_of(node: ir.Node) -> ir.Value | None:
    """The constant second factor of a matmul; None: the node is no matmul, or has none."""
    if node.op_type not in _MATMULS.get(node.domain, ()) or len(node.inputs) < 2:
        return None
    value = node.inputs[1]
    is_constant = value is not None and value.is_initializer() and not value.is_graph_input()
    return value if is_constant else None


def _obstacle(node: ir.Node, weights: ir.Value) -> str:
    """Case 4: the obstacle in words; empty: there is none."""
    if any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB")):
        return "a transposed first factor"
    if weights.const_value is None or len(weights.const_value.shape) != 2:
        return "weights that are no matrix"
    return "" if weights.const_value.dtype == ir.DataType.FLOAT else "weights that are not in single precision"


def _alpha(node: ir.Node) -> float:
    return node.attributes.get_float("alpha", 1.0)


def matrix_of(node: ir.Node) -> np.ndarray:
    """The matrix `[input, output]` that a matmul with constant weights multiplies its first factor by."""
    content = content_of(weights_of(node))
    content = content.T if node.attributes.get_int("transB", 0) else content
    return content if _alpha(node) == 1 else np.float32(_alpha(node)) * content


def _constants(
    graph: ir.Graph, key: tuple[str, bool, float, int], packed: np.ndarray, scales: np.ndarray
) -> list[ir.Value]:
    """Integers and scales as initializers, whose names contain what they are computed from."""
    name, is_transposed, alpha, bits = key
    name = f"{name}{'.transposed' if is_transposed else ''}{'' if alpha == 1 else f'.{alpha:g}'}.{bits}"
    return [add_initializer(graph, f"{name}.integers", packed), add_initializer(graph, f"{name}.scales", scales)]


def _replace(node: ir.Node, constants: list[ir.Value], bits: int) -> None:
    """Cases 1 and 2."""
    op, output = Tape(), node.outputs[0]
    inputs, outputs = matrix_of(node).shape
    attributes = {"K": inputs, "N": outputs, "bits": bits, "block_size": block_of(inputs)}
    attributes["accuracy_level"] = _INT8_ACTIVATIONS
    operands, metadata = [node.inputs[0], *constants], dict(node.metadata_props)
    result = op.op(OPERATOR, operands, attributes, domain=DOMAIN, name=node.name, metadata_props=metadata)
    if node.op_type == "Gemm" and len(node.inputs) > 2 and (addend := node.inputs[2]) is not None:
        result.name, result.type, result.shape = f"{output.name}.product", output.type, output.shape
        if (beta := node.attributes.get_float("beta", 1.0)) != 1.0:
            addend = op("Mul", addend, op.constant(np.array(beta, np.float32)))
        result = op("Add", result, addend)
    op.replace(node, result)
