"""The portable quantized graph is standard ONNX, has every weighted product in int8, and runs on every runtime."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from compressor.engines.prove import prove_engine, require
from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.export import export_reference
from compressor.quantization import quantize_graph, require_nncf
from compressor.quantization.portable import joined, producers_listed_once
from compressor.targets import target
from compressor.targets.graph_facts import float_matmuls, quantized_matmuls, weight_matmuls
from compressor.targets.relative_error import relative_error
from compressor.units import find_sites, keep_all
from graph_passes import load, save, shrink
from tests.faults import fails_with
from tests.quantization.graphs import (
    METADATA,
    Quantized,
    calibration_rows,
    files_of,
    needs_nncf,
    quantized,
    run,
    two_products,
    vectors,
)
from tests.targets.cpu import needs_vnni
from tests.targets.graphs import parsed
from tests.units.masks import one_layer, random_mask

pytestmark = needs_nncf

SANITY = 0.3
"""Largest relative error of a tiny random model in int8 against its float graph."""


@pytest.fixture(scope="module")
def bert() -> Quantized:
    return quantized()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A graph of two products."""
    path = tmp_path / "float" / "model.onnx"
    path.parent.mkdir()
    save(two_products(), path)
    return path


def test_producers_are_listed_once_for_each_version_of_a_graph() -> None:
    metatypes = importlib.import_module("nncf.onnx.graph.metatypes.onnx_metatypes")
    list_producers = metatypes.get_parents_node_mapping
    proto = ir.to_proto(two_products())
    with producers_listed_once():
        producers = metatypes.get_parents_node_mapping(proto)
        assert producers == list_producers(proto)
        assert metatypes.get_parents_node_mapping(proto) is producers
        proto.graph.node.append(onnx.helper.make_node("Relu", ["y"], ["z"]))
        assert metatypes.get_parents_node_mapping(proto) == list_producers(proto) != producers
    assert metatypes.get_parents_node_mapping is list_producers


def test_the_graph_consists_of_standard_operators(bert: Quantized) -> None:
    model = load(bert.path)
    assert {node.domain for node in ir.traversal.RecursiveGraphIterator(model.graph)} == {""}
    assert set(model.opset_imports) == {""}
    assert not model.functions
    onnx.checker.check_model(str(bert.path), full_check=True)


def test_every_weighted_product_is_quantized(bert: Quantized) -> None:
    model = load(bert.path)
    assert [node.name for node in quantized_matmuls(model)] == list(bert.graph.products)
    assert list(bert.graph.products) == [node.name for node in weight_matmuls(load(bert.source))]
    assert (bert.graph.in_float, float_matmuls(model)) == ((), [])
    assert bert.graph.rows == len(calibration_rows())


def test_activations_have_one_zero_point_and_weights_a_scale_for_each_output(bert: Quantized) -> None:
    for product in quantized_matmuls(load(bert.path)):
        activation, weight = (factor.producer() for factor in product.inputs[:2] if factor is not None)
        assert activation is not None
        assert weight is not None
        (points, scales), (zeros, channels) = (parameters(node) for node in (activation, weight))
        assert points.dtype in (np.int8, np.uint8)
        assert points.shape == scales.shape == ()
        assert zeros.dtype == np.int8
        assert not zeros.any()
        output = product.outputs[0].shape
        assert output is not None
        assert channels.size == output[-1], "a product with one output may have a scalar"


def test_the_ranges_of_activations_hold_every_row(small: Path, tmp_path: Path) -> None:
    rows = [{"x": scale * row["x"]} for scale, row in zip((0.1, 0.2, 0.4, 8.0), vectors(4), strict=True)]
    quantize_graph(small, rows, tmp_path / "model.int8.onnx")
    expected, output = (run(path, rows[-1])["y"] for path in (small, tmp_path / "model.int8.onnx"))
    # The mean of the ranges would clip the last row to about a quarter.
    assert np.linalg.norm(output - expected) < 0.1 * np.linalg.norm(expected)


