"""Quantized products are ranked by what the return of each to floats does to the outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.quantization import rank_matmuls
from compressor.targets import Feeds
from compressor.targets.graph_facts import quantized_matmuls
from graph_passes import load, save
from graph_passes.passes import ReturnToFloats
from tests.quantization.graphs import Quantized, calibration_rows, files_of, needs_nncf, quantized, run
from tests.targets.graphs import parsed

OUTLIER = 500.0
"""The first channel of an activation. Its weights are zero, so it only widens the range that the others share."""
FLOAT = """
    vd = Cast <to = 1> (v)  wd = Cast <to = 1> (w)
    h = MatMul(x, vd)  b = Add(h, added)  r = Relu(b)  y = MatMul(r, wd)
"""
QUANTIZED = """
    vd = DequantizeLinear(v, one)  wd = DequantizeLinear(w, one)
    xq = QuantizeLinear(x, sx, zero)  xd = DequantizeLinear(xq, sx, zero)  h = MatMul(xd, vd)  b = Add(h, added)
    r = Relu(b)  rq = QuantizeLinear(r, sr, zero)  rd = DequantizeLinear(rq, sr, zero)  y = MatMul(rd, wd)
"""
NAMES = {"h": "first", "y": "second"}
Progress = list[tuple[int, int]]


@pytest.fixture(scope="module")
def bert() -> Quantized:
    return quantized()


def two_products(body: str, outlier: str) -> ir.Model:
    """A graph of the products `first` and `second`; the activation of one may have an outlier."""
    rng = np.random.default_rng(0)
    integers = rng.integers(-4, 5, (2, 6, 6))
    integers[:, 0] = 0
    v, w = (", ".join(map(str, matrix.ravel())) for matrix in integers)
    wide = f"{OUTLIER / 127:.3f}"
    first, second = wide if outlier == "first" else "0.03", wide if outlier == "second" else "0.3"
    added = f"{OUTLIER if outlier == 'second' else 0.0}, 0.0, 0.0, 0.0, 0.0, 0.0"
    weights = (
        f"int8[6, 6] v = {{{v}}}, int8[6, 6] w = {{{w}}}, float[6] added = {{{added}}}, float one = {{1.0}},"
        f" float sx = {{{first}}}, float sr = {{{second}}}, int8 zero = {{0}}"
    )
    model = parsed(body, "float[B, 6] x", "float[B, 6] y", weights)
    for node in model.graph:
        output = str(node.outputs[0].name)
        node.name = NAMES.get(output, output)
    return model


def vectors(outlier: str) -> list[Feeds]:
    """Rows of `two_products`."""
    batches = np.random.default_rng(1).normal(size=(3, 4, 6)).astype(np.float32)
    batches[:, :, 0] = OUTLIER if outlier == "first" else 1.0
    return [{"x": batch} for batch in batches]


def written(folder: Path, outlier: str) -> tuple[Path, Path]:
    """Files of the quantized and of the float graph."""
    paths = folder / "int8.onnx", folder / "float.onnx"
    for body, path in zip((QUANTIZED, FLOAT), paths, strict=True):
        save(two_products(body, outlier), path)
    return paths


@pytest.mark.parametrize(("outlier", "plain"), [("first", "second"), ("second", "first")])
def test_a_product_whose_activation_has_an_outlier_comes_first(outlier: str, plain: str, tmp_path: Path) -> None:
    path, reference = written(tmp_path, outlier)
    rows = vectors(outlier)
    assert rank_matmuls(path, reference, rows) == [outlier, plain]
    assert rank_matmuls(path, reference, rows[:1]) == [outlier, plain], "one row is enough here"


def test_products_in_floats_are_not_ranked(tmp_path: Path) -> None:
    path, reference = written(tmp_path, "second")
    save(ReturnToFloats({"first"})(load(path)).model, tmp_path / "one.onnx")
    assert rank_matmuls(tmp_path / "one.onnx", reference, vectors("second")) == ["second"]
    assert rank_matmuls(reference, reference, vectors("second")) == []


def test_progress_is_reported_for_each_product(tmp_path: Path) -> None:
    path, reference = written(tmp_path, "first")
    progress: Progress = []
    rank_matmuls(path, reference, vectors("first"), lambda done, total: progress.append((done, total)))
    assert progress == [(1, 2), (2, 2)]


def test_the_graphs_stay(tmp_path: Path) -> None:
    path, reference = written(tmp_path, "first")
    before = files_of(path)
    rank_matmuls(path, reference, vectors("first"))
    assert files_of(path) == before


@pytest.mark.zoo
@needs_nncf
def test_every_product_of_a_model_is_ranked_once(bert: Quantized, tmp_path: Path) -> None:
    progress: Progress = []
    rows = calibration_rows(2)
    ranked = rank_matmuls(bert.path, bert.source, rows, lambda done, total: progress.append((done, total)))
    assert sorted(ranked) == sorted(bert.graph.products)
    assert progress == [(number + 1, len(ranked)) for number in range(len(ranked))]
    errors = []
    for name in (ranked[0], ranked[-1]):
        model = ReturnToFloats({name})(load(bert.path)).model
        assert len(quantized_matmuls(model)) == len(ranked) - 1
        save(model, tmp_path / "returned.onnx")
        pairs = [
            (run(bert.source, feeds)["logits"], run(tmp_path / "returned.onnx", feeds)["logits"]) for feeds in rows
        ]
        errors.append(sum(float(np.square(expected - output).sum()) for expected, output in pairs))
    assert errors[0] < errors[1], "the first brings the outputs nearest to those of the float graph"
