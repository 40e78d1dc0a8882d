"""The results of one node for inputs of given shapes, types and contents, remembered between walks.

A graph is walked for every pass, its layers are alike, and many graphs of one model are cut one after another: most
nodes have been inferred before with the same operator, attributes and inputs. A `NodeCall` holds exactly these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import onnx
import onnx.checker
import onnx.reference
import onnx_ir as ir

from graph_passes.tape import graph_of

Shape = tuple[int, ...]
Result = TypeVar("Result")
_REMEMBERED = 1 << 12
"""Maximum number of calls whose results are remembered; a content takes up to 32 KiB."""
_LARGEST_BYTES = 4096
"""Bytes of attributes and contents above which a call is not remembered."""

# Since this opset, every operator that computes shapes reads its axes from an input.
_AXES_ARE_INPUTS = 18
_NEW_ALONE = ("QuantizeLinear", "DequantizeLinear")
"""Operators whose older versions, which compute the same, the reference evaluator lacks."""

# Exceptions of ONNX's inference for operators or types that it does not support.
_UNKNOWN = (
    onnx.defs.SchemaError,
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
)


class Content(NamedTuple):
    """The content of a small tensor, hashable."""

    dtype: np.dtype
    shape: Shape
    data: bytes | tuple[object, ...]
    """The bytes of numbers; strings one by one."""

    @classmethod
    def of(cls, array: np.ndarray) -> Content:
        data = tuple(array.ravel().tolist()) if array.dtype.hasobject else array.tobytes()
        return cls(array.dtype, array.shape, data)

    @property
    def array(self) -> np.ndarray:
        if isinstance(self.data, bytes):
            return np.frombuffer(self.data, self.dtype).reshape(self.shape)
        return np.array(self.data, self.dtype).reshape(self.shape)


class Operand(NamedTuple):
    """An input of a call: its name in the call, its type, shape and content; None where they are unknown."""

    name: str
    dtype: ir.DataType | None
    shape: Shape | None
    content: Content | None


@dataclass(frozen=True)
class NodeCall:
    """An operator with its attributes and the known facts about its inputs.

    Attributes:
        domain: domain of the operator.
        op_type: name of the operator.
        opset: version of its operator set.
        attributes: serialized attributes.
        inputs: one entry for each input; None: the input is absent.
        outputs: number of outputs.
        imports: domain and version of the operator sets of the model.
        ir_version: version of the format of the model.
    """

    domain: str
    op_type: str
    opset: int
    attributes: tuple[bytes, ...]
    inputs: tuple[Operand | None, ...]
    outputs: int
    imports: tuple[tuple[str, int], ...]
    ir_version: int

    @property
    def size(self) -> int:
        """Bytes of attributes and contents; each string counts as one byte."""
        contents = [operand.content for operand in self.inputs if operand is not None and operand.content is not None]
        return sum(map(len, self.attributes)) + sum(len(content.data) for content in contents)

    @property
    def proto(self) -> onnx.NodeProto:
        """The node, with the names of the inputs of the call, and its outputs numbered."""
        return onnx.NodeProto(
            domain=self.domain,
            op_type=self.op_type,
            input=["" if operand is None else operand.name for operand in self.inputs],
            output=[_output(number) for number in range(self.outputs)],
            attribute=[onnx.AttributeProto.FromString(attribute) for attribute in self.attributes],
        )


@dataclass(frozen=True)
class Known:
    """Inferred shapes and types of tensors, and the content of small ones."""

    shapes: dict[ir.Value, Shape] = field(default_factory=dict)
    types: dict[ir.Value, ir.DataType] = field(default_factory=dict)
    constants: dict[ir.Value, np.ndarray] = field(default_factory=dict)


def node_call(node: ir.Node, model: ir.Model, known: Known) -> NodeCall | None:
    """The call of a node of a model with what is known of its inputs; None for a damaged attribute."""
    attributes = tuple(node.attributes.values())
    # An inner graph reads tensors of the outer graph by name; the names of all other inputs do not matter.
    has_graphs = any(attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in attributes)

    def operand(number: int, value: ir.Value | None) -> Operand | None:
        if value is None:
            return None
        content = known.constants.get(value)
        return Operand(
            name=value.name or "" if has_graphs else f"input{number}",
            dtype=known.types.get(value),
            shape=known.shapes.get(value),
            content=None if content is None else Content.of(content),
        )

    try:
        serialized = tuple(ir.serde.serialize_attribute(attribute).SerializeToString() for attribute in attributes)
    except ir.serde.SerdeError:
        return None
    return NodeCall(
        domain=node.domain,
        op_type=node.op_type,
        opset=node.version or model.graph.opset_imports.get(node.domain, 1),
        attributes=serialized,
        inputs=tuple(operand(number, value) for number, value in enumerate(node.inputs)),
        outputs=len(node.outputs),
        imports=tuple(model.graph.opset_imports.items()),
        ir_version=model.ir_version or onnx.IR_VERSION,
    )


def _remembered(function: Callable[[NodeCall], Result]) -> Callable[[NodeCall], Result]:
    """The function, which computes the result of a small call once."""
    remembered = functools.lru_cache(_REMEMBERED)(function)

    @functools.wraps(function)
    def call(node: NodeCall) -> Result:
        return function(node) if node.size > _LARGEST_BYTES else remembered(node)

    return call


@_remembered
def output_types(call: NodeCall) -> tuple[tuple[Shape | None, ir.DataType | None], ...]:
    """Shape and type of each output by ONNX's own inference; None where they are unknown."""
    present = [operand for operand in call.inputs if operand is not None]
    try:
        inferred = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(call.op_type, call.opset, call.domain),
            call.proto,
            {
                operand.name: onnx.helper.make_tensor_type_proto(operand.dtype.value, operand.shape)
                for operand in present
                if operand.dtype is not None
            },
            {
                operand.name: onnx.numpy_helper.from_array(operand.content.array, operand.name)
                for operand in present
                if operand.content is not None
            },
            opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in call.imports],
            ir_version=call.ir_version,
        )
    except _UNKNOWN:
        inferred = {}  # The shapes that the file records are used instead.
    return tuple(_type_of(inferred.get(_output(number))) for number in range(call.outputs))


