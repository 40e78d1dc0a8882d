"""The symmetric graph of every family has its quantizers where TensorRT wants them, and computes nearly the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from compressor.engines.build import spans_of
from compressor.engines.prove import prove_products, require
from compressor.errors import ErrorCode, InputError
from compressor.quantization import output_distance, quantize_symmetric
from compressor.quantization.symmetric import MagnitudeHistogram, measure_magnitudes, without_padding
from compressor.targets import BuildOptions, Engine, Feeds, Precision, target
from compressor.targets.graph_facts import float_matmuls, quantized_matmuls
from compressor.targets.tensorrt.graph import profile
from graph_passes import load, save
from graph_passes.passes import FoldWeights
from graph_passes.quantizers.faults import quantizer_faults
from graph_passes.quantizers.placement import QuantizedRole, quantized_inputs
from tests.faults import fails_with
from tests.quantization.graphs import CASES, files_of, symmetric, two_products, vectors
from tests.targets.cpu import needs_vnni
from tests.targets.graphs import masked, parsed, pruned
from tests.zoo import FAMILIES, pair, text

EACH_FAMILY = [name if name == "bert" else pytest.param(name, marks=pytest.mark.zoo) for name in FAMILIES]
DISTANCE = 0.05
"""Largest mean squared difference of a tiny random model in int8 to its float graph, relative to its outputs."""
FP8_DISTANCE = 0.1
"""The same in fp8, whose numbers have three bits behind the leading one."""
LEVELS = 127


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_a_family_is_quantized_by_the_rules(family: str, precision: Precision) -> None:
    case = symmetric(family, precision)
    model = case.model()
    assert quantizer_faults(model) == []
    onnx.checker.check_model(str(case.graph.path), full_check=True)
    assert model.opset_imports[""] == (21 if precision == "fp8" else load(case.source.shrunk).opset_imports[""])
    assert case.graph.products == tuple(node.name for node in quantized_matmuls(model))
    assert case.graph.in_float == tuple(node.name for node in float_matmuls(model))
    assert len(case.graph.in_float) == 1, "the output head"
    limit = FP8_DISTANCE if precision == "fp8" else DISTANCE
    assert 0 < output_distance(case.graph.path, case.source.shrunk, [case.source.inputs]) < limit


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_attentions_and_residual_sums_are_quantized_as_often_as_the_plan_keeps_them(family: str) -> None:
    """Expected from the plan rather than the graph: groups that keep nothing have neither."""
    case = symmetric(family)
    model = case.model()
    readers = [(node, value.producer()) for node in model.graph for value in node.inputs if value is not None]
    read = [node for node, producer in readers if producer is not None and producer.op_type == "DequantizeLinear"]
    products = {node.name for node in quantized_matmuls(model)}
    attention = [node for node in read if node.op_type == "MatMul" and node.name not in products]
    sums = [node for node in read if node.op_type == "Add"]
    feed_forwards = sum(bool(group.kept) for group in case.source.plan.feed_forwards)
    assert len(attention) == 4 * case.source.attentions
    assert len(sums) == case.source.attentions + feed_forwards
    assert {node.op_type for node in read} <= {"Add", "Gemm", "MatMul"}


def test_an_embedding_table_stays_in_floats() -> None:
    model = symmetric("bert").model()
    tables = [node.inputs[0] for node in model.graph if node.op_type == "Gather" and node.inputs[0] is not None]
    assert {table.dtype for table in tables if table.is_initializer()} <= {ir.DataType.FLOAT, ir.DataType.INT64}


@pytest.mark.zoo
def test_a_block_sparse_graph_is_quantized(tmp_path: Path) -> None:
    rows = [{name: value.numpy() for name, value in text(2, 16).items()}]
    graph = quantize_symmetric(masked().shrunk, rows, tmp_path / "graph.onnx")
    assert quantizer_faults(load(graph.path)) == []
    assert output_distance(graph.path, masked().shrunk, rows) < DISTANCE


def test_quantizing_twice_gives_the_same_graph_and_leaves_the_float_graph(tmp_path: Path) -> None:
    source = pruned("bert")
    before = files_of(source.shrunk)
    first, second = (tmp_path / name / "int8.onnx" for name in ("first", "second"))
    for path in (first, second):
        path.parent.mkdir()
        quantize_symmetric(source.shrunk, [source.inputs], path)
    assert files_of(first) == files_of(second)
    assert files_of(source.shrunk) == before
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, InputError, path=first):
        quantize_symmetric(first, [source.inputs], tmp_path / "twice.onnx")


@pytest.mark.parametrize(
    ("rows", "code"), [([], ErrorCode.TOO_FEW_ROWS), ([{"z": vectors(1)[0]["x"]}], ErrorCode.TENSOR_MISMATCH)]
)
def test_rows_that_cannot_be_used_are_refused(rows: list[Feeds], code: ErrorCode, tmp_path: Path) -> None:
    save(two_products(), tmp_path / "model.onnx")
    with fails_with(code, InputError):
        quantize_symmetric(tmp_path / "model.onnx", rows, tmp_path / "int8.onnx")
    assert not (tmp_path / "int8.onnx").exists()


def test_a_graph_whose_only_product_is_its_head_is_refused(tmp_path: Path) -> None:
    save(parsed("y = MatMul(x, v)", "float[B, 6] x", "float[B, 7] y", "float[6, 7] v"), tmp_path / "model.onnx")
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, InputError, path=tmp_path / "model.onnx"):
        quantize_symmetric(tmp_path / "model.onnx", vectors(), tmp_path / "int8.onnx")


def test_only_the_first_product_of_two_is_no_head(tmp_path: Path) -> None:
    save(two_products(), tmp_path / "model.onnx")
    graph = quantize_symmetric(tmp_path / "model.onnx", vectors(), tmp_path / "int8.onnx")
    assert (graph.products, graph.in_float, graph.rows) == (("first",), ("second",), len(vectors()))
    roles = [entry.role for entry in quantized_inputs(two_products())]
    assert roles == [QuantizedRole.ACTIVATION, QuantizedRole.WEIGHT]


@needs_vnni
@pytest.mark.parametrize("family", ["bert", pytest.param("gpt2", marks=pytest.mark.zoo)])
def test_products_are_proven_at_sizes_that_a_profile_of_tensorrt_covers(family: str, tmp_path: Path) -> None:
    """ONNX Runtime computes the products here, in a graph whose first axes may count tokens."""
    case = symmetric(family)

    def build(graph: Path, feeds: Sequence[Feeds]) -> Engine:
        batch_span, length_span = spans_of(feeds)
        shapes = profile(load(graph), BuildOptions(batch=batch_span, seq=length_span))
        for name, (smallest, _, largest) in shapes.items():
            for batch in feeds:
                bounds = zip(smallest, batch[name].shape, largest, strict=True)
                assert all(low <= size <= high for low, size, high in bounds)
        return target("ort").build(graph, tmp_path / "engine.onnx", precision="int8", provider="cpu", threads=1)

    require(prove_products(case.graph.path, build, CASES, "compressed"))


def histogram_of(*arrays: np.ndarray) -> MagnitudeHistogram:
    histogram = MagnitudeHistogram()
    for array in arrays:
        histogram.add(array)
    return histogram


def error(array: np.ndarray, largest: float) -> float:
    """Mean squared error of an array in whole steps up to a range."""
    step = largest / LEVELS
    return float(np.square(array - np.clip(np.rint(array / step), -LEVELS, LEVELS) * step).mean())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e7])
def test_a_histogram_is_the_same_in_any_order_and_for_any_lengths(scale: float) -> None:
    rng = np.random.default_rng(0)
    array = (scale * rng.normal(size=4000) ** 3).astype(np.float32)
    parts = np.split(array, [0, 7, 1000])
    whole, forward, backward = histogram_of(array), histogram_of(*parts), histogram_of(*parts[::-1])
    for histogram in (forward, backward):
        assert (histogram.maximum, histogram.width) == (whole.maximum, whole.width)
        np.testing.assert_array_equal(histogram.counts, whole.counts)
    assert whole.maximum == np.abs(array).max()
    assert whole.counts.sum() == array.size


@pytest.mark.parametrize("power", [1, 3, 5])
def test_a_clipped_range_errs_no_more_than_the_whole_range(power: int) -> None:
    array = np.random.default_rng(1).normal(size=20_000) ** power
    histogram = histogram_of(array)
    clipped = histogram.clipping_range(LEVELS)
    assert 0 < clipped <= histogram.maximum
    assert error(array, clipped) <= error(array, histogram.maximum) * 1.02
    assert clipped < histogram.maximum or power == 1


def test_numbers_that_are_not_finite_have_no_range() -> None:
    histogram = histogram_of(np.array([np.nan, -np.inf, 2.0, -3.0]))
    assert (histogram.maximum, histogram.counts.sum()) == (3.0, 2)


def test_a_tensor_of_zeros_has_the_range_zero() -> None:
    assert histogram_of(np.zeros(5)).clipping_range(LEVELS) == 0
    assert histogram_of(np.zeros(5), np.ones(2)).counts.sum() == 7


def test_padded_positions_have_no_range() -> None:
    """A batch of rows of several lengths gives what the rows give alone."""
    source = pruned("bert")
    model = load(source.shrunk)
    FoldWeights()(model)
    tensors = {str(entry.value.name) for entry in quantized_inputs(model) if entry.role is not QuantizedRole.WEIGHT}
    batch = {name: value.numpy() for name, value in text(3, 9).items()}
    mask = batch["attention_mask"][2:].astype(bool)[0]
    alone: list[Feeds] = [
        *({name: array[number : number + 1] for name, array in batch.items()} for number in (0, 1)),
        {name: array[2:][:, mask] for name, array in batch.items()},
    ]
    assert mask.sum() == 7
    padded, expected = (measure_magnitudes(model, tensors, feeds) for feeds in ([batch], alone))
    for name in tensors:
        assert padded[name].maximum == pytest.approx(expected[name].maximum, rel=1e-5)
        assert padded[name].counts.sum() == expected[name].counts.sum()


def test_each_side_of_an_encoder_decoder_has_its_mask() -> None:
    batch = {name: value.numpy() for name, value in pair(2, 7, 5).items()}
    batch["decoder_attention_mask"][0, 0] = 0
    lengths = [{name: array.shape for name, array in row.items()} for row in without_padding(batch)]
    assert lengths == [
        {name: (1, 4) if name.startswith("decoder_") else (1, 7) for name in batch},
        {name: (1, 3) if name.startswith("decoder_") else (1, 5) for name in batch},
    ]


def test_batches_without_padding_stay_whole() -> None:
    full: Feeds = {"input_ids": np.ones((2, 3), np.int64), "attention_mask": np.ones((2, 3), np.int64)}
    pixels: Feeds = {"pixel_values": np.ones((2, 3, 4, 4), np.float32)}
    assert without_padding(full) == [full]
    assert without_padding(pixels) == [pixels]


def test_an_input_of_the_graph_has_a_range(tmp_path: Path) -> None:
    model: ir.Model = parsed("h = Relu(x)  y = Neg(h)", "float[B, 2] x", "float[B, 2] y")
    rows: list[Feeds] = [{"x": np.array([[-3.0, 1.0]], np.float32)}, {"x": np.array([[2.0, 0.0]], np.float32)}]
    measured = measure_magnitudes(model, {"x", "h"}, rows)
    assert {name: histogram.maximum for name, histogram in measured.items()} == {"x": 3.0, "h": 2.0}
