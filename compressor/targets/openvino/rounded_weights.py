"""Rounded weights in OpenVINO: `MatMulNBits` as a product by integers that the compiled graph keeps as they are.

OpenVINO's own reader of this operator moves the weights behind operators that are folded when the graph is compiled,
which turns the weights into floats, and it reads none of 8 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as ops
from openvino.frontend.onnx import ConversionExtension

from compressor.errors import ErrorCode, InputError
from compressor.targets.openvino.session import compile_model, executed_layers, read_model, session_settings
from graph_passes.passes.quantize_weights import DOMAIN, OPERATOR

_TYPES = {4: openvino.Type.u4, 8: openvino.Type.u8}
"""Bits of weights -> the type of their integers."""


def read_rounded(path: Path) -> openvino.Model:
    """A graph in ONNX, whose products by rounded weights read integers, scales and a zero point.

    Raises:
        InputError: OpenVINO cannot read it.
    """
    core = openvino.Core()
    core.add_extension(ConversionExtension(OPERATOR, DOMAIN, _product))
    return read_model(path, core)


def _product(node: Any) -> list[openvino.Output]:
    """A `MatMulNBits` in operators of OpenVINO. With the zero point in the type of the integers, its kernels round
    activations to 8 bits where the processor has dot products of them.
    """
    activations, packed, scales = (node.get_input(number) for number in range(3))
    bits, inputs, block = (node.get_attribute(name) for name in ("bits", "K", "block_size"))
    outputs, blocks, _ = packed.get_shape()
    shape = openvino.Shape([outputs, blocks, block])
    content = openvino.Tensor(np.ascontiguousarray(packed.get_node().data), shape, _TYPES[bits])
    integers = openvino.op.Constant(content, shared_memory=False)
    zero = ops.constant(2 ** (bits - 1), _TYPES[bits])
    centred = ops.subtract(*(ops.convert(value, np.float32) for value in (integers, zero)))
    floats = ops.multiply(centred, ops.reshape(scales, ops.constant([outputs, blocks, 1]), False))
    matrix = ops.reshape(floats, ops.constant([outputs, blocks * block]), False)
    if padding := blocks * block - inputs:  # the last block is padded with zeros
        before = [0] * activations.get_partial_shape().rank.get_length()
        ends = ops.constant(before), ops.constant([*before[1:], padding])
        activations = ops.pad(activations, *ends, "constant", ops.constant(np.float32(0))).output(0)
    return [ops.matmul(activations, matrix, False, True).output(0)]


def require_integers(model: openvino.Model, path: Path, count: int) -> None:
    """Check that OpenVINO keeps the integers of rounded weights on this processor, which it may turn into floats.

    Args:
        count: number of its matmuls with rounded weights.

    Raises:
        InputError: OpenVINO keeps the integers of fewer matmuls.
    """
    types = {kind.get_type_name() for kind in _TYPES.values()}
    layers = executed_layers(compile_model(model, path, session_settings(None)))
    kept = sum(layer.kind == "FullyConnected" and layer.precision in types for layer in layers)
    if kept < count:
        text = (
            f"{path}: on this processor OpenVINO keeps the integers of {kept} of {count} matmuls with rounded weights,"
            " and turns the rest into floats; use --target ort, or --precision fp32"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED, path=path, count=kept, needed=count)
