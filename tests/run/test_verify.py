"""Proofs hold where the stages agree, and say by how much they differ where they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import MismatchError
from compressor.run.verify import Case, cases, prove_engine, prove_export, prove_shrunk, require
from compressor.targets.onnxruntime.engine import build_engine
from graph_passes import load, save
from tests.reports import dense
from tests.targets.graphs import Pruned, parsed, pruned
from tests.zoo import text


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


TRIED = cases(lambda batch, seq, seed: text(batch, seq, seed))


def test_cases_differ_in_size_and_padding() -> None:
    assert [case.name for case in TRIED] == [
        "batch 1, length 5, padded",
        "batch 2, length 17, padded",
        "batch 3, length 32, padded",
    ]
    short = cases(lambda batch, seq, seed: text(batch, seq, seed), longest=9)
    assert [case.feeds["input_ids"].shape for case in short] == [(1, 5), (2, 9), (3, 9)]
    fixed = cases(lambda batch, seq, seed: text(2, 4, seed))
    assert [case.name for case in fixed] == ["batch 2, length 4, padded"]


def test_every_stage_of_an_honest_run_holds(bert: Pruned, tmp_path: Path) -> None:
    engine = build_engine(bert.shrunk, tmp_path / "engine.onnx", provider="cpu", threads=1)
    proofs = [
        prove_export(bert.model, bert.plan, bert.reference, TRIED, "compressed", attention="eager"),
        prove_shrunk(bert.reference, bert.shrunk, TRIED, "compressed"),
        prove_engine(bert.shrunk, engine, TRIED, "compressed"),
    ]
    assert [proof.stage for proof in proofs] == [
        "gated model = reference graph",
        "reference graph = shrunk graph",
        "shrunk graph = engine",
    ]
    for proof in proofs:
        assert require(proof) is proof
        assert 0 < proof.error < 1e-5
        assert proof.tolerance == 1e-4
        assert proof.cases == tuple(case.name for case in TRIED)


def test_a_quantized_graph_may_round_otherwise(tmp_path: Path) -> None:
    body = "q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)"
    save(parsed(body, "float[B] x", "float[B] y", "float s = {0.5}, int8 z = {0}"), tmp_path / "graph.onnx")
    engine = build_engine(tmp_path / "graph.onnx", tmp_path / "engine.onnx", provider="cpu", threads=1)
    tried = (Case({"x": np.arange(4, dtype=np.float32)}, "batch 4"),)
    assert prove_engine(tmp_path / "graph.onnx", engine, tried, "dense").tolerance == 2e-2


def test_the_plan_of_other_heads_does_not_hold(bert: Pruned) -> None:
    proof = prove_export(bert.model, dense(bert.plan), bert.reference, TRIED, "dense", attention="eager")
    assert not proof.holds
    with pytest.raises(MismatchError, match=r"dense: gated model = reference graph .* relative error \d.*0\.0001"):
        require(proof)


def nudge(weights: np.ndarray) -> np.ndarray:
    return weights * 1.01


def spoil(weights: np.ndarray) -> np.ndarray:
    spoilt = weights.copy()
    spoilt.flat[0] = np.nan
    return spoilt


@pytest.mark.parametrize(("change", "low", "high"), [(nudge, 1e-4, 1.0), (spoil, np.inf, np.inf)])
def test_a_changed_weight_is_noticed(
    change: Callable[[np.ndarray], np.ndarray], low: float, high: float, bert: Pruned, tmp_path: Path
) -> None:
    model = load(bert.shrunk)
    weight = model.graph.initializers["classifier.weight"]
    assert weight.const_value is not None
    weight.const_value = ir.tensor(change(weight.const_value.numpy()))
    save(model, tmp_path / "changed.onnx")
    proof = prove_shrunk(bert.reference, tmp_path / "changed.onnx", TRIED, "compressed")
    assert low <= proof.error <= high
    assert not proof.holds


def test_an_output_that_nobody_expects_is_named(tmp_path: Path) -> None:
    one, other = tmp_path / "one.onnx", tmp_path / "other.onnx"
    save(parsed("y = Relu(x)", "float[B, S] x", "float[B, S] y"), one)
    save(parsed("z = Relu(x)", "float[B, S] x", "float[B, S] z"), other)
    case = Case({"x": np.ones((1, 2), np.float32)}, "one")
    with pytest.raises(MismatchError, match="there is an output z, where y were expected"):
        prove_shrunk(one, other, [case], "dense")
