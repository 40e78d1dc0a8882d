"""Copies of initializers get names that a graph does not have yet."""

from __future__ import annotations

from graph_passes import shrink
from tests.graph_passes.graphs import assert_same, gated, graph, plan, site
from tests.graph_passes.layer_parts import PROJECT, PROJECTIONS, TO_HEADS

CORE = """
    kt{0} = Transpose <perm = [0, 1, 3, 2]> (k)
    products{0} = MatMul (q, kt{0})
    scores{0} = Mul (products{0}, slopes)
    p{0} = Softmax <axis = -1> (scores{0})
    heads{0} = MatMul (p{0}, v)
    gated{0} = Mul (heads{0}, "{0}.head_gate")
    back{0} = Transpose <perm = [0, 2, 1, 3]> (gated{0})
    merged{0} = Reshape (back{0}, merge{0})
    y{0} = MatMul (merged{0}, Wo{0})
"""
KEPT = {"a": ([0, 1, 2], [0, 1]), "b": ([1, 2, 3], [0, 1, 2]), "c": ([0, 1, 2], [1, 2])}
"""The heads that each of three attentions keeps at first, and then of these."""


def test_a_graph_whose_attentions_share_a_factor_can_be_shrunk_twice() -> None:
    weights = [f'float[4, 1, 1] "{name}.head_gate", float[12, 8] Wo{name}' for name in KEPT]
    shapes = ", ".join(f"int64[3] merge{name} = {{0, 0, 12}}" for name in KEPT)
    body = PROJECT + TO_HEADS + "".join(CORE.format(name) for name in KEPT) + "y = Sum (ya, yb, yc)"
    shared = f"{PROJECTIONS}, float[4, 1, 1] slopes, int64[4] split = {{0, 0, 4, 3}}, {shapes}"
    model = graph(body, shared, *weights)
    for step, heads in enumerate((4, 3)):
        kept = plan(*(site(counts[step], name=name, heads=heads) for name, counts in KEPT.items()))
        reference = gated(model, kept)
        shrunk = shrink(model, kept)
        assert shrunk.refused == ()
        assert_same(shrunk.model, reference)
        model = shrunk.model
