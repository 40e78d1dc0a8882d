"""The ONNX operators that PyTorch executes: one function for each, in one table.

The positional parameters of a function are the inputs of its operator, and the keyword-only ones its attributes, with
their defaults; two more describe the node: `opset`, and `used`, whether each output is read. Attributes, inputs and
outputs that a function lacks are errors when a node is read, not when it runs.

Sizes, and what is computed from them alone, stay on the CPU; where an operator needs tensors of two devices, those on
the CPU are moved.
"""

# ruff: noqa: N803 - attributes have the names of ONNX

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

Input = Tensor | None
"""An input of a node, which may omit it."""
Inputs = Sequence[Input]
Sizes = Sequence[int]
Outputs = tuple[Tensor | None, ...]
Function = Callable[..., Any]
"""Returns the output of a node, or a tuple of its outputs."""

MICROSOFT = "com.microsoft"
_CONTROL_FLOW = frozenset(("If", "Loop", "Scan", "SequenceMap"))


@dataclasses.dataclass(frozen=True)
class Operator:
    """An entry of the table.

    Attributes:
        function: computes the outputs from inputs and attributes.
        inputs: largest number of inputs.
        attributes: attributes that the function takes, and their defaults; `inspect.Parameter.empty`: required.
        outputs: positions of the outputs that are computed; None: all that the node has.
        host: positions of the inputs that are read as numbers (sizes, axes, bounds) and stay on their device.
        limits: attribute -> its supported values, if not all are supported.
        ignored: attributes that have no effect here.
        absent: positions of the inputs that a node must omit, such as keys of earlier positions; their annotation is
            None.
    """

    function: Function
    inputs: float
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    outputs: tuple[int, ...] | None = (0,)
    host: tuple[int, ...] = ()
    limits: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    absent: tuple[int, ...] = ()


OPERATORS: dict[tuple[str, str], Operator] = {}
"""The table, by domain (empty: that of ONNX) and operator."""


def executor(node: ir.Node, opset: int) -> Callable[[Inputs], Outputs]:
    """The function that computes the outputs of a node.

    Args:
        node: a node of a graph, or of a function without references to attributes.
        opset: version of the node's domain that the graph imports.

    Returns:
        A function of the input tensors, in order and None for those that the node omits; it returns as many outputs as
        the node has, in order and None for those that it omits. A sequence of tensors is a tuple of them.

    Raises:
        InputError: the operator, an attribute, or an input or output of the node is not supported; the details are
            `op_type` and `node`, its name.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    operator = OPERATORS.get((domain, node.op_type))
    if operator is None:
        name = f"{domain}.{node.op_type}" if domain else node.op_type
        if node.op_type in _CONTROL_FLOW:
            raise _unsupported(node, "its operators depend on the inputs; export the graph without control flow")
        advice = "replace it by standard ONNX operators" if domain else "docs/graphs.md lists the supported operators"
        raise _unsupported(node, f"operator {name} is not supported; {advice}")
    function = functools.partial(operator.function, **_keywords(node, operator, opset))
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


def _keywords(node: ir.Node, operator: Operator, opset: int) -> dict[str, Any]:
    """The attributes of a node as keywords of its operator's function."""
    used = tuple(output.is_graph_output() or bool(output.uses()) for output in node.outputs)
    keywords: dict[str, Any] = {"opset": opset, "used": used}
    for name, attribute in node.attributes.items():
        if attribute.is_ref() or name not in (*operator.attributes, *operator.limits, *operator.ignored):
            raise _unsupported(node, f"attribute {name} is not supported")
        value = attribute.as_string() if attribute.type == ir.AttributeType.STRING else attribute.value
        value = list(value) if isinstance(value, tuple) else value
        if name in operator.limits and value not in operator.limits[name]:
            raise _unsupported(node, f"{name}={value} is not supported")
        keywords[name] = value
    for name, default in operator.attributes.items():
        if default is inspect.Parameter.empty and name not in keywords:
            raise _unsupported(node, f"attribute {name} is missing")
    for index, value in enumerate(node.inputs):
        if value is not None and (index >= operator.inputs or index in operator.absent):
            raise _unsupported(node, f"input {index} is not supported")
    for index in range(len(used)):
        if used[index] and operator.outputs is not None and index not in operator.outputs:
            raise _unsupported(node, f"output {index} is not supported")
    return {name: value for name, value in keywords.items() if name in operator.attributes}


def _unsupported(node: ir.Node, problem: str) -> InputError:
    message = f"{node.op_type} (node {node.name!r}): {problem}"
    return InputError(message, code=ErrorCode.UNSUPPORTED_MODEL, op_type=node.op_type, node=node.name)


def _on_one_device(inputs: Inputs, host: tuple[int, ...] = ()) -> Inputs:
    """Inputs with those on the CPU moved to the accelerator that the rest is on, except numbers that are read."""
    tensors = [x for index, x in enumerate(inputs) if isinstance(x, Tensor) and index not in host]
    accelerator = next((x.device for x in tensors if x.device.type != "cpu"), None)
    if accelerator is None or all(x.device == accelerator for x in tensors):
        return inputs
    return [x.to(accelerator) if isinstance(x, Tensor) and i not in host else x for i, x in enumerate(inputs)]


def operator(
    name: str, domain: str = "", *, passes_to: Sequence[Function] = (), **fields: Any
) -> Callable[[Function], Function]:
    """Add a function to the table; `fields` are the fields of `Operator` that do not follow from its parameters.

    A function with `**attributes` has the attributes of the functions in `passes_to` too.
    """

    def enter(function: Function) -> Function:
        parameters = list(inspect.signature(function).parameters.values())
        passed = [p for target in passes_to for p in inspect.signature(target).parameters.values()]
        attributes = {p.name: p.default for p in (*passed, *parameters) if p.kind is p.KEYWORD_ONLY}
        inputs = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        count = math.inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(inputs)
        absent = tuple(index for index, p in enumerate(inputs) if p.annotation == "None")
        OPERATORS[domain, name] = Operator(function, count, attributes, absent=absent, **fields)
        return function

    return enter


# Elementwise operators. In this module, a function of one expression is a lambda.

UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name.lower())
        for name in (
            "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor IsNaN Log Neg Reciprocal Relu Round"
            " Sigmoid Sign Sin Sinh Sqrt Tan Tanh"
        ).split()
    },
    **{name: getattr(F, name.lower()) for name in ("HardSwish", "Mish", "Softplus", "Softsign")},
    "BitwiseNot": torch.bitwise_not,
    "Identity": lambda x: x,
    "Not": torch.logical_not,
}
BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Div": lambda x, y: torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc"),
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
    "Pow": lambda x, y: torch.pow(x, y.to(x.dtype)) if x.is_floating_point() else torch.pow(x, y).to(x.dtype),
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}
OPERATORS.update({("", name): Operator(function, 1) for name, function in UNARY.items()})
OPERATORS.update({("", name): Operator(function, 2) for name, function in BINARY.items()})
_TYPES = [
    kind.value
    for kind in ir.DataType
    if (kind.is_floating_point() or kind.is_integer() or kind == ir.DataType.BOOL) and kind.bitwidth >= 8
    if not kind.name.startswith("FLOAT8")
]
"""Element types that a node can request."""
_ROUNDING = ("saturate", "round_mode")


@functools.cache
def _dtype(number: int) -> torch.dtype:
    return tensor_adapters.to_torch_dtype(ir.DataType(number))


def _sum(*inputs: Tensor) -> Tensor:
    return functools.reduce(torch.add, inputs)


def _clamp(x: Tensor, low: Tensor | float | None, high: Tensor | float | None) -> Tensor:
    return x if low is None and high is None else torch.clamp(x, low, high)  # type: ignore[arg-type]


operator("Cast", limits={"to": _TYPES}, ignored=_ROUNDING)(lambda x, *, to: x.to(_dtype(to)))
operator("CastLike", ignored=_ROUNDING)(lambda x, like: x.to(like.dtype))
operator("Clip")(
    lambda x, low=None, high=None, *, min=None, max=None: _clamp(
        x, min if low is None else low, max if high is None else high
    )
)
operator("IsInf")(
    lambda x, *, detect_negative=1, detect_positive=1: (
        torch.isinf(x) & ((bool(detect_positive) & (x > 0)) | (bool(detect_negative) & (x < 0)))
    )
)
operator("Max")(lambda *inputs: functools.reduce(torch.maximum, inputs))
operator("Mean")(lambda *inputs: _sum(*inputs) / len(inputs))
operator("Min")(lambda *inputs: functools.reduce(torch.minimum, inputs))
operator("Mod")(lambda x, y, *, fmod=0: torch.fmod(x, y) if fmod else torch.remainder(x, y))
operator("Sum")(_sum)
operator("Where")(lambda condition, x, y: torch.where(condition, x, y))


# Activations.


def _swish(x: Tensor, alpha: float) -> Tensor:
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


def _softmax(function: Callable[[Tensor, int], Tensor], x: Tensor, *, axis: int | None = None, opset: int) -> Tensor:
    """A softmax over an axis; before opset 13 over all axes from that one on."""
    if opset >= 13:
        return function(x, -1 if axis is None else axis)
    return function(x.reshape(_rows_and_columns(x, 1 if axis is None else axis)), 1).reshape(x.shape)


@operator("Dropout", outputs=(0, 1), ignored=("is_test", "ratio", "seed"))
def _dropout(x: Tensor, ratio: Input = None, training: Input = None) -> Outputs:
    return x, torch.ones_like(x, dtype=torch.bool)


operator("BiasGelu", MICROSOFT)(lambda x, bias: F.gelu(x + bias))
operator("Celu")(lambda x, *, alpha=1.0: F.celu(x, alpha))
operator("Elu")(lambda x, *, alpha=1.0: F.elu(x, alpha))
operator("FastGelu", MICROSOFT)(lambda x, bias=None: F.gelu(x if bias is None else x + bias, approximate="tanh"))
operator("Gelu")(operator("Gelu", MICROSOFT)(lambda x, *, approximate="none": F.gelu(x, approximate=approximate)))
operator("HardSigmoid")(lambda x, *, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1))
operator("LeakyRelu")(lambda x, *, alpha=0.01: F.leaky_relu(x, alpha))
operator("LogSoftmax")(functools.partial(_softmax, torch.log_softmax))
operator("QuickGelu", MICROSOFT)(lambda x, *, alpha=1.702: _swish(x, alpha))
operator("Selu")(lambda x, *, alpha=1.6732632423543772, gamma=1.0507009873554805: gamma * F.elu(x, alpha))
operator("Softmax")(functools.partial(_softmax, torch.softmax))
operator("Swish")(lambda x, *, alpha=1.0: _swish(x, alpha))
operator("ThresholdedRelu")(lambda x, *, alpha=1.0: F.threshold(x, alpha, 0.0))

_ACTIVATIONS = ("", "Clip", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")
"""Activations within fused operators."""


def _activated(x: Tensor, name: str, parameters: Sequence[float]) -> Tensor:
    """The activation of a fused operator, in which its parameters have no names."""
    if not name:
        return x
    entry = OPERATORS["", name]
    activated: Tensor = entry.function(x, **dict(zip(entry.attributes, parameters, strict=False)))
    return activated


# Sizes and constants.


@operator("Constant")
def _constant(
    *,
    value: Any = None,
    value_float: Any = None,
    value_floats: Any = None,
    value_int: Any = None,
    value_ints: Any = None,
) -> Tensor:
    if value is not None:
        return tensor_of(value)
    floats = value_floats if value_float is None else value_float
    if floats is not None:
        return torch.tensor(floats, dtype=torch.float32)
    return torch.tensor(value_ints if value_int is None else value_int, dtype=torch.int64)


@operator("ConstantOfShape", host=(0,))
def _constant_of_shape(shape: Tensor, *, value: ir.TensorProtocol | None = None) -> Tensor:
    fill = torch.zeros(1) if value is None else tensor_of(value)
    return torch.full(shape.tolist(), fill.item(), dtype=fill.dtype)


@operator("EyeLike", limits={"dtype": _TYPES})
def _eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    eye = torch.zeros(x.shape, dtype=x.dtype if dtype is None else _dtype(dtype), device=x.device)
    eye.diagonal(k).fill_(1)
    return eye


operator("Range", host=(0, 1, 2))(
    lambda start, limit, delta: torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)
)
operator("Shape")(lambda x, *, start=0, end=None: torch.tensor(x.shape[start:end], dtype=torch.int64))
operator("Size")(lambda x: torch.tensor(x.numel()))


