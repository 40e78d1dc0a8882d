"""Proofs hold if two products agree, and report the error if they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import pytest

from compressor.engines.prove import Case, make_cases, prove_engine, prove_shrunk, require
from compressor.engines.prove_export import prove_export
from compressor.errors import ErrorCode, MismatchError
from compressor.results import Proof, ProofStage
from compressor.targets.onnxruntime.engine import build_engine
from graph_passes import load, save
from tests.faults import fails_with
from tests.report.reports import FLOAT_STAGES, dense
from tests.targets.graphs import Pruned, parsed, pruned
from tests.zoo import text


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


CASES = make_cases(lambda batch, seq, seed: text(batch, seq, seed))


def test_cases_differ_in_size_and_padding() -> None:
    assert [case.name for case in CASES] == [
        "batch 1, length 5, padded",
        "batch 2, length 17, padded",
        "batch 3, length 32, padded",
    ]
    short = make_cases(lambda batch, seq, seed: text(batch, seq, seed), maximum_length=9)
    assert [case.feeds["input_ids"].shape for case in short] == [(1, 5), (2, 9), (3, 9)]
    fixed = make_cases(lambda batch, seq, seed: text(2, 4, seed))
    assert [case.name for case in fixed] == ["batch 2, length 4, padded"]


def test_every_proof_of_a_correct_run_holds(bert: Pruned, tmp_path: Path) -> None:
    engine = build_engine(bert.shrunk, tmp_path / "engine.onnx", provider="cpu", threads=1)
    proofs = [
        prove_export(bert.model, bert.plan, bert.reference, CASES, "compressed", attention="eager"),
        prove_shrunk(bert.reference, bert.shrunk, CASES, "compressed"),
        prove_engine(bert.shrunk, engine, CASES, "compressed"),
    ]
    assert [proof.stage for proof in proofs] == list(FLOAT_STAGES)
    for proof in proofs:
        assert require(proof) is proof
        assert 0 < proof.error < 1e-5
        assert proof.tolerance == 1e-4
        assert proof.cases == tuple(case.name for case in CASES)


def renamed(bert: Pruned, output: str, path: Path) -> Path:
    """The reference graph with another name of its output."""
    graph = load(bert.reference)
    graph.graph.outputs[0].name = output
    save(graph, path)
    return path


def test_a_model_that_returns_a_tensor_is_compared(
    bert: Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = renamed(bert, "output", tmp_path / "reference.onnx")  # the exporter's name for it
    family, forward = type(bert.model), type(bert.model).forward
    monkeypatch.setattr(family, "forward", lambda model, **inputs: forward(model, **inputs).logits)
    assert prove_export(bert.model, bert.plan, graph, CASES, "compressed", attention="eager").holds
    assert not prove_export(bert.model, dense(bert.plan), graph, CASES, "dense", attention="eager").holds


def test_outputs_in_sequences_are_compared(bert: Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = renamed(bert, "maps.1", tmp_path / "reference.onnx")
    family, forward = type(bert.model), type(bert.model).forward

    def in_sequence(shift: float) -> Callable[..., dict[str, Any]]:
        return lambda model, **inputs: {"maps": ((), forward(model, **inputs).logits + shift)}

    for shift in (0.0, 0.1):
        monkeypatch.setattr(family, "forward", in_sequence(shift))
        proof = prove_export(bert.model, bert.plan, graph, CASES, "compressed", attention="eager")
        assert proof.holds == (not shift)


def test_a_quantized_graph_may_round(tmp_path: Path) -> None:
    body = "q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)"
    save(parsed(body, "float[B] x", "float[B] y", "float s = {0.5}, int8 z = {0}"), tmp_path / "graph.onnx")
    engine = build_engine(tmp_path / "graph.onnx", tmp_path / "engine.onnx", provider="cpu", threads=1)
    cases = (Case({"x": np.arange(4, dtype=np.float32)}, "batch 4"),)
    assert prove_engine(tmp_path / "graph.onnx", engine, cases, "dense").tolerance == 2e-2


def test_a_batch_whose_outputs_are_small_may_round_as_much_as_others(tmp_path: Path) -> None:
    body = "q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)"
    save(parsed(body, "float[B] x", "float[B] y", "float s = {0.5}, int8 z = {0}"), tmp_path / "graph.onnx")

    def prove(shift: float) -> Proof:
        run = SimpleNamespace(precision="int8", run=lambda feeds: {"y": feeds["x"] + np.float32(shift)})
        cases = [Case({"x": np.array(values, np.float32)}, "") for values in ([-20, 10], [0.5])]
        return prove_engine(tmp_path / "graph.onnx", cast(Any, run), cases, "compressed")

    assert prove(0.5).holds
    assert not prove(5.0).holds


def test_a_proof_with_the_plan_of_other_heads_fails(bert: Pruned) -> None:
    proof = prove_export(bert.model, dense(bert.plan), bert.reference, CASES, "dense", attention="eager")
    assert not proof.holds
    with pytest.raises(MismatchError) as caught:
        require(proof)
    assert caught.value.code is ErrorCode.NUMBERS_DIFFER
    assert proof.failing == ("logits",)
    assert caught.value.details == {
        "variant": "dense",
        "stage": ProofStage.EXPORT,
        "error": proof.error,
        "outputs": proof.failing,
    }


def test_a_graph_of_a_single_size_is_refused_by_the_name_of_the_family(bert: Pruned, tmp_path: Path) -> None:
    graph = load(bert.reference)
    for value in graph.graph.inputs:
        value.shape = ir.Shape([2, 17])
    save(graph, tmp_path / "fixed.onnx")
    with fails_with(ErrorCode.EXPORT_FAILED, family="bert"):
        prove_export(bert.model, bert.plan, tmp_path / "fixed.onnx", CASES, "compressed", attention="eager")


def nudge(weights: np.ndarray) -> np.ndarray:
    return weights * 1.01


def damage(weights: np.ndarray) -> np.ndarray:
    damaged = weights.copy()
    damaged.flat[0] = np.nan
    return damaged


@pytest.mark.parametrize(("change", "low", "high"), [(nudge, 1e-4, 1.0), (damage, np.inf, np.inf)])
def test_a_changed_weight_is_detected(
    change: Callable[[np.ndarray], np.ndarray], low: float, high: float, bert: Pruned, tmp_path: Path
) -> None:
    model = load(bert.shrunk)
    weight = model.graph.initializers["classifier.weight"]
    assert weight.const_value is not None
    weight.const_value = ir.tensor(change(weight.const_value.numpy()))
    save(model, tmp_path / "changed.onnx")
    proof = prove_shrunk(bert.reference, tmp_path / "changed.onnx", CASES, "compressed")
    assert low <= proof.error <= high
    assert not proof.holds


def test_an_unexpected_output_is_named(tmp_path: Path) -> None:
    reference, changed = tmp_path / "reference.onnx", tmp_path / "changed.onnx"
    save(parsed("y = Relu(x)", "float[B, S] x", "float[B, S] y"), reference)
    save(parsed("z = Relu(x)", "float[B, S] x", "float[B, S] z"), changed)
    case = Case({"x": np.ones((1, 2), np.float32)}, "batch 1, length 2")
    with pytest.raises(MismatchError, match="output z, expected y") as caught:
        prove_shrunk(reference, changed, [case], "dense")
    assert caught.value.code is ErrorCode.OUTPUTS_DIFFER
