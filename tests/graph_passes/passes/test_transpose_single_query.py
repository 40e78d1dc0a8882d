"""The output of an attention of one query is computed as a product with a column; other attentions stay."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graph_passes import find_attention, load
from graph_passes.passes import CleanUp, DropUnreadPositions, TransposeSingleQuery
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.layers import LAYERS
from tests.graph_passes.passes.checks import assert_untouched, rewritten
from tests.graph_passes.passes.test_drop_unread_positions import FLAT, reads
from tests.quick_cases import quick

ROW = "float[B, 1, 8] y"
PROBABILITIES = """
    q0{n} = Gather <axis = 1> ({x}, read)
    q1{n} = MatMul({queries}, Wq)
    q2{n} = Reshape(q1{n}, split)
    q{n} = Transpose <perm = [0, 2, 1, 3]> (q2{n})
    k1{n} = MatMul({x}, Wk)
    k2{n} = Reshape(k1{n}, split)
    k{n} = Transpose <perm = [0, 2, 3, 1]> (k2{n})
    v1{n} = MatMul({x}, Wv)
    v2{n} = Reshape(v1{n}, split)
    v{n} = Transpose <perm = [0, 2, 1, 3]> (v2{n})
    s{n} = MatMul(q{n}, k{n})
    p{n} = Softmax <axis = -1> (s{n})
"""
HEADS = "heads{n} = MatMul(p{n}, v{n})"
MERGED = """
    back{n} = Transpose <perm = [0, 2, 1, 3]> (heads{n})
    merged{n} = Reshape(back{n}, merge)
    {y} = MatMul(merged{n}, Wo)
"""


def text(template: str = PROBABILITIES + HEADS + MERGED, n: str = "", x: str = "x", y: str = "y", q: str = "") -> str:
    """An attention as ONNX text.

    Args:
        template: its nodes.
        n: suffix of the names.
        x: the tensor that it reads.
        y: its output.
        q: the tensor that its queries are projected from; empty: the positions `read` of `x`.
    """
    return template.format(n=n, x=x, y=y, queries=q or f"q0{n}")


BODY = text()


def attention(body: str = BODY, *weights: str, outputs: str = ROW, width: int = 3, read: str = "0") -> ir.Model:
    """An attention of 4 heads whose queries are of the positions `read`; nodes have the names of their outputs."""
    size = 4 * width
    model = graph(
        body,
        f"float[8, {size}] Wq, float[8, {size}] Wk, float[8, {size}] Wv, float[{size}, 8] Wo",
        f"int64[4] split = {{0, -1, 4, {width}}}, int64[3] merge = {{0, -1, {size}}}",
        f"int64[{1 + read.count(',')}] read = {{{read}}}",
        *weights,
        outputs=outputs,
    )
    for node in model.graph:
        node.name = node.outputs[0].name
    return model


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        (BODY, ""),
        (BODY.replace("p =", "t = Mul(s, half)  p =").replace("Softmax <axis = -1> (s)", "Softmax(t)"), "float half"),
        (BODY.replace("heads =", "c = Cast <to = 1> (p)  heads =").replace("MatMul(p, v)", "MatMul(c, v)"), ""),
        (BODY.replace("Gather <axis = 1> (x, read)", "ReduceMean(x, read)"), ""),
    ],
    ids=["plain", "scaled", "cast", "mean query"],
)
def test_an_attention_of_one_query_is_transposed(body: str, weights: str) -> None:
    read = "1" if "ReduceMean" in body else "0"
    model = attention(body, weights, read=read)
    result = rewritten(TransposeSingleQuery(), model)
    assert result.report == ("heads",)
    added = sum(operator == "Transpose" for operator in operators(result.model)) - operators(model).count("Transpose")
    assert added == 3, "of both factors and of the product"
    product = next(node for node in result.model.graph if node.name == "heads")
    factors = [value.producer() for value in product.inputs if value is not None]
    assert [node.inputs[0].name for node in factors if node is not None and node.inputs[0] is not None] == [
        "v",
        "c" if "Cast" in body else "p",
    ]
    assert find_attention(model)
    assert find_attention(result.model) == [], "runtimes fuse what is found"


@pytest.mark.parametrize("width", [1, 2])
def test_narrow_heads_are_transposed_once(width: int) -> None:
    assert rewritten(TransposeSingleQuery(), attention(width=width)).report == ("heads",)


@pytest.mark.parametrize("read", ["0, 1", "2, 1, 0"])
def test_several_queries_stay(read: str) -> None:
    outputs = f"float[B, {1 + read.count(',')}, 8] y"
    assert assert_untouched(TransposeSingleQuery(), attention(outputs=outputs, read=read)) == ()


def test_as_many_queries_as_positions_stay() -> None:
    model = attention(text(q="x"), outputs="float[B, S, 8] y")
    assert assert_untouched(TransposeSingleQuery(), model) == ()


def test_a_product_without_softmax_stays() -> None:
    model = attention(BODY.replace("Softmax <axis = -1> (s)", "Relu(s)"))
    assert assert_untouched(TransposeSingleQuery(), model) == ()


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        (text(PROBABILITIES + HEADS), "float[B, 4, 1, 3] heads"),
        (BODY, f"float[B, 4, 1, 3] heads, {ROW}"),
        (BODY, f"{ROW}, float[B, 4, 1, S] p"),
        (f"{BODY} z = Relu(heads)", f"{ROW}, float[B, 4, 1, 3] z"),
    ],
    ids=["output", "output and read", "probabilities", "two readers"],
)
def test_every_reader_of_the_product_gets_the_same_numbers(body: str, outputs: str) -> None:
    assert rewritten(TransposeSingleQuery(), attention(body, outputs=outputs)).report == ("heads",)


def test_only_the_attention_of_one_query_is_transposed() -> None:
    body = text(y="h", q="x") + text(n="b", x="h")
    assert rewritten(TransposeSingleQuery(), attention(body)).report == ("headsb",)


@pytest.mark.parametrize("name", quick(sorted(LAYERS.keys() - {FLAT}), ("separate", "grouped heads")))
def test_layers_of_exporters_keep_their_numbers(name: str) -> None:
    model = DropUnreadPositions()(reads(LAYERS[name].graph(), [0])).model
    if name in ("batch and heads on one axis", "positions in blocks"):
        assert_untouched(TransposeSingleQuery(), model)
    else:
        assert len(rewritten(TransposeSingleQuery(), model).report) == 1


@pytest.mark.zoo
def test_the_last_attention_of_an_exported_model_is_transposed() -> None:
    pytest.importorskip("torch")
    from tests.targets.graphs import pruned

    model = ir.external_data.load_to_model(load(pruned("bert").shrunk))
    assert_untouched(TransposeSingleQuery(), model)
    DropUnreadPositions()(model)
    CleanUp()(model)
    attentions = find_attention(model)
    sizes = [{"batch": 2, "sequence": 5}, {"batch": 1, "sequence": 9}]
    result = rewritten(TransposeSingleQuery(), model, sizes=sizes)
    (product,) = result.report
    last = attentions[-1].output.producer()
    assert last is not None
    assert product == last.name
    assert len(find_attention(result.model)) == len(attentions) - 1
