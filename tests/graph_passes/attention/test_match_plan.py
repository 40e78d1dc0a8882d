"""The sites of a plan are paired with the attentions of a graph, or refused if that is ambiguous."""

from __future__ import annotations

from typing import Any

import pytest

from graph_passes import Plan, PlanError, SitePlan, find_attention
from graph_passes.attention.match_plan import match_plan
from graph_passes.errors import GraphErrorCode
from tests.graph_passes.graphs import shrink_and_compare, site
from tests.graph_passes.stacked_attention import SCOPES, keeping, stack


def pairs(plan: Plan, *scopes: str | None) -> list[tuple[str, int]]:
    """Names of sites, and the number of the attention that each is paired with."""
    attentions = find_attention(stack(*scopes))
    return [(site.name, attentions.index(attention)) for site, attention in match_plan(plan, attentions)]


def test_the_order_of_the_plan_does_not_matter_if_attentions_have_names() -> None:
    sites = [keeping(2, name="layer.1.attention"), keeping(0, 1, name="layer.0.attention")]
    scopes = ("layer.0.attention", "layer.1.attention")
    for order in (sites, sites[::-1]):
        paired = dict(pairs(Plan(sites=tuple(order)), *scopes))
        assert paired == {"layer.0.attention": 0, "layer.1.attention": 1}


@pytest.mark.parametrize("prefix", ["model.", "module.encoder."])
def test_a_wrapper_on_either_side_does_not_matter(prefix: str) -> None:
    for outer, inner in ((prefix, ""), ("", prefix)):
        names = (f"{inner}layer.0.attention", f"{inner}layer.1.attention")
        plan = Plan(sites=(keeping(3, name=names[0]), keeping(0, 2, name=names[1])))
        paired = pairs(plan, f"{outer}layer.0.attention", f"{outer}layer.1.attention")
        assert paired == [(names[0], 0), (names[1], 1)]


def test_nameless_attentions_are_paired_in_order() -> None:
    plan = Plan(sites=(keeping(1, 2, 3, name="a"), keeping(0, name="b")))
    assert pairs(plan, None, None) == [("a", 0), ("b", 1)]


def test_a_module_that_is_called_twice_is_one_site() -> None:
    plan = Plan(sites=(keeping(0, name="group"), keeping(0, name="last")))
    assert pairs(plan, "group", "group", "last") == [("group", 0), ("group", 1), ("last", 2)]


def test_pairs_are_pruned_as_the_plan_says() -> None:
    plan = Plan(sites=(keeping(2, name="two"), keeping(0, 1, name="one")))
    shrunk = shrink_and_compare(stack("one", "two"), plan)
    assert [attention.heads for attention in find_attention(shrunk.model)] == [2, 1]


def test_a_site_may_be_named_after_the_product_that_mixes_its_heads() -> None:
    model = stack("layer.0.attention", "layer.1.attention")
    products = [node for node in model.graph if node.outputs[0].name in ("x1", "y")]
    for number, node in enumerate(products):
        node.metadata_props[SCOPES] = repr(["", f"layer.{number}.output.dense", "matmul"])
    attentions = find_attention(model)
    plan = Plan(sites=(keeping(1, name="layer.1.output.dense"), keeping(0, name="layer.0.output.dense")))
    paired = [(site.name, attentions.index(attention)) for site, attention in match_plan(plan, attentions)]
    assert paired == [("layer.1.output.dense", 1), ("layer.0.output.dense", 0)]


