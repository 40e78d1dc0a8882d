"""The ONNX operators that PyTorch executes: one function for each, in one table.

A function of the table reads the attributes of a node once, and returns the function that computes outputs from inputs.
Attributes, inputs and outputs that it does not handle are errors when the node is read, not when it runs.

Outputs of `Shape` and what is computed from them alone stay on the CPU, as sizes for other operators; where an operator
needs tensors of two devices, those on the CPU are moved.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import Tensor
from torch.nn import functional as F

from compressor.errors import ErrorCode, InputError

Inputs = Sequence[Tensor | None]
Outputs = tuple[Tensor | None, ...]
Function = Callable[..., Any]
"""Computes the output, or a tuple of them, of a node from its inputs, by position; omitted inputs are None."""

MICROSOFT = "com.microsoft"
QUANTIZED = ("DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QAttention", "MatMulNBits", "QLinearMatMul")
"""Operators of quantized graphs, which are pruned as float graphs and quantized afterwards."""


class Attributes:
    """The attributes of a node, as its operator reads them.

    Attributes:
        opset: version of the node's domain.
        name: operator and node, for messages.
        inputs: number of inputs.
        outputs: number of outputs, omitted ones included.
    """

    def __init__(self, node: ir.Node, opset: int) -> None:
        self.opset = opset
        self.name = f"{node.op_type} (node {node.name!r})"
        self.inputs, self.outputs = len(node.inputs), len(node.outputs)
        self._node = node
        self._unread = dict(node.attributes)
        for attribute in node.attributes.values():
            if attribute.is_ref():
                raise self.unsupported(f"attribute {attribute.name} of a function")

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an attribute; that of a missing one is the default."""
        attribute = self._unread.pop(name, None)
        if attribute is None:
            return default
        return attribute.as_string() if attribute.type == ir.AttributeType.STRING else attribute.value

    def only(self, name: str, *values: Any) -> None:
        """Read an attribute that has no effect while it has one of some values, of which the first is the default."""
        if (value := self.get(name, values[0])) not in values:
            raise self.unsupported(f"{name}={value}")

    def is_read(self, output: int) -> bool:
        """Whether a node or the graph reads an output."""
        if output >= self.outputs:
            return False
        value = self._node.outputs[output]
        return value.is_graph_output() or bool(value.uses())

    def check(self, operator: Operator, function: Function) -> None:
        """Refuse attributes that were not read, inputs that the function lacks, and outputs that are not computed."""
        if self._unread:
            raise self.unsupported(f"attribute {next(iter(self._unread))}")
        accepted = _arity(function)
        for index, value in enumerate(self._node.inputs):
            if value is not None and index >= accepted:
                raise self.unsupported(f"input {index}")
        if operator.outputs is not None:
            for index in range(operator.outputs, self.outputs):
                if self.is_read(index):
                    raise self.unsupported(f"output {index}")

    def unsupported(self, what: str) -> InputError:
        """The error of a part of the node that is not supported."""
        return _unsupported(self._node, f"{self.name}: {what} is not supported")


@dataclasses.dataclass(frozen=True)
class Operator:
    """An entry of the table.

    Attributes:
        read: reads the attributes of a node and returns the function that computes its outputs.
        outputs: number of outputs that are computed; None: as many as the node has.
        host: positions of the inputs that are read as numbers (sizes, axes, bounds) and stay where they are.
    """

    read: Callable[[Attributes], Function]
    outputs: int | None = 1
    host: tuple[int, ...] = ()


OPERATORS: dict[tuple[str, str], Operator] = {}
"""The table, by domain (empty: that of ONNX) and operator."""


