"""Examples of every operator that has a rule: one for each form in which it passes on units differently."""

from __future__ import annotations

import dataclasses

from tests.graph_passes.flow.rules.gated_copies import Example

_INT = "int64[B, 4, 6] x"
_BOOL = "bool[B, 4, 6] x"
_PAIR = "float[B, 4, 6] x, float[B, 4, 6] z"
_INT_PAIR = "int64[B, 4, 6] x, int64[B, 4, 6] z"
_BOOL_PAIR = "bool[B, 4, 6] x, bool[B, 4, 6] z"
_ALL = "x1 x2 y1 y2"


def _one_input(operator: str, inputs: str = "float[B, 4, 6] x", **fields: object) -> tuple[Example, ...]:
    return (Example(f"y = {operator} (x)", inputs, **fields),)  # type: ignore[arg-type]


def _two_inputs(operator: str, inputs: str = _PAIR, **fields: object) -> tuple[Example, ...]:
    """The operands have one shape, or are repeated along different axes."""
    same = Example(f"y = {operator} (x, z)", inputs, **fields)  # type: ignore[arg-type]
    dtype = inputs.partition("[")[0]
    cut = " ".join(axis for axis in same.cut.split() if axis not in ("x2", "z1"))
    return same, dataclasses.replace(same, inputs=f"{dtype}[B, 4, 1] x, {dtype}[6] z", cut=cut.replace("z2", "z0"))


def _reduction(operator: str, cut: str = "") -> tuple[Example, ...]:
    """Reductions of one axis, whose gated units have no effect on sums."""
    last, first = (" ".join((*cut.split(), *rest)) for rest in (("y1",), ("y2",)))
    return (
        Example(f"y = {operator} <keepdims = 0> (x, axes)", weights="int64[1] axes = {-1}", cut=last, low=0.1),
        Example(f"y = {operator} (x, axes)", weights="int64[1] axes = {1}", cut=first, low=0.1),
        Example(f"y = {operator} <axes = [1]> (x)", cut=first, opset=11, low=0.1),
    )


def _bounds(start: int, end: int, axis: int, step: int | None = None) -> str:
    bounds = {"start": start, "end": end, "axis": axis} | ({} if step is None else {"step": step})
    return ", ".join(f"int64[1] {name} = {{{number}}}" for name, number in bounds.items())


def _heads(queries: int, keys: int, values: int) -> str:
    return f"float[B, {queries}, S, 3] q, float[B, {keys}, S, 3] k, float[B, {values}, S, 3] v"


