"""Random nodes of every operator of the table, with their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

MICROSOFT = "com.microsoft"
Random = np.random.Generator
Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Case:
    """A node and its inputs.

    Attributes:
        inputs: arrays by position, None for omitted ones.
        attributes: attributes of the node.
        opset: version of the ONNX domain.
        outputs: the outputs that the node has, by position; False: omitted.
        expected: outputs, where ONNX Runtime's CPU provider lacks the operator.
        constants: positions of the inputs that have no gradients.
    """

    inputs: tuple[Array | None, ...]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    opset: int = 22
    outputs: tuple[bool, ...] = (True,)
    expected: tuple[Array, ...] | None = None
    constants: tuple[int, ...] = ()


Cases = Callable[[Random], Iterator[Case]]
CASES: dict[tuple[str, str], Cases] = {}


def cases(*names: str, domain: str = "") -> Callable[[Cases], Cases]:
    """Enter the cases of operators."""

    def enter(function: Cases) -> Cases:
        CASES.update(dict.fromkeys([(domain, name) for name in names], function))
        return function

    return enter


def case(*inputs: Array | None, opset: int = 22, outputs: int | tuple[bool, ...] = 1, **attributes: Any) -> Case:
    """A case without an expectation of its own."""
    present = (True,) * outputs if isinstance(outputs, int) else outputs
    return Case(inputs, attributes, opset, present)


def floats(r: Random, *shape: int) -> Array:
    return r.standard_normal(shape).astype(np.float32)


def shape_of(r: Random, rank: int, low: int = 2) -> tuple[int, ...]:
    return tuple(int(size) for size in r.integers(low, 6, rank))


def ints(*values: Any, dtype: Any = np.int64) -> Array:
    """A vector."""
    return np.array(values, dtype)


def scalar(value: Any, dtype: Any = np.int64) -> Array:
    return np.array(value, dtype)


def tensor(array: Array) -> ir.TensorProtocol:
    return ir.tensor(array)


def axis_of(r: Random, rank: int) -> int:
    return int(r.integers(-rank, rank))


# Elementwise operators.


@cases("Abs", "Atan", "Cos", "Erf", "Exp", "Floor", "Ceil", "HardSwish", "Identity", "Neg", "Relu", "Round", "Sigmoid")
@cases("Sign", "Sin", "Sinh", "Cosh", "Asinh", "Softplus", "Softsign", "Tan", "Tanh", "Mish")
def _of_floats(r: Random) -> Iterator[Case]:
    yield case(floats(r, *shape_of(r, int(r.integers(0, 4)))))


@cases("IsNaN")
def _is_nan(r: Random) -> Iterator[Case]:
    yield case(np.array([0, np.nan, np.inf, -np.inf], np.float32))


@cases("Acos", "Asin", "Atanh")
def _in_unit(r: Random) -> Iterator[Case]:
    yield case(r.uniform(-0.9, 0.9, (2, 3)).astype(np.float32))


@cases("Log", "Sqrt", "Reciprocal", "Acosh")
def _above_one(r: Random) -> Iterator[Case]:
    yield case(r.uniform(1.1, 9, (2, 3)).astype(np.float32))


@cases("Not")
def _not(r: Random) -> Iterator[Case]:
    yield case(r.random((2, 3)) < 0.5)


@cases("BitwiseNot")
def _bitwise_not(r: Random) -> Iterator[Case]:
    yield case(r.integers(-9, 9, (2, 3)))


def _broadcast(r: Random) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    shape = shape_of(r, 3)
    yield shape, shape
    yield shape, shape[1:]
    yield (shape[0], 1, shape[2]), (shape[1], 1)
    yield (), shape


@cases("Add", "Sub", "Mul")
def _of_numbers(r: Random) -> Iterator[Case]:
    for first, second in _broadcast(r):
        yield case(floats(r, *first), floats(r, *second))
    yield case(r.integers(-9, 9, (2, 3)), r.integers(-9, 9, (3,)))


@cases("Div")
def _div(r: Random) -> Iterator[Case]:
    for first, second in _broadcast(r):
        yield case(floats(r, *first), r.uniform(1, 2, second).astype(np.float32))
    yield case(r.integers(-9, 9, (2, 3)), r.integers(1, 4, (3,)) * r.choice([-1, 1], 3))


@cases("Pow")
def _pow(r: Random) -> Iterator[Case]:
    yield Case((floats(r, 2, 3), scalar(2, np.float32)), constants=(1,))  # negative to any power
    yield case(floats(r, 2, 3), scalar(3, np.int64))
    yield case(r.uniform(1, 3, (2, 3)).astype(np.float32), floats(r, 3))
    yield case(r.integers(1, 5, (2, 3)), scalar(2, np.int64))
    yield case(r.integers(1, 5, (2, 3)), scalar(2, np.float32))


@cases("PRelu")
def _prelu(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 4), floats(r, 3, 1))


@cases("Mod")
def _mod(r: Random) -> Iterator[Case]:
    yield case(r.integers(-9, 9, (2, 3)), r.integers(1, 4, (3,)) * r.choice([-1, 1], 3))
    yield case(r.integers(-9, 9, (2, 3)), r.integers(1, 4, (3,)) * r.choice([-1, 1], 3), fmod=1)
    yield case(floats(r, 2, 3), r.uniform(1, 2, 3).astype(np.float32), fmod=1)


@cases("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
def _comparisons(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3), floats(r, 3))
    yield case(r.integers(0, 3, (2, 3)), r.integers(0, 3, (3,)))


@cases("And", "Or", "Xor")
def _logic(r: Random) -> Iterator[Case]:
    yield case(r.random((2, 3)) < 0.5, r.random(3) < 0.5)


@cases("BitwiseAnd", "BitwiseOr", "BitwiseXor")
def _bits(r: Random) -> Iterator[Case]:
    yield case(r.integers(-9, 9, (2, 3)), r.integers(-9, 9, (3,)))


@cases("Max", "Min", "Mean", "Sum")
def _variadic(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3))
    yield case(floats(r, 2, 3), floats(r, 3), floats(r, 2, 1))


@cases("Where")
def _where(r: Random) -> Iterator[Case]:
    yield case(r.random((2, 1, 3)) < 0.5, floats(r, 4, 3), floats(r, 1))


@cases("Cast")
def _cast(r: Random) -> Iterator[Case]:
    for kind in (ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL, ir.DataType.DOUBLE):
        yield case(3 * floats(r, 2, 3), to=kind.value)
        yield case(r.integers(-1, 2, (2, 3)), to=kind.value)
    yield case(floats(r, 2, 3), to=ir.DataType.FLOAT16.value)


@cases("CastLike")
def _cast_like(r: Random) -> Iterator[Case]:
    yield case(3 * floats(r, 2, 3), scalar(1, np.int32))
    yield case(r.integers(-9, 9, (2, 3)), scalar(1, np.float32))
    yield case(floats(r, 2, 3), scalar(1, np.float32))


@cases("Clip")
def _clip(r: Random) -> Iterator[Case]:
    low, high = scalar(-0.5, np.float32), scalar(0.7, np.float32)
    for bounds in ((), (low,), (None, high), (low, high)):
        yield case(floats(r, 2, 3), *bounds)
    yield case(r.integers(-9, 9, (2, 3)), scalar(-1), scalar(2))
    yield case(floats(r, 2, 3), opset=6, min=-0.5, max=0.7)


@cases("IsInf")
def _is_inf(r: Random) -> Iterator[Case]:
    for negative, positive in ((0, 1), (1, 0), (1, 1), (0, 0)):
        x = np.array([0, np.nan, np.inf, -np.inf], np.float32)
        yield case(x, detect_negative=negative, detect_positive=positive)


@cases("HardSigmoid")
def _hard_sigmoid(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3))
    yield case(floats(r, 2, 3), alpha=1 / 6, beta=0.4)


@cases("LeakyRelu", "ThresholdedRelu", "Elu", "Celu")
def _alpha(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3))
    yield case(floats(r, 2, 3), alpha=0.3)


@cases("Selu")
def _selu(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3))
    yield case(floats(r, 2, 3), alpha=0.3, gamma=1.3)


@cases("Swish")
def _swish(r: Random) -> Iterator[Case]:
    for alpha in (1.0, 0.7):
        x = floats(r, 2, 3)
        expected = x / (1 + np.exp(-alpha * x))
        yield Case((x,), {"alpha": alpha}, 24, expected=(expected,))


@cases("QuickGelu", domain=MICROSOFT)
def _quick_gelu(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3))
    yield case(floats(r, 2, 3), alpha=1.0)


@cases("Gelu")
def _gelu(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3))
    yield case(floats(r, 2, 3), approximate="tanh")


@cases("Gelu", domain=MICROSOFT)
def _microsoft_gelu(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3))


@cases("BiasGelu", "FastGelu", domain=MICROSOFT)
def _bias_gelu(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3), floats(r, 3))


@cases("Dropout")
def _dropout(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3), scalar(0.3, np.float32), outputs=2)
    yield case(floats(r, 2, 3), opset=11, ratio=0.3)


@cases("Softmax", "LogSoftmax")
def _softmax(r: Random) -> Iterator[Case]:
    for axis in (-1, 1, 0):
        yield case(floats(r, 2, 3, 4), axis=axis)
        yield case(floats(r, 2, 3, 4), axis=axis, opset=11)
    yield case(floats(r, 2, 3, 4))
    yield case(floats(r, 2, 3, 4), opset=11)


# Sizes and constants.


@cases("Constant")
def _constant(r: Random) -> Iterator[Case]:
    yield case(value=tensor(floats(r, 2, 3)))
    yield case(value=tensor(r.integers(0, 9, (2,))))
    yield case(value_float=0.5)
    yield case(value_floats=[0.5, 0.25])
    yield case(value_int=3)
    yield case(value_ints=[3, 4])


@cases("Shape")
def _shape(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 4))
    yield case(floats(r, 2, 3, 4), start=1)
    yield case(floats(r, 2, 3, 4), start=-2, end=-1)


@cases("Size")
def _size(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3))


@cases("ConstantOfShape")
def _constant_of_shape(r: Random) -> Iterator[Case]:
    yield case(ints(2, 3))
    yield case(ints(2), value=tensor(ints(7)))
    yield case(ints(), value=tensor(np.array([True])))


@cases("Range")
def _range(r: Random) -> Iterator[Case]:
    yield case(scalar(2), scalar(11), scalar(3))
    yield case(scalar(5), scalar(-2), scalar(-2))
    yield case(scalar(0.5, np.float32), scalar(3, np.float32), scalar(0.75, np.float32))


@cases("EyeLike")
def _eye_like(r: Random) -> Iterator[Case]:
    yield case(floats(r, 3, 4))
    yield case(floats(r, 4, 3), k=-1, dtype=ir.DataType.INT64.value)
    yield case(floats(r, 3, 4), k=2)


# Shapes of tensors.


@cases("Reshape")
def _reshape(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 4), ints(0, -1))
    yield case(floats(r, 2, 3, 4), ints(4, 0, -1))
    yield case(floats(r, 2, 3, 4), ints(0, 0, 2, 2))
    yield case(np.zeros((0, 3), np.float32), ints(3, 0), allowzero=1)


@cases("Flatten")
def _flatten(r: Random) -> Iterator[Case]:
    for axis in (0, 1, 2, 3, -1):
        yield case(floats(r, 2, 3, 4), axis=axis)


@cases("Transpose")
def _transpose(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 4))
    yield case(floats(r, *shape_of(r, 4)), perm=[int(axis) for axis in r.permutation(4)])


@cases("Expand")
def _expand(r: Random) -> Iterator[Case]:
    yield case(floats(r, 3, 1), ints(2, 1, 4))
    yield case(floats(r, 2, 3), ints(3))


@cases("Tile")
def _tile(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3), ints(2, 3))


@cases("Squeeze")
def _squeeze(r: Random) -> Iterator[Case]:
    yield case(floats(r, 1, 3, 1), ints(-1))
    yield case(floats(r, 1, 3, 1), ints(0, 2))
    yield case(floats(r, 1, 3, 1))
    yield case(floats(r, 1, 3, 1), axes=[0], opset=11)


@cases("Unsqueeze")
def _unsqueeze(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3), ints(0, -1))
    yield case(floats(r, 2, 3), ints(3, 1))
    yield case(floats(r, 2, 3), axes=[1, 2], opset=11)
    yield case(scalar(3), ints(0))


@cases("Concat")
def _concat(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3), floats(r, 2, 1), floats(r, 2, 2), axis=-1)
    yield case(ints(1, 2), ints(3), axis=0)


@cases("Split")
def _split(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 6), ints(1, 2, 3), axis=1, outputs=3)
    yield case(floats(r, 2, 7), axis=-1, num_outputs=3, outputs=3)
    yield case(floats(r, 6, 2), outputs=3, opset=13)
    yield case(floats(r, 2, 6), axis=1, split=[4, 2], outputs=2, opset=11)


@cases("Slice")
def _slice(r: Random) -> Iterator[Case]:
    yield case(floats(r, 5, 6), ints(1), ints(2**62))
    yield case(floats(r, 5, 6), ints(1, -3), ints(4, -1))
    yield case(floats(r, 5, 6), ints(-1), ints(-(2**62)), ints(-1), ints(-2))
    yield case(floats(r, 5, 6), ints(1, 4), ints(9, 0), ints(1, 0), ints(2, -1))
    yield case(floats(r, 5, 6), ints(4), ints(2), ints(0))
    yield case(floats(r, 5, 6), starts=[1], ends=[-1], axes=[1], opset=9)
    yield case(floats(r, 5, 6), starts=[1, 2], ends=[3, 100], opset=9)
    start, end = sorted(int(bound) for bound in r.integers(-8, 8, 2))
    yield case(floats(r, 5, 6), ints(start), ints(end), ints(0), ints(int(r.integers(1, 4))))


@cases("DepthToSpace")
def _depth_to_space(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 12, 2, 3), blocksize=2)
    yield case(floats(r, 2, 12, 2, 3), blocksize=2, mode="CRD")


@cases("SpaceToDepth")
def _space_to_depth(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 4, 6), blocksize=2)


@cases("Pad")
def _pad(r: Random) -> Iterator[Case]:
    for mode in ("constant", "reflect", "edge", "wrap"):
        yield case(floats(r, 4, 5), ints(1, 2, 3, 0), mode=mode)
    yield case(floats(r, 4, 5), ints(1, 0, -1, 2), scalar(0.5, np.float32))
    yield case(floats(r, 4, 5), ints(1, 2), None, ints(-1))
    yield case(floats(r, 4, 5), pads=[1, 0, 2, 1], value=0.3, opset=10)


# Indexing.


@cases("Gather")
def _gather(r: Random) -> Iterator[Case]:
    yield case(floats(r, 5, 3), r.integers(-5, 5, (2, 4)))
    yield case(floats(r, 2, 5, 3), r.integers(-5, 5, (4,)), axis=-2)
    yield case(floats(r, 2, 5), scalar(-1), axis=1)
    yield case(ints(7, 8, 9), scalar(1, np.int32))
    yield case(floats(r, 5, 3, 2), r.integers(0, 5, (2, 2), dtype=np.int32))


@cases("GatherElements")
def _gather_elements(r: Random) -> Iterator[Case]:
    yield case(floats(r, 3, 5), r.integers(-5, 5, (2, 4)), axis=1)
    yield case(floats(r, 5, 3), r.integers(-5, 5, (4, 3)))


@cases("GatherND")
def _gather_nd(r: Random) -> Iterator[Case]:
    yield case(floats(r, 3, 3, 4), r.integers(-3, 3, (5, 2)))
    yield case(floats(r, 3, 3, 4), r.integers(0, 3, (2, 5, 1)))
    yield case(floats(r, 2, 3, 4), r.integers(0, 3, (2, 5, 2)), batch_dims=1)
    yield case(floats(r, 2, 3, 4), r.integers(-4, 4, (2, 3, 1)), batch_dims=2)


@cases("Scatter")
def _scatter(r: Random) -> Iterator[Case]:
    yield case(floats(r, 3, 5), np.stack([r.permutation(5)[:2] for _ in range(3)]), floats(r, 3, 2), axis=1, opset=9)


@cases("ScatterElements")
def _scatter_elements(r: Random) -> Iterator[Case]:
    yield case(floats(r, 3, 5), np.stack([r.permutation(5)[:2] for _ in range(3)]) - 5, floats(r, 3, 2), axis=-1)
    for reduction in ("add", "mul", "min", "max"):
        yield case(floats(r, 3, 5), r.integers(-5, 5, (3, 4)), floats(r, 3, 4), axis=1, reduction=reduction)


@cases("ScatterND")
def _scatter_nd(r: Random) -> Iterator[Case]:
    yield case(floats(r, 4, 5), r.permutation(4)[:2].reshape(2, 1) - 4, floats(r, 2, 5))
    for reduction in ("add", "mul", "min", "max"):
        yield case(floats(r, 4, 5, 2), r.integers(-4, 4, (3, 6, 2)), floats(r, 3, 6, 2), reduction=reduction)


@cases("NonZero")
def _non_zero(r: Random) -> Iterator[Case]:
    yield case(r.integers(0, 2, (3, 4)))
    yield case(r.random((3, 4)) < 0.5)


@cases("OneHot")
def _one_hot(r: Random) -> Iterator[Case]:
    values = np.array([0.25, 2], np.float32)
    yield case(r.integers(-4, 4, (2, 3)), scalar(4), values)
    yield case(r.integers(-6, 6, (2, 3)), ints(4), values, axis=1)


@cases("Trilu")
def _trilu(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 4, 5))
    yield case(floats(r, 4, 5), scalar(-1), upper=0)


@cases("Trilu", domain=MICROSOFT)
def _microsoft_trilu(r: Random) -> Iterator[Case]:
    yield case(floats(r, 4, 5), scalar(1), upper=1)


@cases("CumSum")
def _cum_sum(r: Random) -> Iterator[Case]:
    for exclusive in (0, 1):
        for reverse in (0, 1):
            yield case(floats(r, 3, 4), scalar(-1), exclusive=exclusive, reverse=reverse)
    yield case(r.integers(0, 9, (3, 4), dtype=np.int32), scalar(0, np.int32))


@cases("TopK")
def _top_k(r: Random) -> Iterator[Case]:
    yield case(floats(r, 3, 6), ints(4), outputs=2)
    yield case(r.integers(0, 3, (6, 3)), ints(4), axis=0, largest=0, outputs=2)
    yield case(floats(r, 3, 6), k=2, outputs=2, opset=9)


# Reductions.


@cases("ArgMax", "ArgMin")
def _arg(r: Random) -> Iterator[Case]:
    yield case(floats(r, 3, 4))
    yield case(r.integers(0, 2, (3, 6)).astype(np.float32), axis=-1, keepdims=0)
    yield case(r.integers(0, 2, (3, 6)).astype(np.float32), axis=1, select_last_index=1)


def _reductions(r: Random, sign: int) -> Iterator[Case]:
    def values() -> Array:
        x = np.abs(floats(r, 2, 3, 4)) + 0.1
        return x * r.choice([sign, 1], x.shape).astype(np.float32)

    yield case(values())
    yield case(values(), ints(-1), keepdims=0)
    yield case(values(), ints(0, 2))
    yield case(values(), ints(), keepdims=0)
    yield case(values(), ints(), noop_with_empty_axes=1)
    yield case(values(), axes=[-1, 0], keepdims=0, opset=11)


@cases("ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")
@cases("ReduceSumSquare")
def _reduce(r: Random) -> Iterator[Case]:
    yield from _reductions(r, -1)


@cases("ReduceLogSum")
def _reduce_log_sum(r: Random) -> Iterator[Case]:
    yield from _reductions(r, 1)


# Products.


@cases("MatMul")
def _mat_mul(r: Random) -> Iterator[Case]:
    for first, second in (
        ((2, 3), (3, 4)),
        ((5, 2, 3), (3, 4)),
        ((2, 1, 2, 3), (5, 3, 4)),
        ((3,), (3, 2)),
        ((2, 3), (3,)),
    ):
        yield case(floats(r, *first), floats(r, *second))


@cases("Gemm")
def _gemm(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3), floats(r, 3, 4))
    yield case(floats(r, 2, 3), floats(r, 4, 3), floats(r, 4), transB=1)
    yield case(floats(r, 3, 2), floats(r, 3, 4), floats(r, 2, 1), transA=1, alpha=0.5, beta=2.0)
    yield case(floats(r, 2, 3), floats(r, 3, 4), scalar(0.5, np.float32), alpha=0.5)


@cases("FusedGemm", domain=MICROSOFT)
def _fused_gemm(r: Random) -> Iterator[Case]:
    for activation in ("Relu", "Tanh", "Sigmoid", "Softplus", "Softsign"):
        yield case(floats(r, 2, 3), floats(r, 4, 3), floats(r, 4), transB=1, activation=activation)
    yield case(floats(r, 2, 3), floats(r, 3, 4), floats(r, 4), activation="LeakyRelu", activation_alpha=0.2)
    yield case(floats(r, 2, 3), floats(r, 3, 4), floats(r, 4), activation="Elu", activation_alpha=0.7)
    parameters: dict[str, Any] = {"activation_alpha": 0.3, "activation_beta": 0.4}
    yield case(floats(r, 2, 3), floats(r, 3, 4), floats(r, 4), activation="HardSigmoid", **parameters)


@cases("FusedMatMul", domain=MICROSOFT)
def _fused_mat_mul(r: Random) -> Iterator[Case]:
    yield case(floats(r, 5, 2, 3), floats(r, 5, 4, 3), transB=1, alpha=0.125)
    yield case(floats(r, 5, 3, 2), floats(r, 3, 4), transA=1)


@cases("TransposeMatMul", domain=MICROSOFT)
def _transpose_mat_mul(r: Random) -> Iterator[Case]:
    yield case(floats(r, 5, 2, 3), floats(r, 5, 4, 3), transB=1, alpha=0.125)


@cases("Einsum")
def _einsum(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 4), floats(r, 2, 5, 4), equation="bid, bjd -> bij")
    yield case(floats(r, 2, 3, 4), equation="bij->bj")


# Normalization.


@cases("LayerNormalization")
def _layer_normalization(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 8), floats(r, 8), floats(r, 8), epsilon=1e-6, opset=17)
    yield case(floats(r, 2, 3, 8), floats(r, 8))
    yield case(floats(r, 2, 3, 8), floats(r, 3, 8), floats(r, 3, 8), axis=1, outputs=3)


@cases("RMSNormalization")
def _rms_normalization(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 8), floats(r, 8), opset=23)
    yield case(floats(r, 2, 3, 8), floats(r, 3, 8), axis=1, epsilon=1e-3, opset=23)


@cases("SimplifiedLayerNormalization")
def _simplified_layer_normalization(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 8), floats(r, 8), axis=-1, epsilon=1e-6, opset=17)
    yield case(floats(r, 2, 3, 8), floats(r, 8), axis=-1, epsilon=1e-6, stash_type=1, opset=17)


@cases("SimplifiedLayerNormalization", domain=MICROSOFT)
def _microsoft_simplified_layer_normalization(r: Random) -> Iterator[Case]:
    x, weight = floats(r, 2, 8), floats(r, 8)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight
    yield Case((x, weight), expected=(expected,))


@cases("SkipLayerNormalization", domain=MICROSOFT)
def _skip_layer_normalization(r: Random) -> Iterator[Case]:
    x, skip, vectors = floats(r, 2, 3, 8), floats(r, 2, 3, 8), [floats(r, 8) for _ in range(3)]
    yield case(x, skip, *vectors[:2], epsilon=1e-5)
    yield case(x, skip, *vectors, outputs=(True, False, False, True))
    yield case(x, skip[:1], vectors[0], None, vectors[2])


@cases("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_simplified_layer_normalization(r: Random) -> Iterator[Case]:
    x, skip, vectors = floats(r, 2, 3, 8), floats(r, 2, 3, 8), [floats(r, 8) for _ in range(2)]
    yield case(x, skip, vectors[0], epsilon=1e-5)
    yield case(x, skip, *vectors, outputs=(True, False, False, True))


@cases("EmbedLayerNormalization", domain=MICROSOFT)
def _embed_layer_normalization(r: Random) -> Iterator[Case]:
    ids, types = r.integers(0, 9, (2, 5), dtype=np.int32), r.integers(0, 2, (2, 5), dtype=np.int32)
    words, positions, segments = floats(r, 9, 8), floats(r, 6, 8), floats(r, 2, 8)
    scale = floats(r, 8), floats(r, 8)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
    yield case(ids, types, words, positions, segments, *scale, mask, epsilon=1e-6, mask_index_type=1, outputs=3)
    yield case(ids, types, words, positions, segments, *scale, mask, outputs=2)
    yield case(ids, types, words, positions, segments, *scale, outputs=2)
    yield case(ids, None, words, positions, None, *scale, None, r.integers(0, 6, (2, 5), dtype=np.int32), outputs=2)


@cases("BatchNormalization")
def _batch_normalization(r: Random) -> Iterator[Case]:
    vectors = floats(r, 3), floats(r, 3), floats(r, 3), r.uniform(0.5, 2, 3).astype(np.float32)
    yield case(floats(r, 2, 3, 4, 5), *vectors, epsilon=1e-3, opset=15)
    yield case(floats(r, 2, 3), *vectors, momentum=0.8)


@cases("InstanceNormalization")
def _instance_normalization(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 4, 5), floats(r, 3), floats(r, 3), epsilon=1e-3)
    yield case(floats(r, 2, 3, 7), floats(r, 3), floats(r, 3))


@cases("GroupNormalization")
def _group_normalization(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 6, 4), floats(r, 6), floats(r, 6), num_groups=3)
    yield case(floats(r, 2, 6, 4, 2), floats(r, 3), floats(r, 3), num_groups=3, epsilon=1e-3, opset=18)


@cases("LpNormalization")
def _lp_normalization(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3))
    yield case(floats(r, 2, 3), axis=0, p=1)


# Convolutions, pools and images.


@cases("Conv")
def _conv(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 9), floats(r, 4, 3, 3), floats(r, 4))
    yield case(floats(r, 2, 4, 9), floats(r, 6, 2, 3), group=2, pads=[1, 2], kernel_shape=[3])
    yield case(floats(r, 2, 3, 8, 7), floats(r, 4, 3, 3, 2), strides=[2, 1], pads=[1, 1, 1, 1], dilations=[1, 2])
    yield case(floats(r, 2, 3, 8, 7), floats(r, 4, 3, 4, 2), floats(r, 4), strides=[2, 2], auto_pad="SAME_UPPER")
    yield case(floats(r, 2, 3, 8, 7), floats(r, 4, 3, 4, 2), strides=[1, 2], auto_pad="SAME_LOWER")
    yield case(floats(r, 2, 3, 8, 7), floats(r, 4, 3, 4, 2), auto_pad="VALID")
    yield case(floats(r, 1, 2, 4, 4, 4), floats(r, 3, 2, 2, 2, 2))


@cases("FusedConv", domain=MICROSOFT)
def _fused_conv(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 8, 7), floats(r, 4, 3, 3, 2), floats(r, 4), activation="Relu", pads=[1, 1, 1, 1])
    yield case(floats(r, 1, 3, 6, 6), floats(r, 4, 3, 3, 3), activation="LeakyRelu", activation_params=[0.2])
    yield case(floats(r, 1, 3, 6, 6), floats(r, 4, 3, 3, 3), activation="Clip", activation_params=[-0.5, 0.5])
    x, weight = floats(r, 1, 3, 6, 6), floats(r, 4, 3, 3, 3)
    yield case(x, weight, floats(r, 4), floats(r, 1, 4, 4, 4), activation="Tanh")


@cases("ConvTranspose")
def _conv_transpose(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 5), floats(r, 3, 4, 3), floats(r, 4), strides=[2])
    yield case(
        floats(r, 2, 4, 5, 4), floats(r, 4, 3, 3, 2), group=2, pads=[1, 0, 1, 0], output_padding=[1, 0], strides=[2, 1]
    )
    yield case(floats(r, 2, 3, 5), floats(r, 3, 4, 3), pads=[0, 1], dilations=[2])


@cases("MaxPool", "AveragePool")
def _pool(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 9), kernel_shape=[3], strides=[2])
    yield case(floats(r, 2, 3, 8, 7), kernel_shape=[3, 2], pads=[1, 0, 1, 1], strides=[1, 2])
    yield case(floats(r, 2, 3, 8, 7), kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_UPPER")
    yield case(floats(r, 2, 3, 4, 4, 4), kernel_shape=[2, 2, 2])


@cases("MaxPool")
def _max_pool(r: Random) -> Iterator[Case]:
    yield from _pool(r)
    yield case(floats(r, 2, 3, 9, 9), kernel_shape=[3, 2], dilations=[2, 3])


@cases("AveragePool")
def _average_pool(r: Random) -> Iterator[Case]:
    yield from _pool(r)
    yield case(floats(r, 2, 3, 9), kernel_shape=[3], pads=[1, 1], count_include_pad=1)


@cases("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 4, 5))
    yield case(floats(r, 2, 3, 4))


@cases("GridSample")
def _grid_sample(r: Random) -> Iterator[Case]:
    grid = r.uniform(-1.2, 1.2, (2, 4, 5, 2)).astype(np.float32)
    yield case(floats(r, 2, 3, 6, 6), grid)
    yield case(floats(r, 2, 3, 6, 6), grid, align_corners=1, mode="bilinear", padding_mode="border", opset=16)
    yield case(floats(r, 2, 3, 6, 6), grid, mode="nearest", padding_mode="reflection")


@cases("Resize")
def _resize(r: Random) -> Iterator[Case]:
    x = floats(r, 2, 3, 6, 5)
    for mode in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric"):
        names: dict[str, Any] = {"coordinate_transformation_mode": mode}
        yield case(x, None, None, ints(2, 3, 9, 4), mode="linear", **names)
        yield case(x, None, None, ints(2, 3, 4, 9), mode="cubic", **names)
        if mode != "half_pixel_symmetric":
            yield case(x, None, np.array([1, 1, 2, 3], np.float32), mode="nearest", nearest_mode="floor", **names)
    for nearest in ("round_prefer_floor", "round_prefer_ceil", "ceil", "floor"):
        yield case(x, None, None, ints(2, 3, 11, 3), mode="nearest", nearest_mode=nearest)
    yield case(x, None, None, ints(2, 3, 4, 9), mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5)
    yield case(x, None, None, ints(4, 9), mode="linear", axes=[2, 3])
    yield case(x, np.array([1, 1, 2, 1.5], np.float32), mode="linear", opset=10)
    yield case(x, np.array([1, 1, 2, 1.6], np.float32), opset=10)


@cases("Upsample")
def _upsample(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3, 4, 5), np.array([1, 1, 2, 2], np.float32), opset=9)
    yield case(floats(r, 2, 3, 4, 5), np.array([1, 1, 2, 3], np.float32), mode="linear", opset=9)
    yield case(floats(r, 2, 3, 4, 5), scales=[1.0, 1.0, 2.0, 2.0], opset=8)


# Attention.

HEADS, SIZE, TOKENS = 2, 4, 5
WIDTH = HEADS * SIZE


def _mask(r: Random, *shape: int) -> Array:
    """Whether a key is read: by each query at least the first."""
    mask = r.random(shape) < 0.6
    mask[..., 0] = True
    return mask


@cases("Attention")
def _attention(r: Random) -> Iterator[Case]:
    def flat(tokens: int = TOKENS, heads: int = HEADS) -> Array:
        return floats(r, 3, tokens, heads * SIZE)

    def split(tokens: int = TOKENS, heads: int = HEADS) -> Array:
        return floats(r, 3, heads, tokens, SIZE)

    heads: dict[str, Any] = {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    yield case(flat(), flat(7), flat(7), opset=23, **heads)
    yield case(flat(), flat(), flat(), opset=23, is_causal=1, scale=0.3, **heads)
    yield case(split(), split(7), split(7), _mask(r, TOKENS, 7), opset=23)
    yield case(split(), split(7), split(7), floats(r, 3, 1, TOKENS, 7), opset=23, softcap=2.0)
    yield case(split(), split(), split(), floats(r, 3, 1, TOKENS, TOKENS), opset=23, is_causal=1)
    yield case(split(heads=4), split(), split(), opset=23, is_causal=1)
    yield case(split(), split(2), split(2), None, split(3), split(3), opset=23, is_causal=0, outputs=3)
    yield case(split(), split(7), split(7), None, None, None, ints(7, 2, 5), opset=24)


@cases("Attention", domain=MICROSOFT)
def _packed_attention(r: Random) -> Iterator[Case]:
    x, weight, bias = floats(r, 3, TOKENS, 6), floats(r, 6, 3 * WIDTH), floats(r, 3 * WIDTH)
    heads: dict[str, Any] = {"num_heads": HEADS}
    lengths, starts = ints(5, 2, 4, dtype=np.int32), ints(0, 1, 2, dtype=np.int32)
    yield case(x, weight, bias, **heads)
    yield case(x, weight, bias, lengths, **heads)
    yield case(x, weight, bias, np.concatenate((lengths, starts)), **heads)
    yield case(x, weight, bias, _mask(r, 3, TOKENS).astype(np.int32), scale=0.3, **heads)
    yield case(x, weight, bias, _mask(r, 3, TOKENS, TOKENS).astype(np.int32), mask_filter_value=-1e4, **heads)
    yield case(x, weight, bias, unidirectional=1, **heads)
    yield case(x, weight, bias, lengths, unidirectional=1, **heads)
    yield case(x, weight, bias, None, None, floats(r, 1, HEADS, TOKENS, TOKENS), **heads)
    sizes = [4, 4, 6]
    yield case(x, floats(r, 6, 14), floats(r, 14), qkv_hidden_sizes=sizes, **heads)


@cases("MultiHeadAttention", domain=MICROSOFT)
def _multi_head_attention(r: Random) -> Iterator[Case]:
    def flat(tokens: int = TOKENS) -> Array:
        return floats(r, 3, tokens, WIDTH)

    heads: dict[str, Any] = {"num_heads": HEADS}
    yield case(flat(), flat(7), flat(7), **heads)
    yield case(flat(), flat(7), flat(7), floats(r, 3 * WIDTH), scale=0.3, **heads)
    yield case(flat(), flat(7), flat(7), None, _mask(r, 3, 7).astype(np.int32), **heads)
    yield case(flat(), flat(7), flat(7), None, ints(7, 2, 4, dtype=np.int32), **heads)
    yield case(flat(), flat(7), flat(7), None, _mask(r, 3, TOKENS, 7).astype(np.int32), **heads)
    yield case(flat(), flat(7), flat(7), None, None, floats(r, 1, HEADS, TOKENS, 7), **heads)
    yield case(flat(), flat(), flat(), unidirectional=1, **heads)
    yield case(flat(), floats(r, 3, HEADS, 7, SIZE), floats(r, 3, HEADS, 7, SIZE), **heads)
    past = floats(r, 3, HEADS, 2, SIZE), floats(r, 3, HEADS, 2, SIZE)
    yield case(flat(), flat(), flat(), None, None, None, *past, outputs=3, **heads)


@cases("GroupQueryAttention", domain=MICROSOFT)
def _group_query_attention(r: Random) -> Iterator[Case]:
    size, tokens = 16, TOKENS
    lengths, total = np.full(3, tokens - 1, np.int32), scalar(tokens, np.int32)

    def flat(heads: int) -> Array:
        return floats(r, 3, tokens, heads * size)

    angles = floats(r, 9, size // 2)
    heads: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2}
    rest = (None, None, lengths, total)
    yield case(flat(4), flat(2), flat(2), *rest, outputs=3, **heads)
    yield case(flat(8), None, None, *rest, outputs=3, scale=0.2, **heads)
    yield case(flat(4), flat(2), flat(2), *rest, outputs=3, local_window_size=2, softcap=3.0, **heads)
    for interleaved in (0, 1):
        rotary = {"do_rotary": 1, "rotary_interleaved": interleaved}
        tables = np.cos(angles), np.sin(angles)
        yield case(flat(4), flat(2), flat(2), *rest, *tables, outputs=3, **rotary, **heads)


@cases("RotaryEmbedding")
def _rotary_embedding(r: Random) -> Iterator[Case]:
    angles, positions = floats(r, 9, SIZE // 2), r.integers(0, 9, (3, TOKENS))
    tables = np.cos(angles), np.sin(angles)
    for interleaved in (0, 1):
        options: dict[str, Any] = {"interleaved": interleaved, "opset": 23}
        yield case(floats(r, 3, TOKENS, WIDTH), *tables, positions, num_heads=HEADS, **options)
        yield case(floats(r, 3, HEADS, TOKENS, SIZE), *tables, positions, **options)
        turns = floats(r, 3, TOKENS, SIZE // 2)
        yield case(
            floats(r, 3, HEADS, TOKENS, SIZE + 2),
            np.cos(turns),
            np.sin(turns),
            rotary_embedding_dim=SIZE,
            **options,
        )


@cases("RotaryEmbedding", domain=MICROSOFT)
def _microsoft_rotary_embedding(r: Random) -> Iterator[Case]:
    angles, positions = floats(r, 9, SIZE // 2), r.integers(0, 9, (3, TOKENS))
    tables = np.cos(angles), np.sin(angles)
    for interleaved in (0, 1):
        yield case(floats(r, 3, TOKENS, WIDTH), positions, *tables, interleaved=interleaved)
        yield case(floats(r, 3, HEADS, TOKENS, SIZE), ints(2), *tables, interleaved=interleaved)
        sizes = {"num_heads": HEADS, "rotary_embedding_dim": SIZE}
        yield case(floats(r, 3, TOKENS, WIDTH + 8), positions, *tables, interleaved=interleaved, **sizes)


@cases("RelativePositionBias", domain=MICROSOFT)
def _relative_position_bias(r: Random) -> Iterator[Case]:
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    for both in (0, 1):
        table = floats(r, 8, 3)
        distance = torch.arange(30) - torch.arange(20).unsqueeze(1)
        bucket = T5Attention._relative_position_bucket(distance, bool(both), 8, 16)
        expected = table[bucket.numpy()].transpose(2, 0, 1)[None]
        attributes = {"is_bidirectional": both, "max_distance": 16}
        yield Case((table, scalar(20), scalar(30)), attributes, expected=(expected,))


# Quantization.


@cases("QuantizeLinear")
def _quantize_linear(r: Random) -> Iterator[Case]:
    scale = r.uniform(0.01, 0.1, 3).astype(np.float32)
    yield case(floats(r, 2, 3), scalar(0.05, np.float32), scalar(3, np.int8))
    yield case(floats(r, 2, 3, 4), scale, r.integers(0, 9, 3, dtype=np.uint8))
    yield case(floats(r, 2, 3), scale, axis=-1)
    yield case(floats(r, 2, 3), scalar(0.05, np.float32), output_dtype=ir.DataType.INT8.value)
    yield case(floats(r, 2, 6), r.uniform(0.01, 0.1, (2, 3)).astype(np.float32), axis=1, block_size=2)


@cases("QuantizeLinear", domain=MICROSOFT)
def _microsoft_quantize_linear(r: Random) -> Iterator[Case]:
    yield case(floats(r, 2, 3), scalar(0.05, np.float32), scalar(3, np.int8))


@cases("DequantizeLinear")
def _dequantize_linear(r: Random) -> Iterator[Case]:
    scale = r.uniform(0.01, 0.1, 3).astype(np.float32)
    x = r.integers(-99, 99, (2, 3, 4), dtype=np.int8)
    yield case(x, scalar(0.05, np.float32), scalar(3, np.int8))
    yield case(x, scale, r.integers(-9, 9, 3, dtype=np.int8))
    yield case(x[..., 0], scale, axis=-1)
    yield case(x.reshape(4, 6), r.uniform(0.01, 0.1, (4, 3)).astype(np.float32), axis=1, block_size=2)


@cases("DequantizeLinear", domain=MICROSOFT)
def _microsoft_dequantize_linear(r: Random) -> Iterator[Case]:
    yield case(r.integers(-99, 99, (2, 3), dtype=np.int8), scalar(0.05, np.float32), scalar(3, np.int8))