def executor(node: ir.Node, opset: int) -> Callable[[Inputs], Outputs]:
    """The function that computes the outputs of a node.

    Args:
        node: a node of a graph, or of a function without references to attributes.
        opset: version of the node's domain that the graph imports.

    Returns:
        A function of the input tensors, in order and None for those that the node omits; it returns as many outputs as
        the node has, in order and None for those that it omits.

    Raises:
        InputError: the operator, an attribute, or an input or output of the node is not supported; the details are
            `op_type` and `node`, its name.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    operator = OPERATORS.get((domain, node.op_type))
    if operator is None:
        name = f"{domain}.{node.op_type}" if domain else node.op_type
        advice = "; prune the float graph, and quantize it afterwards" if node.op_type in QUANTIZED else ""
        raise _unsupported(node, f"operator {name} (node {node.name!r}) is not supported{advice}")
    attributes = Attributes(node, opset)
    function = operator.read(attributes)
    attributes.check(operator, function)
    host, count = operator.host, len(node.outputs)

    def run(inputs: Inputs) -> Outputs:
        result = function(*_on_one_device(inputs, host))
        if not isinstance(result, tuple):
            result = (result,)
        return result if len(result) == count else (*result, *[None] * count)[:count]

    return run


def supported() -> list[str]:
    """The names of the operators, sorted; those that are not of the ONNX domain have their domain in front."""
    return sorted(f"{domain}.{name}" if domain else name for domain, name in OPERATORS)


def tensor_of(value: ir.TensorProtocol) -> Tensor:
    """A copy of a constant as a tensor on the CPU; integers of 4 bits become integers of 8."""
    array = value.numpy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if array.dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        return torch.from_numpy(array.astype(np.int8 if array.dtype == ml_dtypes.int4 else np.uint8))
    return torch.from_numpy(np.array(array))


def _unsupported(node: ir.Node, message: str) -> InputError:
    return InputError(message, code=ErrorCode.UNSUPPORTED_MODEL, op_type=node.op_type, node=node.name)


def _arity(function: Function) -> float:
    """The largest number of inputs of a function; infinite for functions of C, of which it is not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return math.inf
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    return math.inf if variadic else len(parameters)


def _on_one_device(inputs: Inputs, host: tuple[int, ...]) -> Inputs:
    """Inputs with those on the CPU moved to the accelerator that the rest is on, except numbers that are read."""
    moved = [x for index, x in enumerate(inputs) if isinstance(x, Tensor) and index not in host]
    accelerator = next((x.device for x in moved if x.device.type != "cpu"), None)
    if accelerator is None or all(x.device == accelerator for x in moved):
        return inputs
    return [x.to(accelerator) if isinstance(x, Tensor) and i not in host else x for i, x in enumerate(inputs)]


def operator(
    name: str, domain: str = "", *, outputs: int | None = 1, host: tuple[int, ...] = ()
) -> Callable[[Callable[[Attributes], Function]], Callable[[Attributes], Function]]:
    """Enter a function that reads the attributes of a node into the table."""

    def enter(read: Callable[[Attributes], Function]) -> Callable[[Attributes], Function]:
        OPERATORS[domain, name] = Operator(read, outputs, host)
        return read

    return enter


def _torch_dtype(attributes: Attributes, number: int) -> torch.dtype:
    try:
        return tensor_adapters.to_torch_dtype(ir.DataType(number))
    except (TypeError, ValueError) as error:
        raise attributes.unsupported(f"element type {number}") from error


# Elementwise operators without attributes.


def _divide(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc")


def _power(x: Tensor, y: Tensor) -> Tensor:
    return torch.pow(x, y.to(x.dtype)) if x.is_floating_point() else torch.pow(x, y).to(x.dtype)


def _sum(*inputs: Tensor) -> Tensor:
    return functools.reduce(torch.add, inputs)


def _mean(*inputs: Tensor) -> Tensor:
    return _sum(*inputs) / len(inputs)


def _minimum(*inputs: Tensor) -> Tensor:
    return functools.reduce(torch.minimum, inputs)


def _maximum(*inputs: Tensor) -> Tensor:
    return functools.reduce(torch.maximum, inputs)


def _parametric_relu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Div": _divide,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "PRelu": _parametric_relu,
    "Pow": _power,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}
VARIADIC: Mapping[str, Callable[..., Tensor]] = {
    "Max": _maximum,
    "Mean": _mean,
    "Min": _minimum,
    "Sum": _sum,
}


def _without_attributes(function: Function) -> Operator:
    return Operator(lambda attributes: function)


OPERATORS.update(
    {("", name): _without_attributes(function) for name, function in {**UNARY, **BINARY, **VARIADIC}.items()}
)


@operator("Where")
def _where(attributes: Attributes) -> Function:
    return lambda condition, x, y: torch.where(condition, x, y)


# Elementwise operators with attributes, and activations.