_REDUCTIONS = "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMin ReduceProd ReduceSumSquare"
_ONE_INPUT = (
    "Abs Acos Asin Atan Ceil Celu Cos Elu Erf Exp Floor HardSigmoid HardSwish IsNaN LeakyRelu Mish Relu Round Selu "
    "Sigmoid Sign Sin Softplus Softsign Tan Tanh ThresholdedRelu"
)
_POINTWISE = {
    **{("", operator): _one_input(operator) for operator in _ONE_INPUT.split()},
    **{("", operator): _one_input(operator, low=0.1) for operator in ("Log", "Reciprocal", "Sqrt")},
    ("", "BitwiseNot"): _one_input("BitwiseNot", _INT),
    ("", "Gelu"): _one_input("Gelu", opset=20),
    ("", "IsInf"): _one_input("IsInf", opset=20),
    ("", "Not"): _one_input("Not", _BOOL),
    ("", "Swish"): _one_input("Swish", opset=24),
    ("", "Clip"): (
        Example("y = Clip (x, low, high)", weights="float low = {-0.5}, float high = {0.25}"),
        Example("y = Clip (x)"),
        Example("y = Clip <min = -0.5, max = 0.25> (x)", opset=10),
    ),
    **{("", operator): _two_inputs(operator) for operator in ("Add", "Max", "Mean", "Min", "Sub", "Sum")},
    **{
        ("", operator): _two_inputs(operator)
        for operator in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    },
    **{("", operator): _two_inputs(operator, _INT_PAIR) for operator in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")},
    **{("", operator): _two_inputs(operator, _BOOL_PAIR) for operator in ("And", "Or", "Xor")},
    ("", "Mod"): (Example("y = Mod (x, w)", _INT, "int64[6] w = {3, 4, 5, 6, 7, 8}"), *_two_inputs("Mod <fmod = 1>")),
    ("", "Mul"): (
        *_two_inputs("Mul", cut="x1 x2 z1 z2 y1 y2"),
        Example("y = Mul (x, w)", weights="float[6] w", cut=_ALL),
    ),
    ("", "Div"): _two_inputs("Div", cut=_ALL, low=0.1),
    ("", "Pow"): (
        *_two_inputs("Pow", low=0.1),
        Example("y = Pow (x, exponent)", weights="float exponent = {2}", cut=_ALL),
        Example("y = Pow (x, exponent)", weights="float exponent = {0.5}", low=0.1),
    ),
    ("", "PRelu"): (
        Example("y = PRelu (x, slope)", weights="float[6] slope"),
        Example("y = PRelu (x, slope)", weights="float[4, 1] slope"),
    ),
    ("", "Where"): (
        Example("y = Where (c, x, z)", f"{_PAIR}, bool[B, 4, 6] c"),
        Example("y = Where (c, x, z)", "float[B, 4, 1] x, float[6] z, bool[B, 1, 6] c"),
        Example("y = Where (c, zero, x)", "float[B, 4, 6] x, bool[B, 1, 6] c", "float zero = {0}", cut=_ALL),
        Example("y = Where (c, x, zero)", "float[B, 4, 6] x, bool[B, 1, 6] c", "float zero = {0}", cut=_ALL),
    ),
    **{("", operator): _one_input(operator, cut=_ALL) for operator in ("Identity", "Neg")},
    ("", "Dropout"): (Example("y = Dropout (x)", cut=_ALL), Example("y, _mask = Dropout (x)", cut=_ALL)),
    ("", "Cast"): (Example("y = Cast <to = 11> (x)", cut=_ALL), Example("y = Cast <to = 6> (x)", _INT, cut=_ALL)),
    ("", "CastLike"): (Example("y = CastLike (x, like)", weights="double like = {1}", cut=_ALL),),
    ("", "QuantizeLinear"): (
        Example("y = QuantizeLinear (x, scale, zero)", weights="float scale = {0.01}, uint8 zero = {128}"),
        Example("y = QuantizeLinear <axis = 1> (x, scale)", weights="float[4] scale = {0.1, 0.2, 0.03, 0.04}"),
    ),
    ("", "DequantizeLinear"): (
        Example("y = DequantizeLinear (x, scale)", "int8[B, 4, 6] x", "float scale = {0.01}"),
        Example("y = DequantizeLinear <axis = -1> (x, scale)", "int8[B, 4, 6] x", "float[6] scale"),
        Example("y = DequantizeLinear <axis = 1> (x, scale)", "int8[B, 4, 6] x", "float[4] scale"),
    ),
}

_LAYOUT = {
    ("", "Transpose"): (
        Example("y = Transpose <perm = [0, 2, 1]> (x)", cut=_ALL),
        Example("y = Transpose (x)", cut="x1 x2 y0 y1"),
    ),
    ("", "Unsqueeze"): (
        Example("y = Unsqueeze (x, axes)", weights="int64[2] axes = {1, -1}", cut="x1 x2 y2 y3"),
        Example("y = Unsqueeze <axes = [0]> (x)", cut="x1 x2 y2 y3", opset=11),
    ),
    ("", "Squeeze"): (
        Example("y = Squeeze (x, axes)", "float[B, 1, 4, 6] x", "int64[1] axes = {1}", cut="x2 x3 y1 y2"),
        Example("y = Squeeze (x)", "float[B, 2, 1, 6] x", cut="x3 y2", width=2),  # x1 and y1 keep a single unit
        Example("y = Squeeze <axes = [-2]> (x)", "float[B, 4, 1, 6] x", cut="x1 x3 y1 y2", opset=11),
    ),
    ("", "Expand"): (
        Example("y = Expand (x, sizes)", "float[B, 4, 1] x", "int64[3] sizes = {1, 4, 6}", "x1 y1 y2", whole="y2"),
        Example("y = Expand (x, sizes)", "float[B, 1, 6] x", "int64[2] sizes = {4, 1}", "x2 y1 y2", whole="y1"),
    ),
    ("", "ConstantOfShape"): (
        Example("s = Shape (x) y = ConstantOfShape <value = float[1] {2}> (s)", cut=_ALL, whole=_ALL),
    ),
    ("", "Shape"): (
        Example("r = Relu (x) s = Shape (r) y = Expand (r, s)"),
        Example("s = Shape <start = 1> (x) y = ConstantOfShape (s)", cut="x1 x2 y0 y1", whole="x1 x2 y0 y1"),
    ),
    ("", "Pad"): (
        Example("y = Pad (x, pads)", weights="int64[6] pads = {0, 1, 0, 0, 0, 0}", cut="x2 y2"),
        Example("y = Pad (x, pads, v)", weights="int64[6] pads = {0, 0, 1, 1, 0, 0}, float v = {2}", cut="y1"),
        Example("y = Pad <pads = [0, 0, 0, 1, 0, 0]> (x)", cut="x1 x2 y1 y2", opset=10),
    ),
    ("", "Tile"): (
        Example("y = Tile (x, repeats)", weights="int64[3] repeats = {2, 1, 1}", cut=_ALL),
        Example("y = Tile (x, repeats)", "float[B, 4, 1] x", "int64[3] repeats = {1, 1, 6}", "x1 y1 y2", "y2"),
        Example("y = Tile (x, repeats)", weights="int64[3] repeats = {1, 1, 2}", cut="x1 x2 y1"),
    ),
    ("", "Reshape"): (
        Example("y = Reshape (x, sizes)", weights="int64[2] sizes = {0, 24}", cut="x1 x2 y1", width=6),
        Example("y = Reshape (x, sizes)", "float[B, S, 24] x", "int64[4] sizes = {0, 0, 4, 6}", "x2 y2 y3", width=6),
        Example("y = Reshape (x, sizes)", "float[B, S, 4, 6] x", "int64[2] sizes = {-1, 6}", "x3 y1"),
        Example("y = Reshape (x, sizes)", weights="int64[4] sizes = {-1, 2, 2, 6}", cut="x1 x2 y1 y2 y3", width=2),
    ),
    ("", "Flatten"): (
        Example("y = Flatten <axis = 1> (x)", cut="x1 x2 y1", width=6),
        Example("y = Flatten <axis = 2> (x)", cut="x2 y1"),
    ),
}

_PRODUCTS = {
    ("", "MatMul"): (
        Example("y = MatMul (x, w)", weights="float[6, 5] w", cut=_ALL),
        Example("y = MatMul (x, z)", "float[B, 4, 6] x, float[B, 6, 5] z", cut="x1 x2 z1 z2 y1 y2"),
        Example("y = MatMul (x, z)", "float[B, 4, S, 6] x, float[1, 4, 6, 5] z", cut="x1 x3 z1 z2 z3 y1 y3"),
    ),
    ("com.microsoft", "FusedMatMul"): (
        Example("y = com.microsoft.FusedMatMul <alpha = 0.5> (x, w)", weights="float[6, 5] w", cut=_ALL),
        Example(
            "y = com.microsoft.FusedMatMul <transA = 1, transB = 1> (x, z)",
            "float[B, 4, 6] x, float[B, 5, 4] z",
            cut="x1 x2 z1 z2 y1 y2",
        ),
    ),
    ("", "Gemm"): (
        Example("y = Gemm (x, w)", "float[B, 6] x", "float[6, 5] w", "x1 y1"),
        Example("y = Gemm <transB = 1> (x, w, b)", "float[B, 6] x", "float[5, 6] w, float[5] b", "x1 y1"),
        Example("y = Gemm <transA = 1> (x, w, b)", "float[6, B] x", "float[6, 5] w, float[1, 1] b", "x0 y1"),
        Example("y = Gemm (x, z, b)", "float[4, 6] x, float[6, 5] z", "float[4, 1] b", "x1 z0 y0 y1"),
    ),
    ("", "Einsum"): (
        Example('y = Einsum <equation = "bij,jk->bik"> (x, w)', weights="float[6, 5] w", cut=_ALL),
        Example('y = Einsum <equation = "bij,bkj->bik"> (x, z)', _PAIR, cut="x1 x2 z1 z2 y1 y2"),
        Example('y = Einsum <equation = "...ij,ijk->...k"> (x, w)', weights="float[4, 6, 5] w", cut="x1 x2 y1"),
    ),
    ("", "Conv"): (
        Example("y = Conv (x, w, b)", weights="float[5, 4, 1] w, float[5] b", cut="x1 y1 y2"),
        Example("y = Conv <pads = [1, 1]> (x, w)", weights="float[5, 4, 3] w", cut="x1 y1 y2", whole="y2"),
        Example("y = Conv <group = 4, pads = [1, 1]> (x, w)", weights="float[4, 1, 3] w", cut="x1 y1 y2", whole="y2"),
        Example("y = Conv <group = 4> (x, w, b)", weights="float[4, 1, 1] w, float[4] b", cut="y1 y2"),
        Example("y = Conv <group = 2> (x, w)", weights="float[6, 2, 1] w", cut=""),
    ),
    **{
        ("", operator): (
            Example(f"y = {operator} (x)", cut="y1"),
            Example(f"y = {operator} <axis = 1> (x)", cut="y2"),
            Example(f"y = {operator} <axis = 1> (x)", cut="", opset=11),
            Example(f"y = {operator} <axis = 2> (x)", cut="y1", opset=11),
        )
        for operator in ("Hardmax", "LogSoftmax", "Softmax")
    },
    ("", "LpNormalization"): (
        Example("y = LpNormalization (x)", cut="y1"),
        Example("y = LpNormalization <axis = 1, p = 1> (x)", cut="y2", opset=11),
    ),
    ("", "CumSum"): (
        Example("y = CumSum (x, axis)", weights="int64 axis = {1}", cut="x2 y2"),
        Example("y = CumSum <reverse = 1> (x, axis)", weights="int64[1] axis = {-1}", cut="x1 y1"),
    ),
    ("", "LayerNormalization"): (
        Example("y = LayerNormalization (x, s, b)", weights="float[6] s, float[6] b", shared="y2"),
        Example("y = LayerNormalization <axis = 1> (x, s)", weights="float[4, 6] s", shared="y1 y2"),
        Example("y, mean, deviation = LayerNormalization <axis = 2> (x, s)", weights="float[6] s", shared="y2"),
    ),
    ("", "RMSNormalization"): (
        Example("y = RMSNormalization (x, s)", weights="float[6] s", shared="y2", opset=23),
        Example("y = RMSNormalization <axis = 1> (x, s)", weights="float[4, 6] s", shared="y1 y2", opset=23),
    ),
    ("", "SimplifiedLayerNormalization"): (
        Example("y = SimplifiedLayerNormalization <axis = -1> (x, s)", weights="float[6] s", shared="y2"),
    ),
    ("com.microsoft", "SkipLayerNormalization"): (
        Example(
            "y, _mean, _deviation, sum = com.microsoft.SkipLayerNormalization (x, z, s, b)",
            "float[B, S, 6] x, float[B, S, 6] z",
            "float[6] s, float[6] b",
            cut="",
        ),
    ),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): (
        Example(
            "y = com.microsoft.SkipSimplifiedLayerNormalization (x, z, s)",
            "float[B, S, 6] x, float[B, S, 6] z",
            "float[6] s",
            cut="",
        ),
    ),
    **{("", operator): _reduction(operator) for operator in _REDUCTIONS.split()},
    **{("", operator): _reduction(operator, cut="x1 x2") for operator in ("ReduceMean", "ReduceSum")},
}

