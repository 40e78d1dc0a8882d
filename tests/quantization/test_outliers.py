"""Products whose activations have outliers are named; those without are left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor.quantization import quantize_graph, quantize_without_ruined, ruined_matmuls
from compressor.targets import Feeds
from compressor.targets.graph_facts import quantized_matmuls
from graph_passes import load, save
from tests.quantization.graphs import calibration_rows, needs_nncf, quantized, run, two_products, vectors

pytestmark = needs_nncf


def with_outlier(rows: list[Feeds], size: float) -> list[Feeds]:
    """Rows whose first position has one value of this size; another position is like the others."""
    return [{"x": np.where(np.eye(3, 6) * [[1], [0], [0]], np.float32(size), feeds["x"])} for feeds in rows]


def quantized_file(folder: Path, rows: list[Feeds]) -> Path:
    save(two_products(), folder / "model.onnx")
    return quantize_graph(folder / "model.onnx", rows, folder / "model.int8.onnx").path


@pytest.mark.parametrize(
    ("size", "expected"), [pytest.param(1.0, (), marks=pytest.mark.zoo), (1e5, ("first", "second"))]
)
def test_an_outlier_ruins_every_product_that_it_reaches(size: float, expected: tuple[str, ...], tmp_path: Path) -> None:
    rows = with_outlier(vectors(), size)
    path = quantized_file(tmp_path, rows)
    before = path.read_bytes()
    assert ruined_matmuls(path, rows) == expected
    assert path.read_bytes() == before


def test_ruined_products_stay_in_floats(tmp_path: Path) -> None:
    rows = with_outlier(vectors(), 1e5)
    save(two_products(), tmp_path / "model.onnx")
    graph = quantize_without_ruined(tmp_path / "model.onnx", rows, tmp_path / "model.int8.onnx")
    assert (graph.products, graph.in_float, graph.ruined) == ((), (), ("first", "second"))
    assert quantized_matmuls(load(graph.path)) == []
    expected, output = (run(path, rows[0])["y"] for path in (tmp_path / "model.onnx", graph.path))
    np.testing.assert_allclose(output[1:], expected[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.zoo
def test_a_graph_without_outliers_is_quantized_once(tmp_path: Path) -> None:
    save(two_products(), tmp_path / "model.onnx")
    graphs = [
        quantize(tmp_path / "model.onnx", vectors(), tmp_path / f"{quantize.__name__}.onnx")
        for quantize in (quantize_graph, quantize_without_ruined)
    ]
    assert [graph.products for graph in graphs] == [("first", "second")] * 2
    assert graphs[0].path.read_bytes() == graphs[1].path.read_bytes()


def test_a_usual_model_has_no_ruined_products() -> None:
    assert ruined_matmuls(quantized().path, calibration_rows()) == ()


@pytest.mark.zoo
def test_a_reduced_range_halves_the_weights(tmp_path: Path) -> None:
    save(two_products(), tmp_path / "model.onnx")
    largest = []
    for reduce_range in (False, True):
        out = tmp_path / f"{reduce_range}.onnx"
        quantize_graph(tmp_path / "model.onnx", vectors(), out, reduce_range=reduce_range)
        weights = [
            value.const_value.numpy()
            for value in load(out).graph.initializers.values()
            if value.const_value is not None and value.const_value.dtype.name == "INT8" and value.const_value.size > 1
        ]
        assert len(quantized_matmuls(load(out))) == 2
        largest.append(max(int(np.abs(array.astype(np.int32)).max()) for array in weights if array.ndim == 2))
    assert largest[0] > 64 >= largest[1]