@operator("Mod")
def _mod(attributes: Attributes) -> Function:
    return torch.fmod if attributes.get("fmod", 0) else torch.remainder


@operator("Cast")
def _cast(attributes: Attributes) -> Function:
    dtype = _torch_dtype(attributes, attributes.get("to"))
    attributes.only("saturate", 1, 0)  # effective for floats of 8 bits only
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise attributes.unsupported("a float of 8 bits")
    return lambda x: x.to(dtype)


@operator("CastLike")
def _cast_like(attributes: Attributes) -> Function:
    attributes.only("saturate", 1, 0)
    return lambda x, like: x.to(like.dtype)


@operator("Clip")
def _clip(attributes: Attributes) -> Function:
    bounds = attributes.get("min"), attributes.get("max")

    def clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
        if low is None and high is None:
            return x.clamp(*bounds) if bounds != (None, None) else x
        return torch.clamp(x, low, high)

    return clip


@operator("IsInf")
def _is_inf(attributes: Attributes) -> Function:
    negative, positive = attributes.get("detect_negative", 1), attributes.get("detect_positive", 1)
    if not negative:
        return torch.isposinf if positive else lambda x: torch.zeros_like(x, dtype=torch.bool)
    return torch.isinf if positive else torch.isneginf


@operator("HardSigmoid")
def _hard_sigmoid(attributes: Attributes) -> Function:
    alpha, beta = attributes.get("alpha", 0.2), attributes.get("beta", 0.5)
    return lambda x: (alpha * x + beta).clamp(0, 1)


@operator("LeakyRelu")
def _leaky_relu(attributes: Attributes) -> Function:
    alpha = attributes.get("alpha", 0.01)
    return lambda x: F.leaky_relu(x, alpha)


@operator("ThresholdedRelu")
def _thresholded_relu(attributes: Attributes) -> Function:
    alpha = attributes.get("alpha", 1.0)
    return lambda x: F.threshold(x, alpha, 0.0)


@operator("Elu")
def _elu(attributes: Attributes) -> Function:
    alpha = attributes.get("alpha", 1.0)
    return lambda x: F.elu(x, alpha)


@operator("Celu")
def _celu(attributes: Attributes) -> Function:
    alpha = attributes.get("alpha", 1.0)
    return lambda x: F.celu(x, alpha)


@operator("Selu")
def _selu(attributes: Attributes) -> Function:
    alpha = attributes.get("alpha", 1.67326319217681884765625)
    gamma = attributes.get("gamma", 1.05070102214813232421875)
    return lambda x: gamma * F.elu(x, alpha)


@operator("Swish")
def _swish(attributes: Attributes) -> Function:
    alpha = attributes.get("alpha", 1.0)
    return F.silu if alpha == 1 else lambda x: x * torch.sigmoid(alpha * x)


@operator("QuickGelu", MICROSOFT)
def _quick_gelu(attributes: Attributes) -> Function:
    alpha = attributes.get("alpha", 1.702)
    return F.silu if alpha == 1 else lambda x: x * torch.sigmoid(alpha * x)


@operator("Gelu")
@operator("Gelu", MICROSOFT)
def _gelu(attributes: Attributes) -> Function:
    approximate = attributes.get("approximate", "none")
    return lambda x: F.gelu(x, approximate=approximate)


@operator("BiasGelu", MICROSOFT)
def _bias_gelu(attributes: Attributes) -> Function:
    return lambda x, bias: F.gelu(x + bias)


@operator("FastGelu", MICROSOFT)
def _fast_gelu(attributes: Attributes) -> Function:
    return lambda x, bias=None: F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("Dropout", outputs=2)
def _dropout(attributes: Attributes) -> Function:
    attributes.only("seed", *[attributes._node.attributes.get_int("seed", 0)])
    attributes.get("ratio")
    attributes.get("is_test")
    return lambda x, ratio=None, training=None: (x, torch.ones_like(x, dtype=torch.bool))


def _softmax_over(attributes: Attributes, function: Callable[[Tensor, int], Tensor]) -> Function:
    """A softmax over an axis; before opset 13 over all axes from that one on."""
    if attributes.opset >= 13:
        axis = attributes.get("axis", -1)
        return lambda x: function(x, axis)
    axis = attributes.get("axis", 1)
    return lambda x: function(x.reshape(_rows_and_columns(x, axis)), 1).reshape(x.shape)