_SELECTION = {
    ("", "Slice"): (
        Example("y = Slice (x, start, end, axis)", weights=_bounds(1, 5, -1), cut="x1 x2 y1 y2"),
        Example("y = Slice (x, start, end, axis, step)", weights=_bounds(-1, -(2**62), 1, -1), cut=_ALL),
        Example("y = Slice (x, start, end, axis, step)", "float[B, S, 6] x", _bounds(0, 1, 1, 2), cut="x2 y2"),
        Example("y = Slice <starts = [1, 0], ends = [4, 5], axes = [1, 2]> (x)", cut=_ALL, opset=9),
    ),
    ("", "Split"): (
        Example("y, z = Split <axis = 2> (x, sizes)", weights="int64[2] sizes = {2, 4}", cut="x1 x2 y1 y2 z2"),
        Example("y, z = Split <axis = 1, num_outputs = 2> (x)", cut="x1 x2 y1 y2"),
        Example("y, z, v = Split <axis = -1> (x)", cut="x1 x2 y1 y2", opset=13),
        Example("y, z = Split <axis = 2, split = [1, 5]> (x)", cut="x1 x2 y1 z2", opset=11),
    ),
    ("", "Concat"): (
        Example("y = Concat <axis = 2> (x, z)", "float[B, 4, 6] x, float[B, 4, 2] z", cut="x2 z2 y1 y2"),
        Example("y = Concat <axis = -1> (x, w)", "float[1, 4, 6] x", "float[1, 4, 2] w", cut="x2 y1 y2"),
        Example("y = Concat <axis = 1> (x, z)", "float[B, S, 6] x, float[B, 1, 6] z", cut="y2"),
    ),
    ("", "Gather"): (
        Example("y = Gather <axis = 2> (x, i)", weights="int64[4] i = {3, 0, -1, 3}", cut=_ALL),
        Example("y = Gather <axis = 1> (x, i)", weights="int64 i = {-2}", cut="x2 y1"),
        Example("y = Gather (x, i)", "float[8, 6] x, int64[B, S] i", cut="x1 y2"),
        Example("y = Gather <axis = 1> (x, i)", weights="int64[2, 2] i = {0, 1, 3, 2}", cut="x2 y3"),
    ),
    ("", "GatherElements"): (
        Example(
            "sizes = Shape (x) i = Expand (first, sizes) y = GatherElements <axis = 1> (x, i)",
            weights="int64[4, 1] first = {3, 0, 2, 2}",
            cut="x2 y1 y2",
            whole="y1",
        ),
    ),
    ("", "GatherND"): (
        Example("y = GatherND <batch_dims = 1> (x, i)", "float[B, 8, 6] x, int64[B, 1] i", cut="x2 y1"),
        Example(
            "y = GatherND (x, i)",
            "float[1, 4, 6] x",
            "int64[3, 2] i = {0, 1, 0, 3, 0, 3}",
            cut="x2 y0 y1",
            whole="y0",
        ),
    ),
    ("", "GridSample"): (
        Example("y = GridSample (x, grid)", "float[B, 4, 6, 3] x, float[B, 5, 2, 2] grid", cut="x1 y1 y2 y3"),
    ),
    ("", "ScatterND"): (
        Example("y = ScatterND (x, i, u)", "float[4, 6] x", "int64[2, 1] i = {3, 1}, float[2, 6] u", cut="y1"),
    ),
    ("", "Trilu"): (
        Example("y = Trilu (x)", "float[B, 5, 4, 6] x", cut="x1 y1"),
        Example("y = Trilu <upper = 0> (x, k)", "float[B, 5, 4, 6] x", "int64 k = {1}", cut="x1 y1"),
    ),
}

