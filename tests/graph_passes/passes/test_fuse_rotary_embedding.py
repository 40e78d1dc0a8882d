"""A rotary embedding becomes one operator, which computes the same at any positions."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from graph_passes.passes import FuseRotaryEmbedding
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten

TABLES = """
    f = Mul(t, frequencies)  {extra}  angles = Concat <axis = -1> ({halves})
    cos_ = Cos(angles)  cos1 = Mul(cos_, scale)  cos = Unsqueeze(cos1, second)
    sin_ = Sin(angles)  sin1 = Mul(scale, sin_)  sin = Unsqueeze(sin1, second)
"""
EMBEDDING = """
    low{n} = Slice({x}, zero, half, last)  high{n} = Slice({x}, half, end, last)
    minus{n} = Neg({negated}{n})  rotated{n} = Concat <axis = -1> ({first}, {then}{n})
    a{n} = Mul({x}, cos)  b{n} = Mul({sine}, rotated{n})  {y} = Add({sum})
"""
REST = """
    p{n} = Slice({x}, zero, width, last)  q{n} = Slice({x}, {bounds}, last)
"""
SIZES = ({"B": 2, "S": 5, "C": 2}, {"B": 3, "S": 1, "C": 3}, {"B": 1, "S": 4, "C": 1})


def rotary(
    *,
    swapped: bool = True,
    halves: str = "f, f",
    sine: str = "sin",
    total: str = "a{n}, b{n}",
    negated: str = "high",
    order: tuple[str, str] = ("minus{n}", "low"),
    rows: str = "B",
    layers: int = 1,
    extra: str = "",
    rest: int = 0,
    joined: str = "e{n}, q{n}",
    bounds: str = "width, end",
) -> ir.Model:
    """Layers that rotate three heads of width 4 of their input by angles of positions `t`, before a rest of a width."""
    nodes, x, width = TABLES.format(halves=halves, extra=extra), "x0", 4 + rest
    for n in range(layers):
        nodes += f"s{n} = Reshape({x}, split) h{n} = Transpose <perm = [0, 2, 1, 3]> (s{n})" if swapped else ""
        head, y = f"h{n}" if swapped else x, f"e{n}" if rest else f"y{n}"
        nodes += REST.format(n=n, x=head, bounds=bounds) if rest else ""
        texts = {"x": f"p{n}" if rest else head, "n": n, "negated": negated, "sine": sine, "then": order[1]}
        nodes += EMBEDDING.format(**texts, first=order[0].format(n=n), sum=total.format(n=n), y=y)
        nodes += f"y{n} = Concat <axis = 3> ({joined.format(n=n)})" if rest else ""
        merge = f"m{n} = Transpose <perm = [0, 2, 1, 3]> (y{n}) x{n + 1} = Reshape(m{n}, merge)"
        nodes += merge if swapped else f"x{n + 1} = Identity(y{n})"
        x = f"x{n + 1}"
    shape = f"B, S, {3 * width}" if swapped else f"B, 3, S, {width}"
    return graph(
        f"{nodes} out = Identity({x})",
        "float[1, 1, 2] frequencies, float scale = {1.5}, int64[1] second = {1}, int64[1] width = {4}",
        f"int64[4] split = {{0, 0, 3, {width}}}, int64[3] merge = {{0, 0, {3 * width}}}",
        "int64[1] zero = {0}, int64[1] half = {2}, int64[1] end = {9}",
        "int64[1] last = {3}",
        inputs=f"float[{shape}] x0, float[{rows}, S, 1] t",
        outputs=f"float[{shape}] out",
    )


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("rows", ["B", "1"])
@pytest.mark.parametrize("swapped", [True, False])
def test_the_operator_computes_the_embedding(swapped: bool, rows: str, layers: int) -> None:
    model = rotary(swapped=swapped, rows=rows, layers=layers)
    result = rewritten(FuseRotaryEmbedding(), model, sizes=SIZES)
    assert len(result.report) == operators(result.model).count("RotaryEmbedding") == layers
    assert operators(result.model).count("Range") == 1  # layers share the numbers of rows
    assert "Neg" not in operators(result.model)


@pytest.mark.parametrize(
    ("changes", "width"),
    [({}, 4), ({"swapped": False}, 4), ({"joined": "q{n}, e{n}"}, 0), ({"bounds": "zero, width"}, 0)],
    ids=["positions first", "heads first", "the rest before", "another rest"],
)
def test_heads_of_which_a_part_is_rotated_are_read_whole(changes: dict[str, Any], width: int) -> None:
    result = rewritten(FuseRotaryEmbedding(), rotary(rest=4, **changes), sizes=SIZES)
    (rotation,) = (node for node in result.model.graph if node.op_type == "RotaryEmbedding")
    assert rotation.attributes.get_int("rotary_embedding_dim", 0) == width


def test_the_order_of_a_sum_and_of_a_product_does_not_matter() -> None:
    rewritten(FuseRotaryEmbedding(), rotary(total="b{n}, a{n}"), sizes=SIZES)


@pytest.mark.parametrize(
    "changes",
    [
        {"halves": "f, other", "extra": "other = Add(f, frequencies)"},
        {"negated": "low"},
        {"order": ("low{n}", "minus")},
        {"sine": "table", "extra": "table = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()"},
        {"total": "a{n}, a{n}"},
    ],
    ids=["halves that differ", "the other half negated", "halves as they were", "a constant table", "no rotation"],
)
def test_other_arithmetic_stays(changes: dict[str, Any]) -> None:
    assert assert_untouched(FuseRotaryEmbedding(), rotary(**changes)) == ()