def parameters(node: ir.Node) -> tuple[np.ndarray, np.ndarray]:
    """Zero points and scales of a dequantizer."""
    scales, zeros = (value.const_value for value in node.inputs[1:3] if value is not None)
    assert scales is not None
    assert zeros is not None
    return zeros.numpy(), scales.numpy()


def test_embedding_tables_are_quantized(bert: Quantized) -> None:
    assert "bert.embeddings.word_embeddings.weight" in load(bert.source).graph.initializers
    (table,) = (node.inputs[0] for node in load(bert.path).graph if node.name == "node_embedding")
    assert table is not None
    dequantizer = table.producer()
    assert dequantizer is not None
    assert dequantizer.op_type == "DequantizeLinear"


def test_inputs_outputs_and_metadata_stay(bert: Quantized) -> None:
    before, after = load(bert.source), load(bert.path)
    for values, kept in ((before.graph.inputs, after.graph.inputs), (before.graph.outputs, after.graph.outputs)):
        assert [(v.name, v.dtype, v.shape) for v in values] == [(v.name, v.dtype, v.shape) for v in kept]
    assert after.metadata_props.items() >= METADATA.items()


def test_the_float_graph_stays(bert: Quantized) -> None:
    assert files_of(bert.source) == bert.before


def test_outputs_are_near_those_of_the_float_graph(bert: Quantized) -> None:
    for feeds in calibration_rows():
        error = relative_error(run(bert.source, feeds)["logits"], run(bert.path, feeds)["logits"], feeds)
        assert 0 < error < SANITY


@needs_vnni
@pytest.mark.parametrize(("name", "file"), [("ort", "engine.onnx"), ("openvino", "engine.xml")])
def test_an_engine_computes_the_quantized_graph(name: str, file: str, bert: Quantized, tmp_path: Path) -> None:
    engine = target(name).build(bert.path, tmp_path / file, precision="int8", provider="cpu", threads=1)
    assert engine.precision == "int8"
    assert engine.quantized is not None
    assert engine.quantized.requested == len(bert.graph.products)
    assert 0 < engine.quantized.executed <= engine.quantized.requested
    assert engine.quantized.float_in_graph == ()
    require(prove_engine(bert.path, engine, bert.cases, "compressed"))


@pytest.mark.parametrize("kept", ["first", pytest.param("second", marks=pytest.mark.zoo)])
def test_exactly_the_named_products_stay_in_floats(kept: str, small: Path, tmp_path: Path) -> None:
    graph = quantize_graph(small, vectors(), tmp_path / "int8.onnx", keep_float={kept})
    model = load(graph.path)
    assert graph.in_float == (kept,) == tuple(node.name for node in float_matmuls(model))
    assert {*graph.products, kept} == {"first", "second"}
    (product,) = float_matmuls(model)
    weight = product.inputs[1]
    assert weight is not None
    assert weight.is_initializer()
    assert weight.dtype == ir.DataType.FLOAT


def test_every_product_may_stay_in_floats(small: Path, tmp_path: Path) -> None:
    graph = quantize_graph(small, vectors(), tmp_path / "int8.onnx", keep_float=("first", "second"))
    assert (graph.products, graph.in_float) == ((), ("first", "second"))
    for feeds in vectors():
        assert relative_error(run(small, feeds)["y"], run(graph.path, feeds)["y"], feeds) < 1e-5


def test_a_product_of_another_graph_is_refused(small: Path, tmp_path: Path) -> None:
    with fails_with(ErrorCode.RUNTIME_FAILED, InputError, path=small) as caught:
        quantize_graph(small, vectors(), tmp_path / "int8.onnx", keep_float=("third",))
    assert "third" in str(caught.value)
    assert not (tmp_path / "int8.onnx").exists()


