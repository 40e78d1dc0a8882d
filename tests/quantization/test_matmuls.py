"""Each quantized product can be computed by itself; a runtime that computes one wrongly is found out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from compressor.engines.prove import Case, prove_products, require
from compressor.errors import ErrorCode, MismatchError
from compressor.quantization import quantize_graph
from compressor.quantization.matmuls import activations_graph, matmuls_graph
from compressor.results import ProofStage
from compressor.targets import Engine, Feeds, target
from compressor.targets.graph_facts import quantized_matmuls
from graph_passes import load, save
from tests.quantization import prove_openvino
from tests.quantization.graphs import Quantized, calibration_rows, needs_nncf, quantized, run, two_products, vectors
from tests.targets.cpu import needs_vnni
from tests.targets.engines import FakeEngine

pytestmark = needs_nncf


@pytest.fixture(scope="module")
def bert() -> Quantized:
    return quantized()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized graph of two products, `first` and `second`."""
    folder = tmp_path_factory.mktemp("small")
    save(two_products(), folder / "model.onnx")
    return quantize_graph(folder / "model.onnx", vectors(), folder / "int8.onnx").path


CASES = tuple(Case(feeds, f"row {number}") for number, feeds in enumerate(vectors()))


class AlteredEngine(FakeEngine):
    """An engine that computes a graph without optimizations, and alters one of its outputs.

    Args:
        graph: the graph.
        alter: changes an output.
        index: number of the output.
    """

    def __init__(self, graph: Path, alter: Callable[[np.ndarray], np.ndarray], index: int) -> None:
        super().__init__(precision="int8")
        self._graph, self._alter, self._index = graph, alter, index

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """The outputs, one of them altered."""
        outputs = run(self._graph, feeds)
        name = list(outputs)[self._index]
        return {**outputs, name: self._alter(outputs[name])}


def saturate(output: np.ndarray) -> np.ndarray:
    """The output of an accumulator that is too narrow for the largest sums."""
    limit = 0.7 * np.abs(output).max()
    return np.clip(output, -limit, limit)


def miss_one_value(output: np.ndarray) -> np.ndarray:
    """An output with an error in one value."""
    altered = output.copy()
    altered.flat[-1] += 0.05 * np.abs(output).max()
    return altered


def round_to_a_thousandth(output: np.ndarray) -> np.ndarray:
    """An output rounded to a thousandth of its largest value."""
    step = np.abs(output).max() / 1000
    return np.asarray(np.round(output / step) * step, output.dtype)


def whole_graph(graph: Path, out: Path) -> Path:
    """A quantized graph whose outputs are those of its products."""
    model = load(graph)
    model.graph.outputs[:] = [node.outputs[0] for node in quantized_matmuls(model)]
    save(model, out)
    return out


@pytest.mark.parametrize("name", ["bert", "small"])
def test_products_compute_what_they_compute_in_the_whole_graph(
    name: str, tmp_path: Path, bert: Quantized, small: Path
) -> None:
    path, cases = (bert.path, bert.cases) if name == "bert" else (small, CASES)
    save(activations_graph(load(path)), tmp_path / "activations.onnx")
    save(matmuls_graph(load(path)), tmp_path / "products.onnx")
    whole = whole_graph(path, tmp_path / "whole.onnx")
    for case in cases:
        expected = run(whole, case.feeds)
        outputs = run(tmp_path / "products.onnx", run(tmp_path / "activations.onnx", case.feeds))
        assert list(outputs) == [f"product:{name}" for name in expected]
        assert len(outputs) == len(quantized_matmuls(load(path)))
        for product, output in outputs.items():
            np.testing.assert_allclose(output, expected[product.removeprefix("product:")], rtol=1e-6, atol=1e-6)