@_remembered
def output_contents(call: NodeCall) -> tuple[np.ndarray, ...]:
    """The content of each output by ONNX's reference evaluator, from the contents of all inputs; empty if it fails."""
    contents = {operand.name: operand.content for operand in call.inputs if operand is not None and operand.content}
    feeds = {name: content.array for name, content in contents.items()}
    try:
        results = [np.array(result) for result in run_node(call.proto, feeds, call.opset)]
    except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError):
        return ()  # Unknown content is not an error: the shape may be enough.
    for result in results:
        result.setflags(write=False)  # later calls have the same arrays
    return tuple(results)


def run_node(proto: onnx.NodeProto, feeds: Mapping[str, np.ndarray], opset: int) -> list[np.ndarray]:
    """Outputs of one node of the ONNX standard, computed by ONNX's reference evaluator.

    Args:
        feeds: its inputs by name.
        opset: version of the operator set that the node follows.
    """
    if opset >= _AXES_ARE_INPUTS or proto.op_type in _NEW_ALONE:
        return list(onnx.reference.ReferenceEvaluator(proto).run(None, dict(feeds)))
    # The evaluator assumes the newest opset for a single node, and for a model the opset that it imports.
    inputs = [onnx.ValueInfoProto(name=name) for name in feeds]
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output]
    imports = [onnx.helper.make_opsetid("", opset)]
    model = onnx.helper.make_model(onnx.helper.make_graph([proto], "node", inputs, outputs), opset_imports=imports)
    return list(onnx.reference.ReferenceEvaluator(model).run(None, dict(feeds)))


def run_constant(node: ir.Node, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """The first output of a node of the ONNX standard in a graph, from the contents of its inputs by name."""
    opset = node.version or graph_of(node).opset_imports.get(node.domain, 1)
    return np.array(run_node(ir.serde.serialize_node(node), feeds, opset)[0], order="C")


def _output(number: int) -> str:
    return f"output{number}"


def _type_of(proto: onnx.TypeProto | None) -> tuple[Shape | None, ir.DataType | None]:
    """Shape and type of the elements of a tensor; None where they are unknown."""
    if proto is None or not proto.HasField("tensor_type"):
        return None, None
    dims = proto.tensor_type.shape.dim
    is_known = proto.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims)
    shape = tuple(dim.dim_value for dim in dims) if is_known else None
    shape = None if shape is not None and min(shape, default=0) < 0 else shape
    return shape, ir.DataType(proto.tensor_type.elem_type)
