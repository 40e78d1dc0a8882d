"""What shape has every tensor? Found by walking the graph twice with concrete sizes for the free dimensions.

Exporters leave shapes half known: dimensions are symbols, targets of `Reshape` are computed from `Shape`, and nothing
is inferred past operators of other domains. With every free dimension set to a number, all of that becomes arithmetic
on small constants. Two walks with different numbers tell what is fixed (equal in both) from what follows the input.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.checker
import onnx.reference
import onnx_ir as ir

# Free dimensions take these sizes in order of appearance. All pairs differ, so that two symbols are never confused.
_SIZES = ((3, 5, 7, 11, 13, 17, 19, 23), (5, 7, 11, 13, 17, 19, 23, 29))

# Integer arithmetic that exporters use to compute shapes; anything else keeps its content to itself.
_SHAPE_ARITHMETIC = frozenset(
    "Add And Cast CastLike Concat Constant ConstantOfShape Div Equal Expand Floor Gather Identity Less Max Min Mod Mul "
    "Neg Not Or Range ReduceProd Reshape Slice Split Sqrt Squeeze Sub Transpose Unsqueeze Where".split()
)
_LARGEST_CONSTANT = 4096

_BROADCASTS = frozenset("Add And Div Equal Expand Greater GreaterOrEqual Less LessOrEqual Mul Or Sub Where".split())

# Operators beside the ONNX standard whose first output has the shape of their first input.
_SAME_SHAPE = frozenset(
    "BiasGelu FastGelu Gelu QuickGelu RotaryEmbedding SimplifiedLayerNormalization "
    "SkipLayerNormalization SkipSimplifiedLayerNormalization".split()
)

# What ONNX's own inference raises for operators, or types, that it does not know.
_UNKNOWN = (
    onnx.defs.SchemaError,
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
)

BATCH = (_SIZES[0][0], _SIZES[1][0])
"""Size of the batch in each walk."""

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Walk:
    shapes: dict[ir.Value, Shape]
    constants: dict[ir.Value, np.ndarray]


class Probe:
    """Concrete shapes and small constants of one graph, as it is now: make a new one after an edit."""

    def __init__(self, model: ir.Model) -> None:
        alike: dict[str, str] = {}
        while True:
            try:
                self._walks = tuple(_walk(model, sizes, alike) for sizes in _SIZES)
            except _ClashError as clash:
                alike[clash.symbol] = clash.other
            else:
                return

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Shape under the first assignment of sizes, or None where it cannot be told."""
        return None if value is None else self._walks[0].shapes.get(value)

    def other_shape(self, value: ir.Value | None) -> Shape | None:
        """Shape under the second assignment."""
        return None if value is None else self._walks[1].shapes.get(value)

    def shapes(self, value: ir.Value | None) -> tuple[Shape | None, Shape | None]:
        """Shapes under both assignments."""
        return self.shape(value), self.other_shape(value)

    def stand_in(self, new: ir.Value, old: ir.Value) -> None:
        """Know a tensor that replaces another by the other's shape: positions stay those of the untouched graph."""
        for walk in self._walks:
            if old in walk.shapes:
                walk.shapes[new] = walk.shapes[old]

    def fixed(self, value: ir.Value | None, axis: int) -> bool:
        """Whether the size of an axis is the same for every input."""
        one, other = self.shapes(value)
        return one is not None and other is not None and one[axis] == other[axis]

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """Content of a small tensor that is the same for every input, or None."""
        one, other = self.contents(value)
        same = one is not None and other is not None and one.shape == other.shape and np.array_equal(one, other)
        return one if same else None

    def contents(self, value: ir.Value | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Content of a small tensor under both assignments, None where it cannot be told."""
        if value is None:
            return None, None
        return self._walks[0].constants.get(value), self._walks[1].constants.get(value)


class _ClashError(Exception):
    """Two symbols of the file, which some operator needs to be one size."""

    def __init__(self, symbol: str, other: str) -> None:
        super().__init__(symbol, other)
        self.symbol, self.other = symbol, other


def _walk(model: ir.Model, sizes: Shape, alike: dict[str, str]) -> _Walk:
    bindings = _bind(model.graph, sizes, alike)
    shapes: dict[ir.Value, Shape] = {}
    types: dict[ir.Value, onnx.TypeProto] = {}
    constants: dict[ir.Value, np.ndarray] = {}

    def learn(value: ir.Value, shape: Shape | None, dtype: ir.DataType | None) -> None:
        if shape is not None:
            shapes[value] = shape
        if dtype is not None:
            types[value] = onnx.helper.make_tensor_type_proto(dtype.value, shape)

    for position, value in enumerate(model.graph.inputs):
        learn(value, _concrete(value.shape, bindings, position), value.dtype)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            continue
        learn(value, tuple(tensor.shape.numpy()), tensor.dtype)
        if tensor.size <= _LARGEST_CONSTANT and tensor.dtype != ir.DataType.STRING:
            constants[value] = tensor.numpy()
    for node in model.graph:
        for value, shape, dtype in _infer(node, model, shapes, types, constants):
            if shape is None:
                _look_for_clash(node, shapes, constants, bindings, alike)
            learn(value, shape if shape is not None else _concrete(value.shape, bindings), dtype or value.dtype)
        _evaluate(node, model, shapes, constants)
    return _Walk(shapes, constants)


def _look_for_clash(
    node: ir.Node,
    shapes: dict[ir.Value, Shape],
    constants: dict[ir.Value, np.ndarray],
    bindings: dict[str, int],
    alike: dict[str, str],
) -> None:
    """Raise where a node cannot broadcast its inputs because two symbols have two sizes.

    Exporters may give the length of ids and of their mask two names, though the model needs them to be equal.
    """
    if node.op_type not in _BROADCASTS:
        return
    operands = [shapes[value] for value in node.inputs if value in shapes]
    if node.op_type == "Expand":
        content = constants.get(node.inputs[1]) if node.inputs[1] is not None else None
        operands = [*operands[:1], tuple(int(size) for size in content)] if content is not None else []
    names = {size: name for name, size in bindings.items() if name not in alike}
    for sizes in itertools.zip_longest(*(reversed(shape) for shape in operands), fillvalue=1):
        known = sorted(names[size] for size in set(sizes) if size in names)
        if len(known) == 2:
            raise _ClashError(known[1], known[0])


def _bind(graph: ir.Graph, sizes: Shape, alike: dict[str, str]) -> dict[str, int]:
    """Give every symbol of the graph's inputs a size of its own; a nameless dimension is bound by its position.

    All leading dimensions share one size: they are the batch, which exporters often name anew for every input. So do
    the symbols that `alike` names.
    """
    supply = itertools.chain(sizes[1:], itertools.count(sizes[-1] + 2, 2))
    bindings: dict[str, int] = {}
    for axis, dim in (pair for value in graph.inputs for pair in enumerate(value.shape or ())):
        for name in _symbols(dim, axis):
            if name not in bindings:
                bindings[name] = sizes[0] if axis == 0 else next(supply)
    for name, other in alike.items():
        while other in alike:
            other = alike[other]
        bindings[name] = bindings[other]
    return bindings


def _symbols(dim: int | ir.SymbolicDim, axis: int) -> list[str]:
    if isinstance(dim, int):
        return []
    if dim.value is None:
        return [f"axis {axis}"]
    return sorted(str(symbol) for symbol in dim.free_symbols()) or [dim.value]


def _concrete(shape: ir.Shape | None, bindings: dict[str, int], position: int | None = None) -> Shape | None:
    if shape is None:
        return None
    dims: list[int] = []
    for axis, dim in enumerate(shape):
        if isinstance(dim, int):
            dims.append(dim)
        elif dim.value is None:
            if position is None:
                return None
            dims.append(bindings[f"axis {axis}"])
        else:
            size = bindings.get(dim.value, dim.evaluate(bindings))
            if not isinstance(size, int):
                return None
            dims.append(size)
    return tuple(dims)


def _infer(
    node: ir.Node,
    model: ir.Model,
    shapes: dict[ir.Value, Shape],
    types: dict[ir.Value, onnx.TypeProto],
    constants: dict[ir.Value, np.ndarray],
) -> Iterator[tuple[ir.Value, Shape | None, ir.DataType | None]]:
    """Shape and type of each output of a node, as far as its inputs tell."""
    special = _foreign_shape(node, shapes)
    if special is not None:
        # The embedding's first inputs are ids; its data come third.
        first = node.inputs[2 if node.op_type == "EmbedLayerNormalization" else 0]
        dtype = types[first].tensor_type.elem_type if first in types else 0
        yield node.outputs[0], special, ir.DataType(dtype) if dtype else None
        for place, value in enumerate(node.outputs[1:], 1):
            # The sum that is normed, which the next skip goes on from.
            summed = place == 3 and node.op_type.startswith("Skip")
            yield value, special if summed else None, ir.DataType(dtype) if summed and dtype else None
        return
    inferred: dict[str, onnx.TypeProto] = {}
    proto = ir.serde.serialize_node(node)
    try:
        schema = onnx.defs.get_schema(node.op_type, _opset(node, model), node.domain)
        inferred = onnx.shape_inference.infer_node_outputs(
            schema,
            proto,
            {v.name: types[v] for v in node.inputs if v is not None and v in types and v.name},
            {
                v.name: onnx.numpy_helper.from_array(constants[v], v.name)
                for v in node.inputs
                if v is not None and v in constants and v.name
            },
            opset_imports=[onnx.helper.make_opsetid(domain, v) for domain, v in model.graph.opset_imports.items()],
            ir_version=model.ir_version,
        )
    except _UNKNOWN:
        pass  # An operator that ONNX does not know: what the file itself records has to do.
    for value in node.outputs:
        kind = inferred.get(value.name or "")
        if kind is None or not kind.HasField("tensor_type"):
            yield value, None, None
            continue
        dims = kind.tensor_type.shape.dim
        known = kind.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims)
        shape = tuple(dim.dim_value for dim in dims) if known else None
        yield value, shape, ir.DataType(kind.tensor_type.elem_type)


def _opset(node: ir.Node, model: ir.Model) -> int:
    return node.version or model.graph.opset_imports.get(node.domain, 1)


def _foreign_shape(node: ir.Node, shapes: dict[ir.Value, Shape]) -> Shape | None:
    """First output's shape of the operators that ONNX's own inference does not know."""
    first = shapes.get(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
    if first is None or (node.domain not in ("com.microsoft", "") and node.domain):
        return None
    if node.op_type in _SAME_SHAPE and (node.domain == "com.microsoft" or node.op_type.startswith("Simplified")):
        return first
    if node.domain != "com.microsoft":
        return None
    others = [shapes.get(value) if value is not None else None for value in node.inputs[1:3]]
    if node.op_type == "GroupQueryAttention":
        heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
        return (*first[:2], first[2] if others[0] else first[2] // (heads + 2 * kv_heads) * heads)
    if node.op_type == "EmbedLayerNormalization" and others[1] is not None:
        return (*first, others[1][1])
    if node.op_type == "Attention" and others[0] is not None:
        sizes = node.attributes.get("qkv_hidden_sizes")
        width = sizes.as_ints()[2] if sizes is not None else others[0][1] // 3
        return (*first[:2], width)
    if node.op_type == "MultiHeadAttention" and len(first) == 5:
        return (*first[:2], first[2] * first[4])
    if node.op_type == "MultiHeadAttention" and len(first) == 3:
        value = others[1] if len(others) > 1 and others[1] is not None else first
        width = value[2] if len(value) == 3 else value[1] * value[3]
        return (*first[:2], width)
    if node.op_type in ("FusedMatMul", "TransposeMatMul") and others[0] is not None:
        flag = {name: attr.as_int() for name, attr in node.attributes.items() if name in ("transA", "transB")}
        a = first[:-2] + (first[:-3:-1] if flag.get("transA") else first[-2:])
        b = others[0][:-2] + (others[0][:-3:-1] if flag.get("transB") else others[0][-2:])
        return (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
    return None


def _evaluate(
    node: ir.Node, model: ir.Model, shapes: dict[ir.Value, Shape], constants: dict[ir.Value, np.ndarray]
) -> None:
    """Content of a small output whose inputs are known."""
    if node.domain not in ("", "ai.onnx"):
        return
    if node.op_type in ("Shape", "Size"):
        shape = shapes.get(node.inputs[0]) if node.inputs[0] is not None else None
        if shape is not None:
            start, end = (node.attributes.get(name) for name in ("start", "end"))
            cut = slice(start.as_int() if start else None, end.as_int() if end else None)
            content = np.array(shape[cut] if node.op_type == "Shape" else np.prod(shape), dtype=np.int64)
            constants[node.outputs[0]] = content
            shapes.setdefault(node.outputs[0], content.shape)
        return
    if node.op_type not in _SHAPE_ARITHMETIC or any(v is not None and v not in constants for v in node.inputs):
        return
    outputs = [shapes.get(value) for value in node.outputs]
    if any(shape is None or np.prod(shape, dtype=np.int64) > _LARGEST_CONSTANT for shape in outputs):
        return
    feeds = {value.name or "": constants[value] for value in node.inputs if value is not None}
    try:
        opsets = {domain: version for domain, version in model.graph.opset_imports.items() if domain in ("", "ai.onnx")}
        runner = onnx.reference.ReferenceEvaluator(ir.serde.serialize_node(node), opsets=opsets or {"": 18})
        results = runner.run(None, feeds)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return  # Content that cannot be told is no error: the shape alone may do.
    for value, result in zip(node.outputs, results, strict=True):
        constants[value] = np.asarray(result)