@operator("Softmax")
def _softmax(attributes: Attributes) -> Function:
    return _softmax_over(attributes, torch.softmax)


@operator("LogSoftmax")
def _log_softmax(attributes: Attributes) -> Function:
    return _softmax_over(attributes, torch.log_softmax)


# Sizes and constants.


@operator("Constant")
def _constant(attributes: Attributes) -> Function:
    for name in ("value", "value_float", "value_floats", "value_int", "value_ints"):
        if (value := attributes.get(name)) is not None:
            floats = torch.float32 if "float" in name else torch.int64
            tensor = tensor_of(value) if name == "value" else torch.tensor(value, dtype=floats)
            return lambda: tensor
    raise attributes.unsupported("a constant that is not a number")


@operator("Shape")
def _shape(attributes: Attributes) -> Function:
    start, end = attributes.get("start", 0), attributes.get("end")
    return lambda x: torch.tensor(x.shape[start:end], dtype=torch.int64)


@operator("Size")
def _size(attributes: Attributes) -> Function:
    return lambda x: torch.tensor(x.numel())


@operator("ConstantOfShape", host=(0,))
def _constant_of_shape(attributes: Attributes) -> Function:
    value = attributes.get("value")
    fill = torch.zeros(1) if value is None else tensor_of(value)
    return lambda shape: torch.full(shape.tolist(), fill.item(), dtype=fill.dtype)


@operator("Range", host=(0, 1, 2))
def _range(attributes: Attributes) -> Function:
    return lambda start, limit, delta: torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@operator("EyeLike")
def _eye_like(attributes: Attributes) -> Function:
    number, offset = attributes.get("dtype"), attributes.get("k", 0)
    dtype = None if number is None else _torch_dtype(attributes, number)

    def eye_like(x: Tensor) -> Tensor:
        eye = torch.zeros(x.shape, dtype=dtype or x.dtype, device=x.device)
        eye.diagonal(offset).fill_(1)
        return eye

    return eye_like


# Shapes of tensors.


def _rows_and_columns(x: Tensor, axis: int) -> tuple[int, int]:
    """The sizes of a matrix that has the axes before one as its rows."""
    axis = axis + x.dim() if axis < 0 else axis
    return math.prod(x.shape[:axis]), math.prod(x.shape[axis:])


@operator("Reshape", host=(1,))
def _reshape(attributes: Attributes) -> Function:
    allow_zero = attributes.get("allowzero", 0)

    def reshape(x: Tensor, shape: Tensor) -> Tensor:
        sizes = shape.tolist()
        if not allow_zero:
            sizes = [size or x.shape[axis] for axis, size in enumerate(sizes)]
        return x.reshape(sizes)

    return reshape


@operator("Flatten")
def _flatten(attributes: Attributes) -> Function:
    axis = attributes.get("axis", 1)
    return lambda x: x.reshape(_rows_and_columns(x, axis))


@operator("Transpose")
def _transpose(attributes: Attributes) -> Function:
    axes = attributes.get("perm")
    return lambda x: x.permute(tuple(reversed(range(x.dim()))) if axes is None else tuple(axes))


@operator("Expand", host=(1,))
def _expand(attributes: Attributes) -> Function:
    return lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, shape.tolist()))


@operator("Tile", host=(1,))
def _tile(attributes: Attributes) -> Function:
    return lambda x, repeats: x.repeat(repeats.tolist())


@operator("Squeeze", host=(1,))
def _squeeze(attributes: Attributes) -> Function:
    listed = attributes.get("axes")

    def squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
        squeezed = listed if axes is None else axes.tolist()
        return x.squeeze() if squeezed is None else x.squeeze(tuple(squeezed))

    return squeeze


@operator("Unsqueeze", host=(1,))
def _unsqueeze(attributes: Attributes) -> Function:
    listed = attributes.get("axes")

    def unsqueeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
        added = listed if axes is None else axes.tolist()
        rank = x.dim() + len(added)
        for axis in sorted(axis % rank for axis in added):
            x = x.unsqueeze(axis)
        return x

    return unsqueeze


@operator("Concat")
def _concat(attributes: Attributes) -> Function:
    axis = attributes.get("axis")
    return lambda *inputs: torch.cat(inputs, axis)