MISSING, AMBIGUOUS, MISMATCH = (
    GraphErrorCode.SITE_MISSING,
    GraphErrorCode.SITE_AMBIGUOUS,
    GraphErrorCode.SITE_MISMATCH,
)
REFUSED: dict[str, tuple[tuple[str | None, ...], tuple[str, ...], GraphErrorCode, dict[str, Any]]] = {
    "a site that is not in the graph": (
        ("one", "two"),
        ("one", "two", "three"),
        MISSING,
        {"sites": ["three"], "attentions": []},
    ),
    "an attention that is not in the plan": (
        ("one", "two", "three"),
        ("one",),
        MISSING,
        {"sites": [], "attentions": ["two", "three"]},
    ),
    "names of which some differ": (
        ("one", "two"),
        ("one", "three"),
        MISSING,
        {"sites": ["three"], "attentions": ["two"]},
    ),
    "a nameless attention next to a named one": (
        ("one", None),
        ("one",),
        MISSING,
        {"sites": [], "attentions": [None]},
    ),
    "one site, two modules": (
        ("one.self", "two.self"),
        ("self",),
        AMBIGUOUS,
        {"site": "self", "attentions": ["one.self", "two.self"]},
    ),
    "two sites, one attention": (
        ("self",),
        ("one.self", "two.self"),
        AMBIGUOUS,
        {"attention": "self", "sites": ["one.self", "two.self"]},
    ),
    "fewer sites than nameless attentions": ((None, None), ("one",), MISMATCH, {"sites": 1, "attentions": 2}),
    "more sites than nameless attentions": ((None,), ("one", "two"), MISMATCH, {"sites": 2, "attentions": 1}),
    "names that have nothing in common": (("one",), ("two", "three"), MISMATCH, {"sites": 2, "attentions": 1}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ambiguity_is_refused(case: str) -> None:
    scopes, sites, code, details = REFUSED[case]
    with pytest.raises(PlanError) as error:
        match_plan(Plan(sites=tuple(keeping(0, name=name) for name in sites)), find_attention(stack(*scopes)))
    assert (error.value.code, error.value.details) == (code, details)


@pytest.mark.parametrize("scope", ["one", None])
def test_other_heads_and_other_widths_are_refused(scope: str | None) -> None:
    for wrong in (site([0], name="one", heads=3), site([0], name="one", head_dim=4)):
        with pytest.raises(PlanError) as error:
            match_plan(Plan(sites=(wrong,)), find_attention(stack(scope)))
        assert error.value.code is MISMATCH
        assert error.value.details == {"site": "one", "attention": scope, "heads": 4, "head_dim": 3}


@pytest.mark.parametrize("scopes", [("one", "two"), (None, None)])
def test_a_shrunk_graph_is_recognized(scopes: tuple[str | None, ...]) -> None:
    plan = Plan(sites=(keeping(0, name="one"), keeping(1, 2, name="two")))
    shrunk = shrink_and_compare(stack(*scopes), plan).model
    with pytest.raises(PlanError) as error:
        match_plan(plan, find_attention(shrunk))
    assert error.value.code is GraphErrorCode.ALREADY_SHRUNK
    assert error.value.details == {"heads": [1, 2]}


def test_a_cross_attention_in_place_of_another_is_refused() -> None:
    cross = SitePlan("one", "cross", 4, 4, 3, (0,), ())
    with pytest.raises(PlanError) as error:
        match_plan(Plan(sites=(cross,)), find_attention(stack(None)))
    assert (error.value.code, error.value.details) == (MISMATCH, {"site": "one", "kind": "bidirectional"})


RENAME = "use a plan of the exported model, or name its sites as the graph does (compress sites GRAPH)"
EXPORT = "use a plan of this model, and a graph of compressor.export_reference, which names its sites"
MESSAGES = {
    "a site that is not in the graph": f"no attention of the graph (one, two) matches three of the plan; {RENAME}",
    "an attention that is not in the plan": "no site of the plan (one) matches two, three of the graph; list every"
    " attention in the plan, with all of its heads where none is dropped",
    "names of which some differ": "no attention of the graph matches three of the plan, and no site of the plan matches"
    f" two of the graph; {RENAME}",
    "names that have nothing in common": "the plan has 2 sites (two, three) and the graph 1 recognized attentions,"
    f" under other names (one); {RENAME}",
    "one site, two modules": f"site self matches several attentions of this graph, one.self, two.self; {EXPORT}",
    "more sites than nameless attentions": "the plan has 2 sites (one, two) and the graph 1 recognized attentions,"
    f" without names; {EXPORT}",
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_name_the_fault_its_cause_and_a_remedy(case: str) -> None:
    scopes, sites, *_ = REFUSED[case]
    with pytest.raises(PlanError) as error:
        match_plan(Plan(sites=tuple(keeping(0, name=name) for name in sites)), find_attention(stack(*scopes)))
    assert str(error.value) == MESSAGES[case]