# Shapes of tensors.


def _rows_and_columns(x: Tensor, axis: int) -> tuple[int, int]:
    """The sizes of a matrix that has the axes before one as its rows."""
    axis = axis + x.dim() if axis < 0 else axis
    return math.prod(x.shape[:axis]), math.prod(x.shape[axis:])


def _numbers(listed: Input, attribute: Any) -> Any:
    """Numbers that are an input of an operator, or an attribute in its earlier versions."""
    return attribute if listed is None else listed.tolist()


@operator("Reshape", host=(1,))
def _reshape(x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    sizes = shape.tolist()
    return x.reshape(sizes if allowzero else [size or x.shape[axis] for axis, size in enumerate(sizes)])


operator("Concat")(lambda *inputs, axis: torch.cat(inputs, axis))
operator("Expand", host=(1,))(lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, shape.tolist())))
operator("Flatten")(lambda x, *, axis=1: x.reshape(_rows_and_columns(x, axis)))
operator("Tile", host=(1,))(lambda x, repeats: x.repeat(repeats.tolist()))
operator("Transpose")(lambda x, *, perm=None: x.permute(list(reversed(range(x.dim()))) if perm is None else perm))


@operator("Squeeze", host=(1,))
def _squeeze(x: Tensor, listed: Input = None, *, axes: list[int] | None = None) -> Tensor:
    squeezed = _numbers(listed, axes)
    return x.squeeze() if squeezed is None else x.squeeze(squeezed)


@operator("Unsqueeze", host=(1,))
def _unsqueeze(x: Tensor, listed: Input = None, *, axes: Sizes = ()) -> Tensor:
    added = _numbers(listed, axes)
    for axis in sorted(axis % (x.dim() + len(added)) for axis in added):
        x = x.unsqueeze(axis)
    return x


@operator("Split", outputs=None, host=(1,), ignored=("num_outputs",))
def _split(
    x: Tensor, listed: Input = None, *, axis: int = 0, split: list[int] | None = None, used: tuple[bool, ...]
) -> Outputs:
    sizes, parts = _numbers(listed, split), len(used)
    if sizes is None:
        size = -(-x.shape[axis] // parts)
        sizes = [size] * (parts - 1) + [x.shape[axis] - size * (parts - 1)]
    return torch.split(x, sizes, axis)


@operator("Slice", host=(1, 2, 3, 4))
def _slice(
    x: Tensor,
    first: Input = None,
    last: Input = None,
    along: Input = None,
    steps: Input = None,
    *,
    starts: Sizes = (),
    ends: Sizes = (),
    axes: Sizes | None = None,
) -> Tensor:
    starts, ends, axes = _numbers(first, starts), _numbers(last, ends), _numbers(along, axes)
    strides = _numbers(steps, [1] * len(starts))
    index, flipped = [slice(None)] * x.dim(), []
    for axis, start, end, step in zip(axes or range(len(starts)), starts, ends, strides, strict=True):
        kept = range(x.shape[axis])[start:end:step]
        if step < 0:
            kept = kept[::-1]
            flipped.append(axis)
        index[axis] = slice(kept.start, max(kept.stop, kept.start), kept.step)
    return x[tuple(index)].flip(flipped) if flipped else x[tuple(index)]


@operator("DepthToSpace")
def _depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "DCR":
        x = x.unflatten(1, (blocksize**2, -1)).transpose(1, 2).flatten(1, 2)
    return F.pixel_shuffle(x, blocksize)


@operator("SpaceToDepth")
def _space_to_depth(x: Tensor, *, blocksize: int) -> Tensor:
    return F.pixel_unshuffle(x, blocksize).unflatten(1, (-1, blocksize**2)).transpose(1, 2).flatten(1, 2)


@operator("Pad", host=(1, 2, 3))
def _pad(
    x: Tensor,
    listed: Input = None,
    fill: Input = None,
    axes: Input = None,
    *,
    pads: Sizes = (),
    mode: str = "constant",
    value: float = 0.0,
) -> Tensor:
    widths, padded = _numbers(listed, pads), _numbers(axes, range(x.dim()))
    pairs = [(0, 0)] * x.dim()
    for axis, before, after in zip(padded, widths[: len(padded)], widths[len(padded) :], strict=True):
        pairs[axis] = before, after
    if mode == "constant":
        return _padded(x, pairs, value if fill is None else fill.item())
    for axis, (before, after) in enumerate(pairs):
        if before or after:  # negative widths crop
            index = np.pad(np.arange(x.shape[axis]), (max(before, 0), max(after, 0)), mode)  # type: ignore[call-overload]
            kept = torch.from_numpy(index[max(-before, 0) : len(index) - max(-after, 0)])
            x = x.index_select(axis, kept.to(x.device))
    return x


def _padded(x: Tensor, pads: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """A tensor with its last axes padded by widths before and after each; negative widths crop."""
    return F.pad(x, [width for pair in reversed(pads) for width in pair], value=value)


# Indexing.

_SCATTERED = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}


def _wrapped(indices: Tensor, size: int) -> Tensor:
    """Indices without negative ones, which count from the end."""
    return torch.where(indices < 0, indices + size, indices).long()


@operator("Gather", host=(1,))
def _gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    if indices.dim() == 0 and indices.device.type == "cpu":
        return x.select(axis, int(indices))
    if x.device != indices.device:
        x, indices = _on_one_device((x, indices))  # type: ignore[assignment]
    axis = axis % x.dim()
    wrapped = _wrapped(indices, x.shape[axis])
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(wrapped, x)
    return x.index_select(axis, wrapped.flatten()).reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


@operator("GatherND")
def _gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    shape = indices.shape[:-1]
    grid = torch.meshgrid([torch.arange(size, device=x.device) for size in shape], indexing="ij") if batch_dims else ()
    return x[(*grid[:batch_dims], *indices.long().unbind(-1))]


@operator("Scatter")
@operator("ScatterElements")
def _scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    wrapped = _wrapped(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, wrapped, updates)
    return x.scatter_reduce(axis, wrapped, updates, _SCATTERED[reduction])


@operator("ScatterND")
def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    depth = indices.shape[-1]
    if reduction in ("none", "add"):
        return x.index_put(indices.long().unbind(-1), updates, accumulate=reduction == "add")
    columns = math.prod(x.shape[depth:])
    row = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=x.device)
    for size, index in zip(x.shape, indices.unbind(-1), strict=False):
        row = row * size + _wrapped(index, size)
    places = row.reshape(-1, 1).expand(-1, columns)
    rows = x.reshape(-1, columns)
    return rows.scatter_reduce(0, places, updates.reshape(-1, columns), _SCATTERED[reduction]).reshape(x.shape)


