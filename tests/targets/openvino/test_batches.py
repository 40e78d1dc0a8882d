"""The smallest fixed shape that holds a batch is chosen, and padding is cut from its outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.targets.base import Shape, parse_shape
from compressor.targets.openvino.batches import fitting_shape, pad, sizes_of, unpadded
from compressor.targets.openvino.engine import axis_names, can_pad, unfixable
from tests.targets.graphs import parsed
from tests.targets.openvino.sizes import SHAPES, SIZES, TEXT, feeds_of


@pytest.mark.parametrize(("size", "expected"), SIZES.items(), ids=str)
def test_the_smallest_shape_that_holds_a_batch_fits(size: Shape, expected: Shape | None) -> None:
    feeds = feeds_of(*size)
    assert sizes_of(TEXT, feeds) == size
    assert fitting_shape(SHAPES, TEXT, feeds, pads=True) == expected
    assert fitting_shape(reversed(SHAPES), TEXT, feeds, pads=True) == expected


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_only_exact_shapes_fit_where_nothing_may_be_padded(size: Shape) -> None:
    expected = size if size in SHAPES else None
    assert fitting_shape(SHAPES, TEXT, feeds_of(*size), pads=False) == expected


@pytest.mark.parametrize(
    ("feeds", "case"),
    [
        ({"input_ids": np.zeros((2, 7)), "attention_mask": np.zeros((1, 7))}, "batches differ"),
        ({"input_ids": np.zeros((2, 7)), "attention_mask": np.zeros((2, 6))}, "lengths differ"),
        ({"input_ids": np.zeros(7), "attention_mask": np.zeros((1, 7))}, "rank"),
        ({"input_ids": [[1, 2]], "attention_mask": np.zeros((1, 2))}, "list"),
        ({"input_ids": np.zeros((2, 7))}, "missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inputs_that_do_not_agree_fit_no_shape(feeds: dict[str, Any], case: str) -> None:
    axes = {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")}
    assert fitting_shape(SHAPES, axes, feeds, pads=True) is None


LOOKED_UP = "e = Gather(w, input_ids) s = Cast<to=1>(attention_mask) y = Add(e, s)"

SEARCHED = "p = Equal(input_ids, pad) q = Cast<to=1>(p) s = Cast<to=1>(attention_mask) y = Add(q, s)"


@pytest.mark.parametrize(
    ("body", "inputs", "expected"),
    [
        (LOOKED_UP, "int64[B, S] input_ids, int64[B, S] attention_mask", True),
        (SEARCHED, "int64[B, S] input_ids, int64[B, S] attention_mask", False),
        ("y = Gather(w, input_ids)", "int64[B, S] input_ids", False),
    ],
    ids=["looked up", "searched", "no mask"],
)
def test_rows_are_padded_only_where_tokens_are_looked_up_and_masked(body: str, inputs: str, expected: bool) -> None:
    model = parsed(body, inputs, "float[B, S] y", "float[9] w, int64 pad = {3}")
    assert can_pad(model) is expected


def test_nothing_fits_no_shapes() -> None:
    assert fitting_shape((), TEXT, feeds_of(1, 1), pads=True) is None


@given(st.data())
def test_a_padded_batch_is_cut_to_what_it_was(data: st.DataObject) -> None:
    sizes = st.integers(1, 5)
    rows, length, width = (data.draw(sizes) for _ in range(3))
    axes = {"a": ("batch", "sequence"), "b": ("batch", str(width), "sequence"), "c": (str(width),), "d": ("batch",)}
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), max_size=4))
    known = {"batch": rows, "sequence": length, str(width): width}
    rng = np.random.default_rng(0)
    feeds = {tensor: rng.integers(1, 9, [known[name] for name in names]) for tensor, names in axes.items()}
    copies = {tensor: array.copy() for tensor, array in feeds.items()}
    filled = [(batch, seq) for batch, seq in shapes if 5 * rows * length >= 4 * batch * seq]
    larger = [shape for shape in filled if shape[0] >= rows and shape[1] >= length]
    shape = fitting_shape(shapes, axes, feeds, pads=True)
    assert (shape is None) is (not larger)
    if shape is None:
        return
    assert shape[0] * shape[1] == min(batch * seq for batch, seq in larger)
    padded = pad(axes, feeds, shape)
    assert sizes_of(axes, padded) == shape
    assert all(padded[tensor].sum() == feeds[tensor].sum() for tensor in axes), "zeros are added"
    for (tensor, array), part in zip(copies.items(), unpadded(axes, (rows, length)), strict=True):
        np.testing.assert_array_equal(padded[tensor][part], array)
        np.testing.assert_array_equal(feeds[tensor], array)


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_a_shape_is_read_as_it_is_written(batch: int, seq: int) -> None:
    assert parse_shape(f"{batch}x{seq}") == (batch, seq)


def test_other_free_axes_are_named() -> None:
    assert unfixable(TEXT, {"logits": ("batch", "sequence", "99")}) is None
    reason = unfixable(TEXT, {"logits": ("batch", "sequence"), "states": ("batch", "memory", "8")})
    assert reason is not None
    assert "memory" in reason
    assert "states" in reason
    assert "past" in (unfixable({"keys": ("batch", "past + sequence")}, {}) or "")


def test_axes_are_named_as_in_the_graph() -> None:
    model = parsed("y = Relu(x)", "float[batch, sequence, 4] x", "float[batch, sequence, 4] y")
    (value,) = model.graph.inputs
    assert axis_names(value) == ("batch", "sequence", "4")
    value.shape = None
    assert axis_names(value) == ()