@operator("Split", outputs=None, host=(1,))
def _split(attributes: Attributes) -> Function:
    axis, listed, parts = attributes.get("axis", 0), attributes.get("split"), attributes.outputs
    attributes.only("num_outputs", parts)

    def split(x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
        sizes = listed if lengths is None else lengths.tolist()
        if sizes is None:
            size = -(-x.shape[axis] // parts)
            sizes = [size] * (parts - 1) + [x.shape[axis] - size * (parts - 1)]
        return torch.split(x, list(sizes), axis)

    return split


@operator("Slice", host=(1, 2, 3, 4))
def _slice(attributes: Attributes) -> Function:
    listed = attributes.get("starts"), attributes.get("ends"), attributes.get("axes")

    def slice_(x: Tensor, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Tensor:
        first, last, along = (
            values if tensor is None else tensor.tolist()
            for values, tensor in zip(listed, (starts, ends, axes), strict=True)
        )
        strides = [1] * len(first) if steps is None else steps.tolist()
        index, reversed_axes = [slice(None)] * x.dim(), []
        for axis, start, end, step in zip(
            range(len(first)) if along is None else along, first, last, strides, strict=True
        ):
            kept = range(x.shape[axis])[start:end:step]
            if step < 0:
                kept = kept[::-1]
                reversed_axes.append(axis)
            index[axis] = slice(kept.start, max(kept.stop, kept.start), kept.step)
        return x[tuple(index)].flip(reversed_axes) if reversed_axes else x[tuple(index)]

    return slice_


@operator("DepthToSpace")
def _depth_to_space(attributes: Attributes) -> Function:
    size, mode = attributes.get("blocksize"), attributes.get("mode", "DCR")

    def depth_to_space(x: Tensor) -> Tensor:
        if mode == "DCR":
            x = x.unflatten(1, (size * size, -1)).transpose(1, 2).flatten(1, 2)
        return F.pixel_shuffle(x, size)

    return depth_to_space


@operator("SpaceToDepth")
def _space_to_depth(attributes: Attributes) -> Function:
    size = attributes.get("blocksize")
    return lambda x: F.pixel_unshuffle(x, size).unflatten(1, (-1, size * size)).transpose(1, 2).flatten(1, 2)


@operator("Pad", host=(1, 3))
def _pad(attributes: Attributes) -> Function:
    listed, mode, fill = attributes.get("pads"), attributes.get("mode", "constant"), attributes.get("value", 0.0)

    def pad(x: Tensor, pads: Any = None, value: Tensor | None = None, axes: Any = None) -> Tensor:
        widths = listed if pads is None else pads.tolist()
        padded = range(x.dim()) if axes is None else axes.tolist()
        before, after = [0] * x.dim(), [0] * x.dim()
        for position, axis in enumerate(padded):
            before[axis], after[axis] = widths[position], widths[position + len(padded)]
        if mode == "constant":
            pairs = [width for axis in reversed(range(x.dim())) for width in (before[axis], after[axis])]
            return F.pad(x, pairs, value=fill if value is None else value.item())
        for axis in range(x.dim()):
            if before[axis] or after[axis]:
                x = x.index_select(axis, _padded_index(x.shape[axis], before[axis], after[axis], mode).to(x.device))
        return x

    return pad


def _padded_index(size: int, before: int, after: int, mode: str) -> Tensor:
    """The elements of an axis that a padded one consists of; negative widths crop."""
    index = np.pad(np.arange(size), (max(before, 0), max(after, 0)), mode)  # type: ignore[call-overload]
    return torch.from_numpy(index[max(-before, 0) : len(index) - max(-after, 0)].copy())


# Indexing.


def _wrapped(indices: Tensor, size: int) -> Tensor:
    """Indices without negative ones, which count from the end."""
    return torch.where(indices < 0, indices + size, indices).long()


@operator("Gather", host=(1,))
def _gather(attributes: Attributes) -> Function:
    axis = attributes.get("axis", 0)

    def gather(x: Tensor, indices: Tensor) -> Tensor:
        if indices.dim() == 0 and indices.device.type == "cpu":
            return x.select(axis, int(indices))
        if x.device != indices.device:
            x, indices = _on_one_device((x, indices), ())  # type: ignore[assignment]
        dim = axis % x.dim()
        wrapped = _wrapped(indices, x.shape[dim])
        if dim == 0 and x.dim() == 2 and x.is_floating_point():
            return F.embedding(wrapped, x)
        return x.index_select(dim, wrapped.flatten()).reshape(*x.shape[:dim], *indices.shape, *x.shape[dim + 1 :])

    return gather


@operator("GatherElements")
def _gather_elements(attributes: Attributes) -> Function:
    axis = attributes.get("axis", 0)
    return lambda x, indices: torch.gather(x, axis, _wrapped(indices, x.shape[axis]))


@operator("GatherND")
def _gather_nd(attributes: Attributes) -> Function:
    batch_dims = attributes.get("batch_dims", 0)

    def gather_nd(x: Tensor, indices: Tensor) -> Tensor:
        shape = indices.shape[:-1]
        index = []
        for axis in range(batch_dims):
            sizes = [1] * len(shape)
            sizes[axis] = -1
            index.append(torch.arange(shape[axis], device=x.device).reshape(sizes).expand(shape))
        return x[(*index, *(indices.long().unbind(-1)))]

    return gather_nd


_REDUCTIONS = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}


@operator("Scatter")
@operator("ScatterElements")
def _scatter_elements(attributes: Attributes) -> Function:
    axis, reduction = attributes.get("axis", 0), attributes.get("reduction", "none")

    def scatter(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        wrapped = _wrapped(indices, x.shape[axis])
        if reduction == "none":
            return x.scatter(axis, wrapped, updates)
        return x.scatter_reduce(axis, wrapped, updates, _REDUCTIONS[reduction])

    return scatter


@operator("ScatterND")
def _scatter_nd(attributes: Attributes) -> Function:
    reduction = attributes.get("reduction", "none")

    def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        depth = indices.shape[-1]
        if reduction in ("none", "add"):
            return x.index_put(indices.long().unbind(-1), updates, accumulate=reduction == "add")
        rows, columns = x.shape[:depth], math.prod(x.shape[depth:])
        flat = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=x.device)
        for axis, index in enumerate(indices.unbind(-1)):
            flat = flat * rows[axis] + _wrapped(index, rows[axis])
        index = flat.reshape(-1, 1).expand(-1, columns)
        matrix = x.reshape(-1, columns).scatter_reduce(0, index, updates.reshape(-1, columns), _REDUCTIONS[reduction])
        return matrix.reshape(x.shape)

    return scatter_nd


@operator("NonZero")
def _non_zero(attributes: Attributes) -> Function:
    return lambda x: torch.nonzero(x).T


@operator("OneHot", host=(1,))
def _one_hot(attributes: Attributes) -> Function:
    axis = attributes.get("axis", -1)

    def one_hot(indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
        size, dim = int(depth), axis % (indices.dim() + 1)
        classes = torch.arange(size, device=indices.device).reshape(-1, *[1] * (indices.dim() - dim))
        hot = _wrapped(indices, size).unsqueeze(dim) == classes
        return torch.where(hot, values[1], values[0])

    return one_hot


@operator("Trilu", host=(1,))
@operator("Trilu", MICROSOFT, host=(1,))
def _trilu(attributes: Attributes) -> Function:
    triangle = torch.triu if attributes.get("upper", 1) else torch.tril
    return lambda x, k=None: triangle(x, 0 if k is None else int(k))


@operator("CumSum", host=(1,))
def _cum_sum(attributes: Attributes) -> Function:
    exclusive, reverse = attributes.get("exclusive", 0), attributes.get("reverse", 0)

    def cum_sum(x: Tensor, axis: Tensor) -> Tensor:
        dim = int(axis)
        values = x.flip(dim) if reverse else x
        sums = values.cumsum(dim, dtype=x.dtype)
        if exclusive:
            sums = sums - values
        return sums.flip(dim) if reverse else sums

    return cum_sum


@operator("TopK", outputs=2, host=(1,))
def _top_k(attributes: Attributes) -> Function:
    axis, largest, listed = attributes.get("axis", -1), attributes.get("largest", 1), attributes.get("k")
    attributes.only("sorted", 1, 0)

    def top_k(x: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # A stable sort chooses the first of equal elements, as ONNX Runtime does; torch.topk chooses any.
        values, indices = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
        count = listed if k is None else int(k)
        return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)

    return top_k


# Reductions.


def _arg(attributes: Attributes, function: Callable[..., Tensor]) -> Function:
    axis, keep, last = (
        attributes.get("axis", 0),
        bool(attributes.get("keepdims", 1)),
        attributes.get("select_last_index", 0),
    )

    def arg(x: Tensor) -> Tensor:
        if last:
            return x.shape[axis] - 1 - function(x.flip(axis), dim=axis, keepdim=keep)
        return function(x, dim=axis, keepdim=keep)

    return arg


@operator("ArgMax")
def _arg_max(attributes: Attributes) -> Function:
    return _arg(attributes, torch.argmax)


@operator("ArgMin")
def _arg_min(attributes: Attributes) -> Function:
    return _arg(attributes, torch.argmin)


def _reduce_sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.sum(axes, keepdim=keep, dtype=None if x.is_floating_point() else x.dtype)


def _reduce_mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.mean(axes, keepdim=keep) if x.is_floating_point() else x.double().mean(axes, keepdim=keep).to(x.dtype)


def _reduce_prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


REDUCTIONS: Mapping[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceL1": lambda x, axes, keep: _reduce_sum(x.abs(), axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep),
    "ReduceLogSum": lambda x, axes, keep: _reduce_sum(x, axes, keep).log(),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": torch.amax,
    "ReduceMean": _reduce_mean,
    "ReduceMin": torch.amin,
    "ReduceProd": _reduce_prod,
    "ReduceSum": _reduce_sum,
    "ReduceSumSquare": lambda x, axes, keep: _reduce_sum(x * x, axes, keep),
}


def _reducer(reduction: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[[Attributes], Function]:
    """The reader of a reduction: axes are an attribute or an input, according to the version."""

    def read(attributes: Attributes) -> Function:
        listed, keep = attributes.get("axes"), bool(attributes.get("keepdims", 1))
        keep_all = attributes.get("noop_with_empty_axes", 0)

        def reduce(x: Tensor, axes: Tensor | None = None) -> Tensor:
            reduced = list(listed or ()) if axes is None else axes.tolist()
            if not reduced and keep_all:
                return reduction(x.unsqueeze(-1), [-1], False)
            return reduction(x, reduced or list(range(x.dim())), keep)

        return reduce

    return read


OPERATORS.update({("", name): Operator(_reducer(function), host=(1,)) for name, function in REDUCTIONS.items()})


# Matrix products and convolutions.


@operator("Gemm")
def _gemm(attributes: Attributes) -> Function:
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    first, second = attributes.get("transA", 0), attributes.get("transB", 0)

    def gemm(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        a, b = a.T if first else a, b.T if second else b
        if c is not None:
            return torch.addmm(c, a, b, beta=beta, alpha=alpha)
        return torch.mm(a, b) if alpha == 1 else alpha * torch.mm(a, b)

    return gemm


@operator("Einsum")
def _einsum(attributes: Attributes) -> Function:
    equation = attributes.get("equation")
    return lambda *inputs: torch.einsum(equation, *inputs)


# Normalization.


def _layer_norm(x: Tensor, axis: int, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    shape = x.shape[axis:]
    if weight.shape != shape or (bias is not None and bias.shape != shape):
        normalized = F.layer_norm(x, shape, None, None, epsilon) * weight
        return normalized if bias is None else normalized + bias
    if weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return F.layer_norm(x, shape, weight, bias, epsilon)
    wide = torch.promote_types(weight.dtype, x.dtype)
    parameters = weight.to(wide), None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), shape, *parameters, epsilon).to(x.dtype)


@operator("LayerNormalization", outputs=3)
def _layer_normalization(attributes: Attributes) -> Function:
    axis, epsilon = attributes.get("axis", -1), attributes.get("epsilon", 1e-5)
    attributes.only("stash_type", 1)
    has_moments = attributes.is_read(1) or attributes.is_read(2)

    def layer_normalization(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        normalized = _layer_norm(x, axis, weight, bias, epsilon)
        if not has_moments:
            return normalized
        axes = list(range(axis % x.dim(), x.dim()))
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        return normalized, mean, torch.rsqrt(variance + epsilon)

    return layer_normalization