def test_products_are_alone_with_their_quantizers(bert: Quantized, tmp_path: Path) -> None:
    model = load(bert.path)
    products = matmuls_graph(model)
    kinds = {node.op_type for node in products.graph}
    assert kinds == {"QuantizeLinear", "DequantizeLinear", "MatMul", "Gemm"}
    names = [node.name for node in quantized_matmuls(products)]
    assert sorted(map(str, names)) == sorted(bert.graph.products)
    assert [value.name for value in products.graph.outputs] == [
        f"product:{node.outputs[0].name}" for node in quantized_matmuls(model)
    ]
    save(products, tmp_path / "products.onnx")
    onnx.checker.check_model(str(tmp_path / "products.onnx"), full_check=True)


def test_activations_are_the_inputs_of_the_products(bert: Quantized) -> None:
    activations, products = (
        activations_graph(load(bert.path)).graph.outputs,
        matmuls_graph(load(bert.path)).graph.inputs,
    )
    assert [(value.name, value.shape) for value in activations] == [(value.name, value.shape) for value in products]
    # The projections of queries, keys and values read the same tensor.
    assert len(products) < len(bert.graph.products)


def test_the_quantized_graph_stays(bert: Quantized) -> None:
    model = load(bert.path)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    matmuls_graph(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_products_that_stay_in_floats_are_left_out(tmp_path: Path) -> None:
    save(two_products(), tmp_path / "model.onnx")
    graph = quantize_graph(tmp_path / "model.onnx", vectors(), tmp_path / "int8.onnx", keep_float=("first",))
    products = matmuls_graph(load(graph.path)).graph
    assert [node.name for node in products if node.op_type == "MatMul"] == ["second"]


@needs_vnni
@pytest.mark.parametrize(("name", "file"), [("openvino", "engine.xml"), ("ort", "engine.onnx")])
def test_the_products_of_a_runtime_are_proven(name: str, file: str, bert: Quantized, tmp_path: Path) -> None:
    def build(graph: Path, feeds: Sequence[Feeds]) -> Engine:
        return target(name).build(graph, tmp_path / file, precision="int8", provider="cpu", threads=1)

    proof = require(prove_products(bert.path, build, bert.cases, "compressed"))
    assert (proof.stage, proof.variant) == (ProofStage.PRODUCTS, "compressed")
    assert proof.cases == tuple(case.name for case in bert.cases)


def prove_without_vnni(graph: Path, feeds: Feeds, folder: Path) -> dict[str, Any]:
    """The proof of the products on OpenVINO, in a process whose products have 16-bit sums."""
    inputs: dict[str, Any] = dict(feeds)
    np.savez(folder / "inputs.npz", **inputs)
    printed = subprocess.run(
        [sys.executable, "-m", prove_openvino.__name__, graph, folder / "inputs.npz"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    proof: dict[str, Any] = json.loads(printed)
    return proof


@needs_vnni
def test_a_runtime_that_saturates_is_found_out(bert: Quantized, tmp_path: Path) -> None:
    proof = prove_without_vnni(bert.path, bert.cases[-1].feeds, tmp_path)
    assert not proof["holds"]
    assert proof["error"] > 0.1
    assert set(proof["failing"]) <= {node.name for node in quantized_matmuls(load(bert.path))}
    assert proof["failing"]


@pytest.mark.zoo
def test_a_reduced_range_does_not_saturate(bert: Quantized, tmp_path: Path) -> None:
    graph = tmp_path / "reduced.onnx"
    quantize_graph(bert.source, calibration_rows(), graph, reduce_range=True)
    assert prove_without_vnni(graph, bert.cases[-1].feeds, tmp_path)["holds"]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("alter", [saturate, miss_one_value])
def test_a_product_that_is_computed_wrongly_is_found_out(
    alter: Callable[[np.ndarray], np.ndarray], index: int, small: Path
) -> None:
    proof = prove_products(small, lambda graph, _: AlteredEngine(graph, alter, index), CASES, "dense")
    assert not proof.holds
    with pytest.raises(MismatchError) as caught:
        require(proof)
    assert caught.value.code is ErrorCode.NUMBERS_DIFFER
    assert caught.value.details["stage"] is ProofStage.PRODUCTS


def test_a_product_may_round(small: Path) -> None:
    proof = prove_products(small, lambda graph, _: AlteredEngine(graph, round_to_a_thousandth, 1), CASES, "dense")
    assert proof.holds
    assert proof.error > 1e-4
