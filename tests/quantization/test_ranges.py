"""Ranges are measured on the positions that are no padding, whatever the lengths, and clipped where that errs least."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.quantization.calibration_inputs import without_padding
from compressor.quantization.ranges import MagnitudeHistogram, measure_magnitudes
from compressor.targets import Feeds
from graph_passes import load
from graph_passes.passes import FoldWeights
from graph_passes.quantizers.placement import QuantizedRole, quantized_inputs
from tests.targets.graphs import parsed, pruned
from tests.zoo import pair, text

LEVELS = 127


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
    for other in (forward, backward):
        assert (other.maximum, other.width) == (whole.maximum, whole.width)
        np.testing.assert_array_equal(other.counts, whole.counts)
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
