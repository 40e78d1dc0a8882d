"""Refitted weights replace the original ones in the layout and type of the graph, or nothing changes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graph_passes import GraphErrorCode, PlanError
from graph_passes.passes import TransferWeights
from graph_passes.weights import WeightRecord, fingerprint, match_weights
from tests.graph_passes.graphs import graph, run
from tests.graph_passes.passes.checks import assert_untouched

RNG = np.random.default_rng(1)
ORIGINAL = {"up": RNG.normal(size=(6, 8)).astype(np.float32), "bias": RNG.normal(size=8).astype(np.float32)}
FITTED = {name: (content + RNG.normal(size=content.shape)).astype(np.float32) for name, content in ORIGINAL.items()}
RECORDS = {name: WeightRecord(fingerprint(ORIGINAL[name]), fingerprint(FITTED[name])) for name in ORIGINAL}
X = RNG.normal(size=(2, 5, 8)).astype(np.float32)


def model_with(contents: Mapping[str, np.ndarray], dtype: type = np.float32) -> ir.Model:
    """`(x W) W^T + b`, the weight stored as `[8, 6]`."""
    name = "float16" if dtype is np.float16 else "float"
    model = graph(
        "h = MatMul (x, W) V = Transpose <perm = [1, 0]> (W) e = MatMul (h, V) y = Add (e, b)",
        f"{name}[8, 6] W",
        f"{name}[8] b",
        inputs=f"{name}[B, S, 8] x",
        outputs=f"{name}[B, S, 8] y",
    )
    for initializer, content in (("W", contents["up"].T), ("b", contents["bias"])):
        value = model.graph.initializers[initializer]
        value.const_value = ir.tensor(np.ascontiguousarray(content.astype(dtype)), name=initializer)
    return model


def transfer(model: ir.Model, weights: dict[str, np.ndarray] | None) -> TransferWeights:
    return TransferWeights(RECORDS, match_weights(model.graph, RECORDS), weights)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_graph_computes_with_the_fitted_weights(dtype: type) -> None:
    model = model_with(ORIGINAL, dtype)
    result = transfer(model, FITTED)(model)
    assert result.report == ("up", "bias")
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    feeds: dict[str, np.ndarray] = {"x": X.astype(dtype)}
    np.testing.assert_array_equal(run(result.model, feeds)[0], run(model_with(FITTED, dtype), feeds)[0])
    assert_untouched(transfer(result.model, FITTED), result.model)


def test_a_graph_with_the_fitted_weights_needs_no_others() -> None:
    model = model_with(FITTED)
    assert assert_untouched(transfer(model, None), model) == ()
    mixed = model_with({**FITTED, "bias": ORIGINAL["bias"]})
    assert transfer(mixed, FITTED)(mixed).report == ("bias",)


@pytest.mark.parametrize(
    ("weights", "code"),
    [
        (None, GraphErrorCode.WEIGHTS_MISSING),
        ({"up": FITTED["up"]}, GraphErrorCode.WEIGHTS_MISSING),
        (ORIGINAL, GraphErrorCode.MODEL_MISMATCH),
        ({**FITTED, "bias": FITTED["bias"][:4]}, GraphErrorCode.MODEL_MISMATCH),
    ],
)
def test_weights_that_are_missing_or_others_leave_the_graph_as_it_is(
    weights: dict[str, np.ndarray] | None, code: GraphErrorCode
) -> None:
    model = model_with(ORIGINAL)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(PlanError) as error:
        transfer(model, weights)(model)
    assert error.value.code is code
    assert error.value.details["parameter"] in RECORDS
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