@operator("OneHot", host=(1,))
def _one_hot(indices: Tensor, depth: Tensor, values: Tensor, *, axis: int = -1) -> Tensor:
    size, axis = int(depth), axis % (indices.dim() + 1)
    classes = torch.arange(size, device=indices.device).reshape(-1, *[1] * (indices.dim() - axis))
    return torch.where(_wrapped(indices, size).unsqueeze(axis) == classes, values[1], values[0])


@operator("Trilu", host=(1,))
@operator("Trilu", MICROSOFT, host=(1,))
def _trilu(x: Tensor, k: Input = None, *, upper: int = 1) -> Tensor:
    return (torch.triu if upper else torch.tril)(x, 0 if k is None else int(k))


@operator("CumSum", host=(1,))
def _cum_sum(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    values = x.flip(int(axis)) if reverse else x
    sums = values.cumsum(int(axis), dtype=x.dtype)
    sums = sums - values if exclusive else sums
    return sums.flip(int(axis)) if reverse else sums


@operator("TopK", outputs=(0, 1), host=(1,), ignored=("sorted",))
def _top_k(x: Tensor, listed: Input = None, *, axis: int = -1, largest: int = 1, k: int | None = None) -> Outputs:
    # A stable sort chooses the first of equal elements, as ONNX Runtime does; torch.topk chooses any.
    values, indices = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    count = int(k if listed is None else listed)  # type: ignore[arg-type]
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


operator("GatherElements")(lambda x, indices, *, axis=0: torch.gather(x, axis, _wrapped(indices, x.shape[axis])))
operator("NonZero")(lambda x: torch.nonzero(x).T)


# Reductions.


def _arg(
    function: Callable[..., Tensor], x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0
) -> Tensor:
    if select_last_index:
        return x.shape[axis] - 1 - function(x.flip(axis), dim=axis, keepdim=bool(keepdims))
    return function(x, dim=axis, keepdim=bool(keepdims))


def _reduce_sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.sum(axes, keepdim=keep, dtype=None if x.is_floating_point() else x.dtype)


def _reduce_mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.mean(axes, keepdim=keep) if x.is_floating_point() else x.double().mean(axes, keepdim=keep).to(x.dtype)


def _reduce_prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


Reduction = Callable[[Tensor, list[int], bool], Tensor]
REDUCTIONS: Mapping[str, Reduction] = {
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


def _reduce(
    reduction: Reduction,
    x: Tensor,
    listed: Input = None,
    *,
    axes: Sizes = (),
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Tensor:
    reduced = list(_numbers(listed, axes))
    if not reduced and noop_with_empty_axes:
        return reduction(x.unsqueeze(-1), [-1], False)
    return reduction(x, reduced or list(range(x.dim())), bool(keepdims))


operator("ArgMax")(functools.partial(_arg, torch.argmax))
operator("ArgMin")(functools.partial(_arg, torch.argmin))
for _name, _reduction in REDUCTIONS.items():
    operator(_name, host=(1,))(functools.partial(_reduce, _reduction))


# Matrix products.


@operator("Gemm")
def _gemm(
    a: Tensor, b: Tensor, c: Input = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0
) -> Tensor:
    a, b = a.T if transA else a, b.T if transB else b
    if c is not None:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    return torch.mm(a, b) if alpha == 1 else alpha * torch.mm(a, b)


@operator("FusedMatMul", MICROSOFT, limits={"transBatchA": (0,), "transBatchB": (0,)})
@operator("TransposeMatMul", MICROSOFT)
def _fused_mat_mul(a: Tensor, b: Tensor, *, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> Tensor:
    a, b = a.mT if transA and a.dim() > 1 else a, b.mT if transB and b.dim() > 1 else b
    return torch.matmul(a, b) if alpha == 1 else alpha * torch.matmul(a, b)


@operator("FusedGemm", MICROSOFT, passes_to=(_gemm,), limits={"activation": _ACTIVATIONS})
def _fused_gemm(
    a: Tensor,
    b: Tensor,
    c: Input = None,
    *,
    activation: str,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    **attributes: Any,
) -> Tensor:
    parameters = [value for value in (activation_alpha, activation_beta) if value is not None]
    return _activated(_gemm(a, b, c, **attributes), activation, parameters)


operator("Einsum")(lambda *inputs, equation: torch.einsum(equation, *inputs))


# Normalization.


def _layer_norm(x: Tensor, axis: int, weight: Tensor, bias: Input, epsilon: float) -> Tensor:
    shape = x.shape[axis:]
    if weight.shape != shape or (bias is not None and bias.shape != shape):
        normalized = F.layer_norm(x, shape, None, None, epsilon) * weight
        return normalized if bias is None else normalized + bias
    if weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return F.layer_norm(x, shape, weight, bias, epsilon)
    wide = torch.promote_types(weight.dtype, x.dtype)
    bias = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), shape, weight.to(wide), bias, epsilon).to(x.dtype)


def _rms_norm(x: Tensor, axis: int, weight: Tensor, epsilon: float) -> Tensor:
    if weight.shape == x.shape[axis:] and weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return F.rms_norm(x, x.shape[axis:], None, epsilon).to(weight.dtype) * weight


def _deviation(x: Tensor, axis: int, epsilon: float, centred: bool) -> tuple[Tensor, Tensor]:
    """The mean over the axes from one on (zero unless `centred`), and the reciprocal of the deviation from it."""
    axes = list(range(axis % x.dim(), x.dim()))
    mean = x.mean(axes, keepdim=True) if centred else torch.zeros_like(x)
    return mean, torch.rsqrt((x - mean).square().mean(axes, keepdim=True) + epsilon)


@operator("LayerNormalization", outputs=(0, 1, 2), limits={"stash_type": (1,)})
def _layer_normalization(
    x: Tensor, weight: Tensor, bias: Input = None, *, axis: int = -1, epsilon: float = 1e-5, used: tuple[bool, ...]
) -> Outputs:
    moments = _deviation(x, axis, epsilon, True) if any(used[1:]) else ()
    return _layer_norm(x, axis, weight, bias, epsilon), *moments


@operator("RMSNormalization", limits={"stash_type": (1,)})
@operator("SimplifiedLayerNormalization", outputs=(0, 1), limits={"stash_type": (1,)})
@operator("SimplifiedLayerNormalization", MICROSOFT, outputs=(0, 1), limits={"stash_type": (1,)})
def _rms_normalization(
    x: Tensor, weight: Tensor, *, axis: int = -1, epsilon: float = 1e-5, used: tuple[bool, ...]
) -> Outputs:
    moments = _deviation(x, axis, epsilon, False)[1:] if any(used[1:]) else ()
    return _rms_norm(x, axis, weight, epsilon), *moments


@operator("SkipLayerNormalization", MICROSOFT, outputs=(0, 3))
def _skip_layer_normalization(
    x: Tensor, skip: Tensor, weight: Tensor, shift: Input = None, bias: Input = None, *, epsilon: float = 1e-12
) -> Outputs:
    total = x + skip if bias is None else x + skip + bias
    return _layer_norm(total, -1, weight, shift, epsilon), None, None, total


@operator("SkipSimplifiedLayerNormalization", MICROSOFT, outputs=(0, 3))
def _skip_simplified_layer_normalization(
    x: Tensor, skip: Tensor, weight: Tensor, bias: Input = None, *, epsilon: float = 1e-12
) -> Outputs:
    total = x + skip if bias is None else x + skip + bias
    return _rms_norm(total, -1, weight, epsilon), None, None, total


@operator("EmbedLayerNormalization", MICROSOFT, outputs=(0, 1, 2), ignored=("mask_index_type",))
def _embed_layer_normalization(
    ids: Tensor,
    types: Input,
    words: Tensor,
    positions: Tensor,
    segments: Input,
    weight: Tensor,
    bias: Tensor,
    mask: Input = None,
    position_ids: Input = None,
    *,
    epsilon: float = 1e-12,
) -> Outputs:
    if position_ids is None:
        position_ids = torch.arange(ids.shape[1], device=ids.device)
    total = F.embedding(ids, words) + F.embedding(position_ids, positions)
    if types is not None and segments is not None:
        total = total + F.embedding(types, segments)
    counts = torch.zeros_like(ids) if mask is None else mask
    return _layer_norm(total, -1, weight, bias, epsilon), counts.sum(1, dtype=torch.int32), total


@operator("BatchNormalization", limits={"training_mode": (0,)}, ignored=("momentum",))
def _batch_normalization(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, epsilon: float = 1e-5
) -> Tensor:
    scale = weight * torch.rsqrt(variance + epsilon)
    scale, shift = (vector.reshape(-1, *[1] * (x.dim() - 2)) for vector in (scale, bias - mean * scale))
    return x * scale + shift


@operator("GroupNormalization", limits={"stash_type": (1,)})
def _group_normalization(
    x: Tensor, weight: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, opset: int
) -> Tensor:
    if opset < 21:  # a scale for each group, later for each channel
        repeats = x.shape[1] // num_groups
        weight, bias = weight.repeat_interleave(repeats), bias.repeat_interleave(repeats)
    return F.group_norm(x, num_groups, weight, bias, epsilon)


operator("InstanceNormalization")(
    lambda x, weight, bias, *, epsilon=1e-5: F.instance_norm(x, None, None, weight, bias, True, 0.0, epsilon)
)
operator("LpNormalization")(lambda x, *, axis=-1, p=2: x / torch.linalg.vector_norm(x, p, axis, keepdim=True))


# Convolutions, pools and images.

_AUTO_PAD = {"auto_pad": ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")}


def _window(
    x: Tensor, kernel: Sizes, *, auto_pad: str = "NOTSET", dilations: Sizes = (), pads: Sizes = (), strides: Sizes = ()
) -> tuple[Sizes, Sizes, list[tuple[int, int]]]:
    """Strides, dilations, and widths of padding before and after each axis of space."""
    rank = len(kernel)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    if not auto_pad.startswith("SAME"):
        widths = pads or [0] * 2 * rank
        return strides, dilations, list(zip(widths[:rank], widths[rank:], strict=True))
    pairs = []
    for size, width, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        small, large = total // 2, total - total // 2
        pairs.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    return strides, dilations, pairs


@operator("Conv", passes_to=(_window,), limits=_AUTO_PAD, ignored=("kernel_shape",))
def _conv(x: Tensor, weight: Tensor, bias: Input = None, *, group: int = 1, **window: Any) -> Tensor:
    strides, dilations, pairs = _window(x, weight.shape[2:], **window)
    zeros = [0] * len(pairs)
    if any(before != after for before, after in pairs):
        x, pairs = _padded(x, pairs), [(0, 0)] * len(pairs)
    return torch.convolution(x, weight, bias, strides, [before for before, _ in pairs], dilations, False, zeros, group)


@operator(
    "FusedConv",
    MICROSOFT,
    passes_to=(_conv, _window),
    limits={**_AUTO_PAD, "activation": _ACTIVATIONS},
    ignored=("kernel_shape",),
)
def _fused_conv(
    x: Tensor,
    weight: Tensor,
    bias: Input = None,
    addend: Input = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] = (),
    **attributes: Any,
) -> Tensor:
    y = _conv(x, weight, bias, **attributes)
    return _activated(y if addend is None else y + addend, activation, activation_params)


@operator("ConvTranspose", passes_to=(_window,), limits={"auto_pad": ("NOTSET",)}, ignored=("kernel_shape",))
def _conv_transpose(
    x: Tensor, weight: Tensor, bias: Input = None, *, group: int = 1, output_padding: Sizes = (), **window: Any
) -> Tensor:
    strides, dilations, pairs = _window(x, weight.shape[2:], **window)
    zeros = [0] * len(pairs)
    whole = torch.convolution(x, weight, bias, strides, zeros, dilations, True, output_padding or zeros, group)
    return _padded(whole, [(-before, -after) for before, after in pairs])


@operator("MaxPool", passes_to=(_window,), limits={**_AUTO_PAD, "storage_order": (0,), "ceil_mode": (0,)})
def _max_pool(x: Tensor, *, kernel_shape: Sizes, **window: Any) -> Tensor:
    pools: Mapping[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
    strides, dilations, pairs = _window(x, kernel_shape, **window)
    pooled: Tensor = pools[len(pairs)](_padded(x, pairs, -math.inf), kernel_shape, strides, 0, dilations)
    return pooled


@operator(
    "AveragePool", passes_to=(_window,), limits={**_AUTO_PAD, "ceil_mode": (0,), "dilations": ([1], [1, 1], [1, 1, 1])}
)
def _average_pool(x: Tensor, *, count_include_pad: int = 0, kernel_shape: Sizes, **window: Any) -> Tensor:
    pools: Mapping[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
    strides, _, pairs = _window(x, kernel_shape, **window)
    pool = functools.partial(pools[len(pairs)], kernel_size=kernel_shape, stride=strides)
    averages: Tensor = pool(_padded(x, pairs))
    return averages if count_include_pad else averages / pool(_padded(torch.ones_like(x), pairs))


@operator("GridSample")
def _grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return F.grid_sample(x, grid, mode, padding_mode, bool(align_corners))


operator("GlobalAveragePool")(lambda x: x.mean(list(range(2, x.dim())), keepdim=True))
operator("GlobalMaxPool")(lambda x: x.amax(list(range(2, x.dim())), keepdim=True))
operator("Upsample", host=(1,))(
    lambda x, listed=None, *, mode="nearest", scales=(): _resize(
        x, None, torch.tensor(scales) if listed is None else listed, mode=mode, opset=10
    )
)

COORDINATES: Mapping[str, Callable[[Tensor, int, int, float], Tensor]] = {
    "align_corners": lambda index, size, count, scale: index * ((size - 1) / max(count - 1, 1)),
    "asymmetric": lambda index, size, count, scale: index / scale,
    "half_pixel": lambda index, size, count, scale: (index + 0.5) / scale - 0.5,
    "half_pixel_symmetric": lambda index, size, count, scale: (
        size / 2 * (1 - count / (scale * size)) + (index + 0.5) / scale - 0.5
    ),
    "pytorch_half_pixel": lambda index, size, count, scale: (index + 0.5) / scale - 0.5 if count > 1 else 0 * index,
}
"""Positions in an axis of `size` elements of those of the resized axis, of `count`."""
NEAREST: Mapping[str, Callable[[Tensor], Tensor]] = {
    "ceil": torch.ceil,
    "floor": torch.floor,
    "round_prefer_ceil": lambda position: torch.floor(position + 0.5),
    "round_prefer_floor": lambda position: torch.ceil(position - 0.5),
}


@operator(
    "Resize",
    host=(1, 2, 3),
    limits={
        "antialias": (0,),
        "coordinate_transformation_mode": tuple(COORDINATES),
        "keep_aspect_ratio_policy": ("stretch",),
    },
    ignored=("extrapolation_value",),
)
def _resize(
    x: Tensor,
    roi: Input = None,
    scales: Input = None,
    sizes: Input = None,
    *,
    axes: Sizes | None = None,
    coordinate_transformation_mode: str | None = None,
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    mode: str = "nearest",
    nearest_mode: str | None = None,
    opset: int,
) -> Tensor:
    if opset < 11:
        scales = roi if scales is None else scales  # the one input of version 10
        coordinate_transformation_mode, nearest_mode = "asymmetric", "floor"
    coordinates = COORDINATES[coordinate_transformation_mode or "half_pixel"]
    counts = sizes.tolist() if sizes is not None else []
    factors = scales.tolist() if scales is not None else []
    for position, axis in enumerate(axes or range(x.dim())):
        size = x.shape[axis]
        count = counts[position] if counts else int(size * factors[position])
        scale = count / size if counts else factors[position]
        if scale == 1:
            continue
        sources = coordinates(torch.arange(count, dtype=torch.float32), size, count, scale)
        if mode == "nearest":
            index = NEAREST[nearest_mode or "round_prefer_floor"](sources).long().clamp(0, size - 1)
            x = x.index_select(axis, index.to(x.device))
        else:
            weights = _interpolation(sources, size, cubic_coeff_a if "cubic" in mode else None, bool(exclude_outside))
            x = (x.movedim(axis, -1) @ weights.to(x).T).movedim(-1, axis)
    return x


def _interpolation(position: Tensor, size: int, coefficient: float | None, exclude: bool) -> Tensor:
    """Weights `[resized, size]` of the elements around each position: linear, or cubic with a coefficient.

    Elements outside the axis are those at its ends; `exclude` leaves them out of cubic interpolation.
    """
    first = position.floor()
    fraction = position - first
    if coefficient is None:
        taps = [(0, 1 - fraction), (1, fraction)]
    else:
        a = coefficient

        def near(d: Tensor) -> Tensor:
            return ((a + 2) * d - (a + 3)) * d * d + 1

        def far(d: Tensor) -> Tensor:
            return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

        taps = [(-1, far(fraction + 1)), (0, near(fraction)), (1, near(1 - fraction)), (2, far(2 - fraction))]
    exclude = exclude and coefficient is not None
    weights = torch.zeros(len(position), size)
    for offset, weight in taps:
        index = first.long() + offset
        kept = weight * ((index >= 0) & (index < size)) if exclude else weight
        weights.scatter_add_(1, index.clamp(0, size - 1).unsqueeze(1), kept.unsqueeze(1))
    return weights / weights.sum(1, keepdim=True) if exclude else weights


# Attention.


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    bias: Input = None,
    allowed: Input = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention `[batch, query heads, queries, value size]` of queries, keys and values `[batch, heads, tokens, size]`.

    Args:
        query: queries.
        key: keys; each of their heads serves as many query heads in turn as there are more of those.
        value: values, of as many heads as the keys.
        scale: factor of the scores; None or 0: that of the head size.
        bias: addend of the scores, broadcast to `[batch, query heads, queries, keys]`.
        allowed: whether a query reads a key, broadcast likewise; a query that reads none gets zeros.
        softcap: bound of the scores; 0: none.
    """
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = scale or 1 / math.sqrt(query.shape[-1])
    if bias is not None and allowed is not None:
        bias = bias.masked_fill(~allowed, -math.inf)
    if not softcap:
        mask = allowed if bias is None else bias.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = softcap * torch.tanh(query @ key.mT * (scale / softcap))
    if bias is not None:
        scores = scores + bias
    elif allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    return torch.softmax(scores, -1).nan_to_num() @ value


def _reads(
    queries: int, keys: int, device: torch.device, *, offset: Tensor | int = 0, left: int = -1, right: int = -1
) -> Tensor:
    """Whether a query reads a key, `[queries, keys]`, or `[batch, 1, queries, keys]` for offsets `[batch, 1, 1, 1]`.

    The query at index i is at position i + offset; it reads the keys from `left` positions before it to `right` ones
    after it, where these are not -1.
    """
    distance = torch.arange(queries, device=device).unsqueeze(1) + offset - torch.arange(keys, device=device)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        allowed = allowed & (distance <= left)
    return allowed & (distance >= -right) if right >= 0 else allowed


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """`[batch, tokens, heads * size]` as `[batch, heads, tokens, size]`, which stays as it is."""
    return x if x.dim() == 4 else x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _join_heads(x: Tensor) -> Tensor:
    """`[batch, heads, tokens, size]` as `[batch, tokens, heads * size]`."""
    return x.transpose(1, 2).flatten(2)


def _with_past(past: Input, x: Tensor) -> Tensor:
    return x if past is None else torch.cat((past, x), 2)


@operator("Attention", outputs=(0, 1, 2), ignored=("softmax_precision", "qk_matmul_output_mode"))
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Input = None,
    past_key: Input = None,
    past_value: Input = None,
    lengths: Input = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    left_window_size: int = -1,
    q_num_heads: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    is_flat, query = query.dim() == 3, _split_heads(query, q_num_heads)
    key = _with_past(past_key, _split_heads(key, kv_num_heads))
    value = _with_past(past_value, _split_heads(value, kv_num_heads))
    queries, keys = query.shape[2], key.shape[2]
    conditions: list[Tensor] = []
    offset: Tensor | int = 0 if past_key is None else past_key.shape[2]
    if lengths is not None:
        count = lengths.reshape(-1, 1, 1, 1)
        conditions.append(torch.arange(keys, device=key.device) < count)
        offset = count - queries
    right = 0 if is_causal else right_window_size
    if left_window_size >= 0 or right >= 0:
        conditions.append(_reads(queries, keys, key.device, offset=offset, left=left_window_size, right=right))
    if mask is not None and mask.shape[-1] < keys:
        mask = F.pad(mask, (0, keys - mask.shape[-1]), value=0 if mask.dtype == torch.bool else -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        conditions.append(mask)
        mask = None
    allowed = functools.reduce(torch.logical_and, conditions) if conditions else None
    y = _attend(query, key, value, scale=scale, bias=mask, allowed=allowed, softcap=softcap)
    return _join_heads(y) if is_flat else y, key, value


def _padding_bias(mask: Input, query: Tensor, keys: int, value: float) -> Input:
    """The addend of one of ONNX Runtime's padding masks, broadcast to `[batch, heads, queries, keys]`.

    Args:
        mask: lengths `[batch]`; ends and then starts `[2 * batch]`; lengths and two kinds of offsets `[3 * batch + 2]`;
            whether a key is read, `[batch, keys]`, `[batch, queries, keys]` or `[batch, 1, longest, longest]`.
        query: the queries `[batch, heads, queries, size]`.
        keys: number of keys.
        value: the addend of keys that are not read.
    """
    batch, _, queries, _ = query.shape
    if mask is not None and mask.dim() == 1:
        position, bounds = torch.arange(keys, device=mask.device), mask.unsqueeze(1)
        read = position < bounds[:batch]
        mask = read & (position >= bounds[batch:]) if len(mask) == 2 * batch else read
    if mask is None or (mask.dim() == 2 and mask.shape[1] != keys):
        return None  # a mask of one column has no effect
    if mask.dim() == 4:
        mask = mask[:, :, keys - queries : keys, :keys]
    while mask.dim() < 4:
        mask = mask.unsqueeze(1)
    return torch.where(mask > 0, 0.0, value).to(query.dtype)


@operator("MultiHeadAttention", MICROSOFT, outputs=(0, 1, 2))
def _multi_head_attention(
    query: Tensor,
    key: Input = None,
    value: Input = None,
    bias: Input = None,
    mask: Input = None,
    attention_bias: Input = None,
    past_key: Input = None,
    past_value: Input = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.dim() == 5:  # [batch, tokens, heads, 3, size]
        query, key, value = (part.flatten(2) for part in query.unbind(3))
    elif key is not None and key.dim() == 5:  # [batch, tokens, heads, 2, size]
        key, value = (part.flatten(2) for part in key.unbind(3))
    assert key is not None
    assert value is not None
    if bias is not None:
        width = query.shape[-1]
        query = query + bias[:width]
        if key.dim() == 3:
            key, value = key + bias[width : 2 * width], value + bias[2 * width :]
    query, key, value = (_split_heads(x, num_heads) for x in (query, key, value))
    key, value = _with_past(past_key, key), _with_past(past_value, value)
    queries, keys = query.shape[2], key.shape[2]
    padding = _padding_bias(mask, query, keys, mask_filter_value)
    addends = [addend for addend in (padding, attention_bias) if addend is not None]
    allowed = _reads(queries, keys, query.device, offset=keys - queries, right=0) if unidirectional else None
    y = _attend(query, key, value, scale=scale, bias=_sum(*addends) if addends else None, allowed=allowed)
    return _join_heads(y), key, value


@operator(
    "Attention",
    MICROSOFT,
    passes_to=(_multi_head_attention,),
    limits={"do_rotary": (0,), "past_present_share_buffer": (0,)},
)
def _packed_attention(
    x: Tensor,
    weight: Tensor,
    bias: Input = None,
    mask: Input = None,
    past: None = None,
    attention_bias: Input = None,
    *,
    qkv_hidden_sizes: Sizes | None = None,
    **attributes: Any,
) -> Tensor:
    projected = x @ weight if bias is None else x @ weight + bias
    parts = projected.split(list(qkv_hidden_sizes or [projected.shape[-1] // 3] * 3), -1)
    return _multi_head_attention(*parts, mask=mask, attention_bias=attention_bias, **attributes)[0]


@operator("GroupQueryAttention", MICROSOFT, outputs=(0, 1, 2), limits={"smooth_softmax": (0, -1), "qk_output": (0,)})
def _group_query_attention(
    query: Tensor,
    key: Input,
    value: Input,
    past_key: None,
    past_value: None,
    lengths: Tensor,
    total_length: Tensor,
    cos: Input = None,
    sin: Input = None,
    position_ids: Input = None,
    attention_bias: Input = None,
    *,
    do_rotary: int = 0,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    rotary_interleaved: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Outputs:
    if key is None or value is None:
        packed = _split_heads(query, num_heads + 2 * kv_num_heads)
        query, key, value = packed.split((num_heads, kv_num_heads, kv_num_heads), 1)
    else:
        query = _split_heads(query, num_heads)
        key, value = _split_heads(key, kv_num_heads), _split_heads(value, kv_num_heads)
    if do_rotary and cos is not None and sin is not None:
        positions = torch.arange(query.shape[2], device=cos.device) if position_ids is None else position_ids
        query, key = (_rotate(x, cos[positions], sin[positions], rotary_interleaved) for x in (query, key))
    left = local_window_size - 1 if local_window_size > 0 else -1
    y, key, value = _attention(
        query, key, value, attention_bias, is_causal=1, left_window_size=left, scale=scale, softcap=softcap
    )
    return _join_heads(y), key, value


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: int) -> Tensor:
    """Rotary embedding of `[batch, heads, tokens, size]` by angles `[batch, tokens, n]`, in its first 2n elements."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


@operator("RotaryEmbedding", ignored=("rotary_embedding_dim",))  # which is the width of the angles
def _rotary_embedding(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Input = None, *, interleaved: int = 0, num_heads: int = 0
) -> Tensor:
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    rotated = _rotate(_split_heads(x, num_heads), cos, sin, interleaved)
    return rotated if x.dim() == 4 else _join_heads(rotated)


@operator("RotaryEmbedding", MICROSOFT, limits={"scale": (1.0,), "is_packed_batching": (0,)})
def _microsoft_rotary_embedding(
    x: Tensor,
    position_ids: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    heads = num_heads if rotary_embedding_dim else x.shape[-1] // (2 * cos.shape[-1])
    if position_ids.numel() == 1:
        position_ids = position_ids.flatten() + torch.arange(x.shape[-2], device=x.device)
    return _rotary_embedding(x, cos, sin, position_ids, interleaved=interleaved, num_heads=heads)


@operator("RelativePositionBias", MICROSOFT, host=(1, 2))
def _relative_position_bias(
    table: Tensor, queries: Tensor, keys: Tensor, *, is_bidirectional: int = 0, max_distance: int
) -> Tensor:
    distance = torch.arange(int(keys)) - torch.arange(int(queries)).unsqueeze(1)
    buckets = table.shape[0] // 2 if is_bidirectional else table.shape[0]
    start = (distance > 0) * buckets if is_bidirectional else torch.zeros_like(distance)
    distance = distance.abs() if is_bidirectional else (-distance).clamp(min=0)
    exact = buckets // 2
    steps = torch.log(distance.clamp(min=1) / exact) / math.log(max_distance / exact) * (buckets - exact)
    index = start + torch.where(distance < exact, distance, (exact + steps.long()).clamp(max=buckets - 1))
    return F.embedding(index.to(table.device), table).permute(2, 0, 1).unsqueeze(0)


# Quantization.

_INTEGERS = [kind.value for kind in ir.DataType if kind.is_integer() and kind.bitwidth in (8, 16)]


def _along(parameter: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """A scale or zero point as it is broadcast to a tensor: of the whole tensor, along an axis, or for blocks of it."""
    if block:
        return parameter.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    if parameter.numel() == 1:
        return parameter.reshape(())
    return parameter.reshape([-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())])


@operator("QuantizeLinear", limits={"output_dtype": [0, *_INTEGERS]}, ignored=("saturate", "precision"))
@operator("QuantizeLinear", MICROSOFT)
def _quantize_linear(
    x: Tensor, scale: Tensor, zero: Input = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Tensor:
    levels = torch.round(x / _along(scale, x, axis, block_size))
    dtype = _dtype(output_dtype or ir.DataType.UINT8.value)
    if zero is not None:
        levels, dtype = levels + _along(zero, x, axis, block_size), zero.dtype
    return levels.clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)


@operator("DequantizeLinear", limits={"output_dtype": (0,)})
@operator("DequantizeLinear", MICROSOFT)
def _dequantize_linear(x: Tensor, scale: Tensor, zero: Input = None, *, axis: int = 1, block_size: int = 0) -> Tensor:
    levels = x.to(scale.dtype)
    if zero is not None:
        levels = levels - _along(zero, x, axis, block_size).to(scale.dtype)
    return levels * _along(scale, x, axis, block_size)


# Sequences: each is one value, a tuple of tensors.


@operator("SplitToSequence", host=(1,))
def _split_to_sequence(
    x: Tensor, lengths: Input = None, *, axis: int = 0, keepdims: int = 1
) -> tuple[tuple[Tensor, ...]]:
    if lengths is None:
        return (x.split(1, axis) if keepdims else x.unbind(axis),)
    return (x.split(lengths.tolist() if lengths.dim() else int(lengths), axis),)


operator("ConcatFromSequence")(lambda x, *, axis, new_axis=0: (torch.stack if new_axis else torch.cat)(x, axis))
operator("SequenceAt", host=(1,))(lambda sequence, position: sequence[int(position)])
operator("SequenceConstruct")(lambda *inputs: (inputs,))
