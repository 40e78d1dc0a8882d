"""Parameters are paired with initializers by their values, and by names where several have the same values."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import GraphErrorCode, PlanError
from graph_passes.weights import WeightRecord, fingerprint, match_weights

RNG = np.random.default_rng(0)
A, B, C = (RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(3))
WIDE = RNG.normal(size=(2, 6)).astype(np.float32)
SYMMETRIC = A + A.T


def graph_of(**initializers: np.ndarray) -> ir.Graph:
    values = [
        ir.Value(name=name, const_value=ir.tensor(np.ascontiguousarray(content)), shape=ir.Shape(content.shape))
        for name, content in initializers.items()
    ]
    return ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 18})


def record(original: np.ndarray, fitted: np.ndarray | None = None) -> WeightRecord:
    return WeightRecord(fingerprint(original), fingerprint(original if fitted is None else fitted))


def held(graph: ir.Graph, **records: WeightRecord) -> dict[str, list[tuple[str | None, bool, bool]]]:
    """Name of a parameter -> (initializer, whether it is transposed, whether its values are the fitted ones)."""
    return {
        name: [(stored.value.name, stored.transposed, False) for stored in match.original]
        + [(stored.value.name, stored.transposed, True) for stored in match.fitted]
        for name, match in match_weights(graph, records).items()
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_values_decide_and_not_names(dtype: type) -> None:
    graph = graph_of(a=B.astype(dtype), b=A.T.astype(dtype), c=WIDE.T.astype(dtype), d=SYMMETRIC.astype(dtype))
    matches = held(graph, a=record(A), b=record(B, C), wide=record(WIDE), symmetric=record(SYMMETRIC))
    assert matches == {
        "a": [("b", True, True)],
        "b": [("a", False, False)],
        "wide": [("c", True, True)],
        "symmetric": [("d", False, True)],
    }


def test_copies_and_tied_parameters_are_one() -> None:
    graph = graph_of(first=A, second=A.T)
    both = [("first", False, False), ("second", True, False)]
    assert held(graph, one=record(A, B), tied=record(A, B)) == {"one": both, "tied": both}


def test_names_decide_between_parameters_that_were_equal() -> None:
    zeros = np.zeros(4, np.float32)
    records = {"layer.0.bias": record(zeros, A[0]), "layer.1.bias": record(zeros, A[1]), "norm.bias": record(zeros)}
    names = ("model.layer.0.bias", "model.layer.1.bias", "model.norm.bias")
    matches = match_weights(graph_of(**dict.fromkeys(names, zeros)), records)
    assert {name: [stored.value.name for stored in match.original] for name, match in matches.items()} == {
        "layer.0.bias": [names[0]],
        "layer.1.bias": [names[1]],
        "norm.bias": [],
    }
    for graph in (graph_of(x=zeros, y=zeros, z=zeros), graph_of(**{names[0]: zeros})):
        with pytest.raises(PlanError) as error:
            match_weights(graph, records)
        assert error.value.code is GraphErrorCode.SITE_AMBIGUOUS
        assert error.value.details["parameters"] == list(records)
    fitted = match_weights(graph_of(x=A[0], y=A[1], z=zeros), records)
    assert not any(match.original for match in fitted.values())


def test_other_values_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        held(graph_of(a=A, b=B), a=record(A), b=record(C, WIDE))
    assert (error.value.code, error.value.details) == (GraphErrorCode.MODEL_MISMATCH, {"parameter": "b"})
