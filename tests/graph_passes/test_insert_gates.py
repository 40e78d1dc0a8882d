"""Inserting gates into foreign graphs: how a plan's sites meet a graph's attention, and what is ambiguous."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import Plan, PlanError, SitePlan, find_attention
from graph_passes.attention.gates import find_gates
from tests.graph_passes.graphs import gated, graph, shrink_and_compare, site

SCOPES = "pkg.torch.onnx.name_scopes"


def stack(*scopes: str | None, shared: bool = False) -> ir.Model:
    """Attention layers of 4 heads of 3, each on the output of the last, below the scopes that torch would write.

    Args:
        scopes: module path of each layer's attention; None leaves it nameless.
        shared: all layers read the same weights, as a module that is called several times does.
    """
    layers, weights = "", ["int64[4] split = {0, 0, 4, 3}", "int64[3] merge = {0, 0, 12}"]
    for number in range(len(scopes)):
        own = 0 if shared else number
        source, target = f"x{number}" if number else "x", "y" if number == len(scopes) - 1 else f"x{number + 1}"
        for operand in "qkv":
            layers += f"""
                {operand}p{number} = MatMul ({source}, W{operand}{own})
                {operand}s{number} = Reshape ({operand}p{number}, split)
            """
        layers += f"""
            q{number} = Transpose <perm = [0, 2, 1, 3]> (qs{number})
            kt{number} = Transpose <perm = [0, 2, 3, 1]> (ks{number})
            v{number} = Transpose <perm = [0, 2, 1, 3]> (vs{number})
            scores{number} = MatMul (q{number}, kt{number})
            p{number} = Softmax <axis = -1> (scores{number})
            heads{number} = MatMul (p{number}, v{number})
            back{number} = Transpose <perm = [0, 2, 1, 3]> (heads{number})
            merged{number} = Reshape (back{number}, merge)
            {target} = MatMul (merged{number}, Wo{own})
        """
        if own == number:
            weights += [f"float[8, 12] W{operand}{own}" for operand in "qkv"] + [f"float[12, 8] Wo{own}"]
    model = graph(layers, *weights)
    cores = [node for node in model.graph if node.op_type == "Softmax"]
    for node, scope in zip(cores, scopes, strict=True):
        if scope is not None:
            node.metadata_props[SCOPES] = repr(["", scope, "softmax"])
    return model


def drops(*kept: int, name: str = "a") -> SitePlan:
    return site(kept, name=name, scale=[0.5 + head for head in kept])


def test_the_order_of_the_plan_does_not_matter_where_there_are_names() -> None:
    model = stack("layer.0.attention", "layer.1.attention")
    sites = [drops(2, name="layer.1.attention"), drops(0, 1, name="layer.0.attention")]
    for order in (sites, sites[::-1]):
        shrunk = shrink_and_compare(model, Plan(sites=tuple(order)))
        assert [place.heads for place in find_attention(shrunk.model)] == [2, 1]


@pytest.mark.parametrize("prefix", ["model.", "module.encoder."])
def test_a_wrapper_on_either_side_is_no_hindrance(prefix: str) -> None:
    for outer, inner in ((prefix, ""), ("", prefix)):
        model = stack(f"{outer}layer.0.attention", f"{outer}layer.1.attention")
        names = (f"{inner}layer.0.attention", f"{inner}layer.1.attention")
        shrunk = shrink_and_compare(model, Plan(sites=(drops(3, name=names[0]), drops(0, 2, name=names[1]))))
        assert [place.heads for place in find_attention(shrunk.model)] == [1, 2]


def test_nameless_attentions_are_met_in_order() -> None:
    shrunk = shrink_and_compare(stack(None, None), Plan(sites=(drops(1, 2, 3, name="a"), drops(0, name="b"))))
    assert [place.heads for place in find_attention(shrunk.model)] == [3, 1]


@pytest.mark.parametrize("kept", [(), (1,), (0, 1, 3), (0, 1, 2, 3)])
def test_a_module_that_is_called_twice_is_one_site(kept: tuple[int, ...]) -> None:
    model = stack("group.attention", "group.attention", "last.attention", shared=True)
    one = Plan(sites=(drops(*kept, name="group.attention"), drops(*kept, name="last.attention")))
    assert len(find_gates(gated(model, one).graph)) == 2
    shrunk = shrink_and_compare(model, one)
    assert [place.heads for place in find_attention(shrunk.model)] == ([len(kept)] * 3 if kept else [])


REFUSED = {
    "a site that is not in the graph": (("one", "two"), ("one", "three"), "site three is no attention of this graph"),
    "an attention that is not in the plan": (("one", "two"), ("one",), "attention two is not in the plan"),
    "a nameless attention beside a named one": (("one", None), ("one",), "attention without a name is not in the plan"),
    "one site, two modules": (("one.self", "two.self"), ("self",), "could be several attentions"),
    "two sites, one attention": (("self",), ("one.self", "two.self"), "attention self could be any of"),
    "fewer sites than nameless attentions": ((None, None), ("one",), "1 sites and the graph 2 attentions"),
    "more sites than nameless attentions": ((None,), ("one", "two"), "2 sites and the graph 1 attentions"),
    "names that have nothing in common": (("one",), ("two", "three"), "2 sites and the graph 1 attentions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ambiguity_is_refused(case: str) -> None:
    scopes, sites, message = REFUSED[case]
    with pytest.raises(PlanError, match=message) as refusal:
        gated(stack(*scopes), Plan(sites=tuple(drops(0, name=name) for name in sites)))
    assert ";" in str(refusal.value)  # what, why; how to mend


@pytest.mark.parametrize("scope", ["one", None])
def test_other_heads_and_other_widths_are_refused(scope: str | None) -> None:
    for wrong in (site([0], name="one", heads=3), site([0], name="one", head_dim=4)):
        with pytest.raises(PlanError, match="the graph 4 of 3"):
            gated(stack(scope), Plan(sites=(wrong,)))


@pytest.mark.parametrize("scopes", [("one", "two"), (None, None)])
def test_a_graph_that_was_shrunk_is_known(scopes: tuple[str | None, ...]) -> None:
    wanted = Plan(sites=(drops(0, name="one"), drops(1, 2, name="two")))
    shrunk = shrink_and_compare(stack(*scopes), wanted).model
    with pytest.raises(PlanError, match=r"seems to be shrunk already: .*; give the graph that has every head"):
        gated(shrunk, wanted)


def test_a_cross_attention_in_place_of_another_is_refused() -> None:
    cross = SitePlan("one", "cross", 4, 4, 3, (0,), ())
    with pytest.raises(PlanError, match="cross attention in the plan"):
        gated(stack(None), Plan(sites=(cross,)))


def test_heads_that_the_graph_gives_out_are_given_out_gated() -> None:
    model = stack("one")
    heads = next(value for node in model.graph for value in node.outputs if value.name == "heads0")
    model.graph.outputs.append(heads)
    heads.dtype, heads.shape = ir.DataType.FLOAT, ir.Shape(["B", 4, "S", 3])
    out = gated(model, Plan(sites=(drops(1, name="one"),)))
    assert [value.name for value in out.graph.outputs] == ["y", "heads0"]
    gate = find_gates(out.graph)["one"].const_value
    assert gate is not None
    assert np.flatnonzero(gate.numpy()).tolist() == [1]


@pytest.mark.parametrize(
    ("mask", "weights", "kind"),
    [
        (
            "Slice (stored, first, size, axes)",
            "float[1, 1, 9, 9] stored, int64[1] first = {0}, int64[1] axes = {3}",
            "causal",
        ),
        ("Sub (padding, padding)", "", "bidirectional"),
    ],
)
def test_a_stored_mask_over_pairs_is_causal_and_a_threshold_of_a_computed_one_is_not(
    mask: str, weights: str, kind: str
) -> None:
    body = f"""
        qp = MatMul (x, Wq) qs = Reshape (qp, split) q = Transpose <perm = [0, 2, 1, 3]> (qs)
        kp = MatMul (x, Wk) ks = Reshape (kp, split) kt = Transpose <perm = [0, 2, 3, 1]> (ks)
        vp = MatMul (x, Wv) vs = Reshape (vp, split) v = Transpose <perm = [0, 2, 1, 3]> (vs)
        raw = MatMul (q, kt)
        given = {mask}
        shown = Greater (given, zero)
        scores = Where (shown, raw, low)
        p = Softmax <axis = -1> (scores)
        heads = MatMul (p, v) back = Transpose <perm = [0, 2, 1, 3]> (heads) merged = Reshape (back, merge)
        y = MatMul (merged, Wo)
    """
    needed = [
        "float zero = {0.0}",
        "float low = {-1e9}",
        "int64[4] split = {0, 0, 4, 3}",
        "int64[3] merge = {0, 0, 12}",
    ]
    needed += [*(f"float[8, 12] W{operand}" for operand in "qkv"), "float[12, 8] Wo", "int64[1] size = {9}", weights]
    model = graph(body, *needed, inputs="float[B, 9, 8] x, float[B, 1, 9, 9] padding", outputs="float[B, 9, 8] y")
    assert [found.kind for found in find_attention(model)] == [kind]
