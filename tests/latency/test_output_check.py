"""Outputs are compared with the expected ones: every fault names model, output and batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import CompressorError, ErrorCode, InputError, MismatchError
from compressor.latency.output_check import ExpectedOutputs, check_finite, expected_outputs
from compressor.targets.onnxruntime.ort_session import open_session, run_session, session_settings
from tests.latency.endpoint import FunctionEndpoint
from tests.latency.graphs import softmax_graph

BATCHES = [{"x": np.random.default_rng(number).normal(size=(2, 4)).astype(np.float32)} for number in range(3)]
BASELINE = [{"y": batch["x"] * 2} for batch in BATCHES]


def expected(expect: str | None = "baseline", tolerance: float | None = None, **fields: Any) -> ExpectedOutputs:
    return expected_outputs(FunctionEndpoint(**fields), BATCHES, BASELINE, expect, tolerance)


@settings(deadline=None, max_examples=30)
@given(st.floats(0, 0.1), st.sampled_from([None, 0.0, 1e-3, 0.02]))
def test_an_error_within_the_tolerance_is_reported_and_a_larger_one_is_refused(
    error: float, tolerance: float | None
) -> None:
    outputs = [{"y": (y["y"] * (1 + error)).astype(np.float32)} for y in BASELINE]
    limit = 1e-4 if tolerance is None else tolerance
    a, b = (np.stack([batch["y"] for batch in batches]).astype(float) for batches in (outputs, BASELINE))
    actual = float(np.abs(a - b).max() / np.abs(b).max())
    comparison = expected(tolerance=tolerance)
    if actual <= limit:
        agreement = comparison.compare("small", outputs)
        assert agreement.error == pytest.approx(actual)
        assert (agreement.expected, agreement.tolerance, agreement.batches) == ("the baseline", limit, 3)
    else:
        with pytest.raises(MismatchError) as refused:
            comparison.compare("small", outputs)
        assert refused.value.code is ErrorCode.OUTPUTS_DIFFER
        assert refused.value.details["error"] == pytest.approx(actual)


Damage = Callable[[np.ndarray], np.ndarray]
DAMAGES: list[tuple[Damage, ErrorCode]] = [
    (lambda y: y[:, :0], ErrorCode.TENSOR_MISMATCH),
    (lambda y: np.where(y > 0, y, np.nan), ErrorCode.NOT_FINITE),
    (lambda y: np.where(y > 0, y, np.inf), ErrorCode.NOT_FINITE),
]


@pytest.mark.parametrize("expect", ["baseline", "any"])
@pytest.mark.parametrize(("damage", "code"), DAMAGES)
def test_invalid_outputs_are_refused(damage: Damage, code: ErrorCode, expect: str) -> None:
    outputs = [*BASELINE[:2], {"y": damage(BASELINE[2]["y"])}]
    with pytest.raises(MismatchError) as error:
        expected(expect).compare("small", outputs)
    details = error.value.details
    assert (error.value.code, details["model"], details["tensor"], details["batch"]) == (code, "small", "y", 2)


@pytest.mark.parametrize("expect", ["baseline", "any"])
def test_a_model_without_outputs_is_refused(expect: str) -> None:
    with pytest.raises(MismatchError) as error:
        expected(expect).compare("small", [{}, {}, {}])
    assert (error.value.code, error.value.details["batch"]) == (ErrorCode.TENSOR_MISMATCH, 0)


def test_an_output_that_is_missing_is_named() -> None:
    renamed = [{"z": batch["y"]} for batch in BASELINE]
    with pytest.raises(MismatchError) as error:
        expected().compare("small", renamed)
    assert (error.value.code, error.value.details["tensors"]) == (ErrorCode.TENSOR_MISMATCH, ("y",))
    with pytest.raises(MismatchError) as error:
        expected("any").compare("small", renamed)
    assert (error.value.code, error.value.details["tensor"], error.value.details["shape"]) == (
        *(ErrorCode.TENSOR_MISMATCH, "y", None),
    )


def test_any_compares_only_shapes_and_types() -> None:
    agreement = expected("any").compare("small", [{"y": batch["y"] + 1} for batch in BASELINE])
    assert (agreement.error, agreement.expected) == (None, "any")
    for damage in (lambda y: y[:, :2], lambda y: y.astype(np.float64)):
        with pytest.raises(MismatchError) as error:
            expected("any").compare("small", [{"y": damage(batch["y"])} for batch in BASELINE])
        assert (error.value.code, error.value.details["expected"]) == (ErrorCode.TENSOR_MISMATCH, (2, 4))


def test_another_shape_is_an_infinite_error() -> None:
    with pytest.raises(MismatchError) as error:
        expected().compare("small", [{"y": batch["y"][:, :2]} for batch in BASELINE])
    assert (error.value.code, error.value.details["error"]) == (ErrorCode.OUTPUTS_DIFFER, float("inf"))


def test_integers_must_be_equal() -> None:
    baseline = [{"y": np.array([[10_000, 20_000]])} for _ in BATCHES]
    near = [{"y": np.array([[10_001, 20_000]])} for _ in BATCHES]
    endpoint = FunctionEndpoint()
    exact = expected_outputs(endpoint, BATCHES, baseline, "baseline", None)
    assert exact.compare("small", baseline).error == 0.0
    with pytest.raises(MismatchError) as error:
        exact.compare("small", near)
    assert (error.value.code, error.value.details["tolerance"]) == (ErrorCode.OUTPUTS_DIFFER, 0.0)
    assert expected_outputs(endpoint, BATCHES, baseline, "baseline", 1e-3).compare("small", near).error == 5e-5


def test_texts_must_be_equal() -> None:
    texts = np.array([["yes", b"\xff"]], np.object_)
    comparison = expected_outputs(FunctionEndpoint(), BATCHES, [{"y": texts}] * 3, "baseline", None)
    assert comparison.compare("small", [{"y": texts}] * 3).error == 0.0
    with pytest.raises(MismatchError):
        comparison.compare("small", [{"y": texts[:, ::-1]}] * 3)


def test_the_tolerance_depends_on_the_precision() -> None:
    assert [expected(precision=precision).tolerance for precision in ("fp32", "fp16")] == [1e-4, 2e-2]


def test_expected_outputs_are_read_from_a_graph_or_a_file(tmp_path: Path) -> None:
    graph = softmax_graph(tmp_path / "model.onnx")
    session = open_session(graph, session_settings("cpu", 1))
    outputs = [run_session(session, batch) for batch in BATCHES]
    np.savez(tmp_path / "outputs.npz", y=np.concatenate([batch["y"] for batch in outputs]))
    for expect in (graph, tmp_path, tmp_path / "outputs.npz"):
        agreement = expected(str(expect)).compare("small", outputs)
        assert (agreement.expected, agreement.batches) == (str(expect), 3)
        assert agreement.error is not None
        assert agreement.error <= 1e-6


def test_unreadable_expected_outputs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.npz").write_bytes(b"PK")
    np.savez(tmp_path / "few.npz", y=np.zeros((3, 4)))
    np.savez(tmp_path / "empty.npz")
    np.savez(tmp_path / "single.npz", y=np.float32(1))
    graph = softmax_graph(tmp_path / "graph.onnx")
    graph.write_bytes(graph.read_bytes()[:20])
    for name, code in {
        "torn.npz": ErrorCode.FILE_UNREADABLE,
        "few.npz": ErrorCode.TOO_FEW_ROWS,
        "empty.npz": ErrorCode.INVALID_VALUE,
        "single.npz": ErrorCode.INVALID_VALUE,
        "nowhere": ErrorCode.FILE_MISSING,
    }.items():
        with pytest.raises(InputError) as error:
            expected(str(tmp_path / name))
        assert error.value.code is code
    with pytest.raises(CompressorError):
        expected(str(graph))


@pytest.mark.parametrize("outputs", [{"y": np.ones(3)}, {"y": np.ones(3), "z": np.array(["text"], np.object_)}])
def test_finite_outputs_pass(outputs: dict[str, np.ndarray]) -> None:
    check_finite("small", 0, outputs)
