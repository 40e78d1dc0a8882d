"""Feed-forwards are paired with products by the values of their weights, by names, or as the only one of its size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import GraphErrorCode, NeuronPlan, Plan, PlanError, shrink
from graph_passes.attention.match_plan import match_feed_forwards
from graph_passes.weights import WeightRecord, fingerprint, match_weights
from tests.graph_passes.graphs import SIZES, assert_same, gated, graph

UNITS = 6
FORMS = {
    "MatMul": ("{y} = MatMul (r{n}, D{n})", "float[6, 8] D{n}"),
    "Transpose": ("d{n} = Transpose <perm = [1, 0]> (D{n}) {y} = MatMul (r{n}, d{n})", "float[8, 6] D{n}"),
    "FusedMatMul": ("{y} = com.microsoft.FusedMatMul <transB = 1> (r{n}, D{n})", "float[8, 6] D{n}"),
    "left": (
        "t{n} = Transpose <perm = [0, 2, 1]> (r{n}) p{n} = MatMul (D{n}, t{n})"
        " {y} = Transpose <perm = [0, 2, 1]> (p{n})",
        "float[8, 6] D{n}",
    ),
    "Gemm": (
        "f{n} = Reshape (r{n}, rows{n}) g{n} = Gemm <transB = 1> (f{n}, D{n})"
        " s{n} = Shape (x) {y} = Reshape (g{n}, s{n})",
        "float[8, 6] D{n}, int64[2] rows{n} = {{-1, 6}}",
    ),
}
"""Form of the down projection -> its nodes from `r` to `y`, and its weights."""


def stack(*forms: str, paths: Sequence[str] = ()) -> ir.Model:
    """Feed-forwards of 6 neurons in a row; `paths` are the module paths of their down projections."""
    body, weights = "", []
    for n, form in enumerate(forms):
        nodes, declared = FORMS[form]
        source, sum_ = ("x", "m0")[n > 0] if n < 2 else f"m{n - 1}", f"m{n}" if n + 1 < len(forms) else "y"
        body += f" u{n} = MatMul ({source}, U{n}) r{n} = Relu (u{n}) "
        body += nodes.format(n=n, y=f"e{n}") + f" {sum_} = Add (e{n}, {source})"
        weights += [f"float[8, 6] U{n}", declared.format(n=n)]
    model = graph(body, *weights)
    for n, path in enumerate(paths):
        for node in model.graph:
            if any(value is not None and value.name in (f"D{n}", f"d{n}") for value in node.inputs):
                node.name = f"/{path.replace('.', '/')}/{node.op_type}"
    return model


def keeping(name: str, *kept: int) -> NeuronPlan:
    return NeuronPlan(name, UNITS, kept, tuple(0.5 + unit for unit in kept))


def known(model: ir.Model, **weights: str) -> dict[str, WeightRecord]:
    """Records of parameters: name of the feed-forward -> initializer with its values."""
    records = {}
    for name, initializer in weights.items():
        value = model.graph.initializers[initializer].const_value
        assert value is not None
        content = value.numpy() if value.shape[0] == 8 else value.numpy().T
        records[f"{name}.weight"] = WeightRecord(fingerprint(content), fingerprint(content))
    return records


def pairs(model: ir.Model, names: Sequence[str], records: dict[str, WeightRecord]) -> list[tuple[str, str | None]]:
    matches = match_weights(model.graph, records)
    groups = [keeping(name, 0) for name in names]
    return [(group.name, product.weight.name) for group, product in match_feed_forwards(groups, model, matches)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", [(), (1, 4), range(UNITS)])
def test_a_feed_forward_is_cut_whatever_the_form_of_its_product(form: str, kept: Sequence[int]) -> None:
    model = stack(form, "MatMul", form)
    records = known(model, last="D2", first="D0")
    plan = Plan(groups=(keeping("last", *kept), keeping("first", 5)), weights=records)
    shrunk = shrink(model.clone(), plan)
    assert not shrunk.refused
    assert {removed.group: len(removed.units) for removed in shrunk.removed} == {
        name: count for name, count in (("last", UNITS - len(kept)), ("first", 5)) if count
    }
    named = stack(form, "MatMul", form, paths=["first", "middle", "last"])
    assert_same(shrunk.model, gated(named, plan), SIZES, 1e-5)


def test_values_decide_before_names() -> None:
    model = stack("MatMul", "Gemm", paths=["mlp.0", "mlp.1"])
    records = known(model, **{"mlp.0": "D1", "mlp.1": "D0"})
    assert pairs(model, ["mlp.0", "mlp.1"], records) == [("mlp.0", "D1"), ("mlp.1", "D0")]


def test_names_decide_where_values_are_unknown_or_repeated() -> None:
    model = stack("MatMul", "MatMul", paths=["model.mlp.0", "model.mlp.1"])
    assert pairs(model, ["mlp.1", "mlp.0"], {}) == [("mlp.1", "D1"), ("mlp.0", "D0")]
    initializers = model.graph.initializers
    initializers["D1"].const_value = initializers["D0"].const_value
    assert pairs(model, ["mlp.1"], known(model, **{"mlp.1": "D1"})) == [("mlp.1", "D1")]


def test_the_only_product_of_the_size_needs_neither() -> None:
    assert pairs(stack("MatMul"), ["mlp"], {}) == [("mlp", "D0")]


def test_a_module_that_is_called_twice_is_one_feed_forward() -> None:
    model = stack("MatMul", "MatMul", paths=["mlp", "mlp"])
    initializers = model.graph.initializers
    initializers["D1"].const_value = initializers["D0"].const_value
    assert pairs(model, ["mlp"], known(model, mlp="D0")) == [("mlp", "D0"), ("mlp", "D1")]


MISSING, AMBIGUOUS = GraphErrorCode.SITE_MISSING, GraphErrorCode.SITE_AMBIGUOUS


@pytest.mark.parametrize(
    ("paths", "names", "code"),
    [
        ((), ["mlp.0"], AMBIGUOUS),
        (("mlp.0", "mlp.1"), ["mlp.2"], MISSING),
        (("a.mlp", "b.mlp"), ["mlp"], AMBIGUOUS),
        (("mlp.0", "mlp.1"), ["mlp.0", "model.mlp.0"], AMBIGUOUS),
    ],
)
def test_a_product_is_never_guessed(paths: Sequence[str], names: Sequence[str], code: GraphErrorCode) -> None:
    with pytest.raises(PlanError) as error:
        pairs(stack("MatMul", "MatMul", paths=paths), names, {})
    assert (error.value.code, error.value.details["site"]) == (code, names[-1])


def test_equal_weights_without_names_are_ambiguous() -> None:
    model = stack("MatMul", "MatMul")
    model.graph.initializers["D1"].const_value = model.graph.initializers["D0"].const_value
    with pytest.raises(PlanError) as error:
        pairs(model, ["mlp"], known(model, mlp="D0"))
    assert error.value.code is AMBIGUOUS
    assert all(name in str(error.value) for name in ("D0", "D1"))


def test_a_product_of_another_size_is_not_the_feed_forward() -> None:
    model = stack("MatMul")
    with pytest.raises(PlanError) as error:
        match_feed_forwards([NeuronPlan("mlp", 5, (0,))], model, {})
    assert error.value.code is MISSING
    assert np.isin("D0", list(model.graph.initializers))