_SEPARATE = "float[B, S, 12] q, float[B, S, 12] k, float[B, S, 12] v"
_GROUPED = "float[B, S, 12] q, float[B, S, 6] k, float[B, S, 6] v"
_ATTENTION = {
    ("", "Attention"): (
        Example("y = Attention (q, k, v)", _heads(4, 4, 4), cut="y1", opset=23),
        Example("y = Attention <is_causal = 1> (q, k, v)", _heads(4, 2, 2), cut="y1", opset=23),
        Example("y = Attention (q, k, v, m)", f"{_heads(4, 4, 4)}, float[B, 4, S, S] m", cut="y1", opset=23),
        Example("y = Attention <q_num_heads = 4, kv_num_heads = 4> (q, k, v)", _SEPARATE, cut="y2", opset=23, width=3),
        Example("y = Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, v)", _GROUPED, cut="y2", opset=23, width=3),
    ),
    ("com.microsoft", "Attention"): (
        Example(
            "y = com.microsoft.Attention <num_heads = 4> (x, w, b)",
            "float[B, S, 8] x",
            "float[8, 36] w, float[36] b",
            cut="y2",
            width=3,
        ),
        Example(
            "y = com.microsoft.Attention <num_heads = 4, qkv_hidden_sizes = [8, 8, 12]> (x, w, b)",
            "float[B, S, 8] x",
            "float[8, 28] w, float[28] b",
            cut="y2",
            width=3,
        ),
    ),
    ("com.microsoft", "MultiHeadAttention"): (
        Example("y = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v)", _SEPARATE, cut="y2", width=3),
        Example(
            "y = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v, b)",
            _SEPARATE,
            "float[36] b",
            cut="y2",
            width=3,
        ),
        Example(
            "y = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v)",
            "float[B, S, 12] q, float[B, 4, S, 3] k, float[B, 4, S, 3] v",
            cut="y2",
            width=3,
        ),
    ),
    ("com.microsoft", "GroupQueryAttention"): (
        Example(
            "y, _pk, _pv = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> "
            "(q, k, v, , , last, total)",
            "float[1, 5, 32] q, float[1, 5, 16] k, float[1, 5, 16] v",
            "int32[1] last = {4}, int32 total = {5}",
            cut="y2",
            width=8,
        ),
        Example(
            "y, _pk, _pv = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> "
            "(q, , , , , last, total)",
            "float[1, 5, 64] q",
            "int32[1] last = {4}, int32 total = {5}",
            cut="y2",
            width=8,
        ),
    ),
    ("", "RotaryEmbedding"): (
        Example(
            "y = RotaryEmbedding (x, c, s)",
            "float[1, 4, 5, 6] x",
            "float[1, 5, 3] c, float[1, 5, 3] s",
            cut="y1",
            opset=23,
        ),
        Example(
            "y = RotaryEmbedding <num_heads = 4> (x, c, s, i)",
            "float[B, S, 24] x, int64[B, S] i",
            "float[8, 3] c, float[8, 3] s",
            cut="y2",
            opset=23,
            width=6,
        ),
    ),
    ("com.microsoft", "RotaryEmbedding"): (
        Example(
            "y = com.microsoft.RotaryEmbedding (x, i, c, s)",
            "float[B, S, 32] x, int64[B, S] i",
            "float[8, 4] c, float[8, 4] s",
            cut="y2",
            width=8,
        ),
        Example(
            "y = com.microsoft.RotaryEmbedding <num_heads = 4> (x, i, c, s)",
            "float[B, S, 32] x, int64[B, S] i",
            "float[8, 4] c, float[8, 4] s",
            cut="y2",
            width=8,
        ),
    ),
}
_RUNTIME = {
    ("com.microsoft", "Gelu"): _one_input("com.microsoft.Gelu"),
    ("com.microsoft", "QuickGelu"): _one_input("com.microsoft.QuickGelu"),
    **{
        ("com.microsoft", operator): (Example(f"y = com.microsoft.{operator} (x, b)", weights="float[6] b"),)
        for operator in ("BiasGelu", "FastGelu")
    },
}

EXAMPLES = _POINTWISE | _RUNTIME | _LAYOUT | _PRODUCTS | _SELECTION | _ATTENTION
"""Examples of each operator, by domain and type."""
