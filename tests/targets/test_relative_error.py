"""The relative error: its value, and the positions that it ignores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.targets.relative_error import ReferenceOutputs, as_bytes, has_value_per_position, relative_error

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("reference", "output", "error"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0.0),
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1e-9], INF),
        ([1.0, NAN], [1.0, NAN], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([1.0, -INF], [1.0, -INF], 0.0),
        ([1.0, -INF], [1.0, INF], INF),
        ([1.0, 2.0], [1.0, INF], INF),
        ([1.0, 2.0], [1.0, 2.0, 3.0], INF),
    ],
)
def test_error_of_numbers(reference: list[float], output: list[float], error: float) -> None:
    assert relative_error(np.array(reference), np.array(output), {}) == error


def test_texts_are_compared_across_bytes_and_str() -> None:
    texts = np.array(["a", "b"], object)
    assert relative_error(texts, as_bytes(texts), {}) == 0
    assert relative_error(texts, np.array(["a", "c"], object), {}) == INF


def test_padded_positions_are_ignored() -> None:
    mask = np.array([[1, 1], [1, 0]])
    reference = np.ones((2, 2, 3))
    output = reference.copy()
    output[1, 1] = NAN
    assert relative_error(reference, output, {"attention_mask": mask}) == 0
    assert relative_error(reference, output, {}) == INF


def test_outputs_of_a_decoder_are_at_the_decoders_positions() -> None:
    mask = np.array([[1, 1], [1, 0]])
    reference = np.ones((2, 2, 3))
    output = reference.copy()
    output[1, 1] = NAN
    feeds = {"attention_mask": mask, "decoder_input_ids": mask}
    assert relative_error(reference, output, feeds) == INF
    assert relative_error(reference, output, {**feeds, "decoder_attention_mask": mask}) == 0


def test_class_outputs_have_no_positions_even_with_the_shape_of_a_mask() -> None:
    mask = np.array([[1, 1], [1, 0]])
    reference, output = np.ones((2, 2)), np.array([[1, 1], [1, NAN]])
    assert relative_error(reference, output, {"attention_mask": mask}) == INF


def test_a_value_for_each_position_follows_the_lengths_of_all_batches() -> None:
    masks = [np.array([[1, 1], [1, 0]]), np.array([[1, 1, 1]])]
    batches = [{"attention_mask": mask} for mask in masks]
    spans, classes = [mask.astype(float) for mask in masks], [np.ones((2, 2)), np.ones((1, 2))]
    assert has_value_per_position(spans, batches)
    assert not has_value_per_position(classes, batches)
    assert not has_value_per_position(spans[:1], batches[:1])
    assert not has_value_per_position(spans, [{}, {}])
    padded = np.array([[1, 1], [1, NAN]])
    assert relative_error(np.ones((2, 2)), padded, batches[0], value_per_position=True) == 0


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-6, 1.0), st.integers(0, 2))
def test_a_batch_of_small_outputs_is_compared_on_the_scale_of_all_batches(factor: float, small: int) -> None:
    rng = np.random.default_rng(small)
    outputs = [rng.normal(size=(2, 3)) for _ in range(3)]
    outputs[small] *= factor
    rounding = 1e-3 * rng.uniform(-1, 1, size=(3, 2, 3))
    reference = ReferenceOutputs([{"y": output} for output in outputs], [{}, {}, {}])
    errors = [reference.error(number, "y", outputs[number] + rounding[number]) for number in range(3)]
    largest = np.abs(outputs).max()
    assert errors == pytest.approx([np.abs(part).max() / largest for part in rounding])


def test_padded_positions_do_not_set_the_scale() -> None:
    mask = np.array([[1, 0]])
    outputs = [np.array([[[1.0], [1e6]]]), np.array([[[2.0], [1e6]]])]
    reference = ReferenceOutputs([{"y": output} for output in outputs], [{"attention_mask": mask}] * 2)
    assert reference.error(0, "y", outputs[0] + 0.5) == pytest.approx(0.25)


def test_texts_and_batches_of_zeros_have_no_scale() -> None:
    texts = np.array(["a", "b"], object)
    reference = ReferenceOutputs([{"text": texts, "y": np.zeros(2)}], [{}])
    assert reference.error(0, "text", texts) == 0
    assert reference.error(0, "text", texts[::-1]) == INF
    assert reference.error(0, "y", np.zeros(2)) == 0
    assert reference.error(0, "y", np.ones(2)) == INF


@pytest.mark.parametrize("lowest", [-3.4e38, -1e9, -1e4])
def test_numbers_that_stand_for_minus_infinity_hide_no_error(lowest: float) -> None:
    outputs = [np.array([[1.0, -2.0]]), np.array([[1.5, lowest]]), np.array([[0.5, -1.0]])]
    reference = ReferenceOutputs([{"y": output} for output in outputs], [{}, {}, {}])
    assert reference.error(0, "y", -outputs[0]) == pytest.approx(2.0)
    assert reference.error(1, "y", outputs[1]) == 0