def test_weights_behind_layout_operators_are_quantized(tmp_path: Path) -> None:
    body = "t = Transpose(v)  h = MatMul(x, t)  c = Concat <axis = 1> (w, u)  y = Gemm(h, c, b)"
    weights = "float[7, 6] v, float[7, 3] w, float[7, 2] u, float[5] b"
    save(parsed(body, "float[B, 6] x", "float[B, 5] y", weights), tmp_path / "model.onnx")
    graph = quantize_graph(tmp_path / "model.onnx", vectors(), tmp_path / "int8.onnx")
    assert (len(graph.products), graph.in_float) == (2, ())


def test_a_graph_that_is_quantized_is_refused(small: Path, tmp_path: Path) -> None:
    once = quantize_graph(small, vectors(), tmp_path / "once.onnx").path
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, InputError, path=once):
        quantize_graph(once, vectors(), tmp_path / "twice.onnx")
    assert not (tmp_path / "twice.onnx").exists()


def test_no_rows_are_refused(small: Path, tmp_path: Path) -> None:
    with fails_with(ErrorCode.TOO_FEW_ROWS, InputError, field="data"):
        quantize_graph(small, [], tmp_path / "int8.onnx")


def test_examples_of_equal_shapes_are_calibrated_together() -> None:
    """Batches hold every example once, without padding; those of a graph of a fixed batch stay alone."""
    model, lengths = parsed("y = Identity(x)", "int64[B, S] x", "int64[B, S] y", ""), [3, 5, 3, 3, 700, 5, 700]
    examples = [{"x": np.full((1, length), number)} for number, length in enumerate(lengths)]
    batches = joined(model, examples)
    assert [len(batch["x"]) for batch in batches] == [3, 2, 1, 1]
    rows = sorted((int(row[0]), len(row)) for batch in batches for row in batch["x"])
    assert rows == list(enumerate(lengths))
    fixed = parsed("y = Identity(x)", "int64[1, S] x", "int64[1, S] y", "")
    assert joined(fixed, examples) == examples


def test_columns_that_the_graph_lacks_are_ignored(small: Path, tmp_path: Path) -> None:
    rows = [{**feeds, "labels": np.zeros(3, np.int64)} for feeds in vectors()]
    assert quantize_graph(small, rows, tmp_path / "int8.onnx").rows == len(rows)


@pytest.mark.zoo
def test_the_same_rows_give_the_same_graph(small: Path, tmp_path: Path) -> None:
    first, second = (tmp_path / name / "int8.onnx" for name in ("first", "second"))
    for path in (first, second):
        path.parent.mkdir()
        quantize_graph(small, vectors(), path)
    assert files_of(first) == files_of(second)


@pytest.mark.zoo
def test_quantizing_prints_nothing(small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    quantize_graph(small, vectors(), tmp_path / "int8.onnx")
    assert capfd.readouterr() == ("", "")


def test_the_quantizer_sends_no_statistics() -> None:
    require_nncf()
    assert os.environ["NNCF_CI"]


def test_a_missing_quantizer_is_named_with_its_command(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(TargetMissingError) as error:
        quantize_graph(small, vectors(), tmp_path / "int8.onnx")
    assert (error.value.code, error.value.details["package"]) == (ErrorCode.PACKAGE_MISSING, "nncf")
    assert "pip install" in str(error.value)


@pytest.mark.zoo
def test_products_of_a_graph_with_block_sparse_attention_are_quantized(tmp_path: Path) -> None:
    model, inputs = one_layer("bert")
    sites = find_sites(model, inputs)
    plan = keep_all(sites).masked({site.name: random_mask(site, model, 0, block=8) for site in sites})
    export_reference(model, plan, inputs, tmp_path / "reference.onnx")
    save(shrink(load(tmp_path / "reference.onnx"), plan).model, tmp_path / "blocks.onnx")
    assert load(tmp_path / "blocks.onnx").functions
    graph = quantize_graph(tmp_path / "blocks.onnx", calibration_rows(), tmp_path / "blocks.int8.onnx")
    assert graph.products
    assert not graph.in_float
    feeds = calibration_rows(1)[0]
    expected, outputs = (run(path, feeds) for path in (tmp_path / "blocks.onnx", graph.path))
    assert all(relative_error(expected[name], outputs[name], feeds) < SANITY for name in expected)
