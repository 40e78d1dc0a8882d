"""Reduce precision: convert weights and arithmetic to fp16 or bf16, for runtimes on a GPU."""

from __future__ import annotations

import re
import warnings

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from graph_passes.block_sparse.function import is_block_sparse, rebuild_function
from graph_passes.block_sparse.masks import BlockMask
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import content_of

_LARGEST_FP16 = 65504.0
_TYPE_ATTRIBUTES = (("Cast", "to"), ("EyeLike", "dtype"), ("RandomNormalLike", "dtype"))
"""Attributes that hold a type, as (operator, attribute)."""
_BOUNDARY_CAST = re.compile(r"graph_(input|output)_cast\d+")
"""Pattern of the names of casts that ONNX Runtime's converter inserts at inputs and outputs."""


class ReducePrecision(GraphPass[Names]):
    """Convert a graph from fp32 to fp16 or bf16; inputs and outputs keep their types.

    Cases:
        1. fp16: ONNX Runtime's converter changes initializers, constants and types. It leaves operators without an fp16
           form in fp32. Numbers beyond fp16's range, such as the lowest value of a mask, are clipped to it.
        2. Bodies of block-sparse attention are rebuilt for fp16, because the converter skips functions.
        3. bf16: the graph is converted to fp16 first, then every fp16 type becomes bf16. Initializers are rounded from
           their fp32 values, because bf16 has a wider range than fp16.
        4. A graph that this pass has converted already stays as it is.

    The pass returns a new model, whose weights are in memory. The report has the names of the initializers of the type.

    Args:
        dtype: `FLOAT16` or `BFLOAT16`.

    Raises:
        ValueError: the type is not supported.
    """

    def __init__(self, dtype: ir.DataType = ir.DataType.FLOAT16) -> None:
        if dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            raise ValueError(f"{dtype}: not a reduced precision; use FLOAT16 or BFLOAT16")
        self.dtype = dtype

    @property
    def in_place(self) -> bool:
        return False

    def requires(self, model: ir.Model) -> None:
        if self.dtype == ir.DataType.BFLOAT16 and model.functions:
            raise ir.passes.PreconditionError("bf16 needs a graph without local functions; inline them first")

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        if any(_BOUNDARY_CAST.fullmatch(node.name or "") for node in model.graph):
            return changed(model.clone(), ())
        weights = {name: value.const_value for name, value in model.graph.initializers.items()}
        if model.functions:
            _rebuild_functions(model)
        reduced = _to_fp16(model)
        if self.dtype == ir.DataType.BFLOAT16:
            _to_bf16(reduced, weights)
        names = [name for name, value in reduced.graph.initializers.items() if value.dtype == self.dtype]
        return changed(reduced, names, is_other=True)


def _to_fp16(model: ir.Model) -> ir.Model:
    """Case 1."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The converter warns of every number that it clips.
        # The converter's own shape inference fails on operators that it does not know; the graph records its shapes.
        proto = convert_float_to_float16(
            _with_weights(model), keep_io_types=True, disable_shape_infer=True, max_finite_val=_LARGEST_FP16
        )
    converted = ir.from_proto(proto)
    converted.graph.sort()  # The converter appends the casts of inputs at the end.
    for node in converted.graph:
        source = node.inputs[0] if node.op_type == "Cast" else None
        if source is not None and str(source.name).endswith("_cast_to_fp16"):
            source.dtype = ir.DataType.FLOAT  # The converter records fp16 for tensors that it leaves in fp32.
    return converted


def _with_weights(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto that holds its external weights."""
    proto = ir.to_proto(model)
    for tensor in proto.graph.initializer:
        content = model.graph.initializers[tensor.name].const_value
        if tensor.data_location == onnx.TensorProto.EXTERNAL and content is not None:
            tensor.raw_data = content.tobytes()
            tensor.ClearField("external_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
    return proto


def _rebuild_functions(model: ir.Model) -> None:
    """Case 2."""
    probe = Probe(model)
    for node in model.graph:
        if not is_block_sparse(node):
            continue
        function = model.functions[node.op_identifier()]
        query, value = (probe.shape(node.inputs[position]) for position in (0, 2))
        assert query is not None
        assert value is not None
        names = [parameter.name for parameter in function.inputs]
        full = probe.shape(node.inputs[names.index("full")]) if "full" in names else None
        block_mask = BlockMask(
            content_of(node.inputs[3]).astype(np.bool_),
            node.attributes.get_int("block", 0),
            node.attributes.get_int("memory", 0),
        )
        rebuilt = rebuild_function(
            function, block_mask, (query[3], value[3]), full[1] if full else 0, ir.DataType.FLOAT16
        )
        model.functions[rebuilt.identifier()] = rebuilt


def _to_bf16(model: ir.Model, weights: dict[str, ir.TensorProtocol | None]) -> None:
    """Case 3, the second step, on a graph in fp16; `weights` are the fp32 initializers before the conversion."""
    for name, value in model.graph.initializers.items():
        if value.dtype == ir.DataType.FLOAT16 and value.const_value is not None:
            content = weights.get(name) or value.const_value
            value.const_value = ir.Tensor(content.numpy().astype(ml_dtypes.bfloat16), name=name)
            value.dtype = ir.DataType.BFLOAT16
    for node in model.graph.all_nodes():
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == ir.DataType.FLOAT16:
                tensor = ir.Tensor(attribute.as_tensor().numpy().astype(ml_dtypes.bfloat16))
                node.attributes[name] = ir.AttrTensor(name, tensor)
            elif (node.op_type, name) in _TYPE_ATTRIBUTES and attribute.as_int() == ir.DataType.FLOAT16:
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.BFLOAT16))
        for output in node.outputs:
            if output.dtype == ir.DataType.FLOAT16:
                output.dtype = ir.DataType.BFLOAT16
