"""A fingerprint says which values a tensor has: in any precision, and not those of another one or of its transpose."""

from __future__ import annotations

import numpy as np
import pydantic
import pytest

from graph_passes.weights import WeightRecord, fingerprint, shape_of

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(0, 0.02, (6, 10)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_the_precision_of_the_copy_does_not_matter(dtype: type) -> None:
    assert fingerprint(WEIGHT.astype(dtype)) == fingerprint(WEIGHT)
    assert fingerprint(np.asfortranarray(WEIGHT)) == fingerprint(WEIGHT)


def test_numbers_that_converters_to_float16_clip_do_not_matter() -> None:
    extreme = np.array([3e-8, -3e-8, 0.0, -0.0, 3e4, -1e38, 1.0], np.float32)
    clipped = np.array([1e-7, -1e-7, 0.0, 0.0, 1e4, -1e4, 1.0], np.float16)
    assert fingerprint(extreme) == fingerprint(clipped)


def test_another_value_or_layout_has_another_fingerprint() -> None:
    for element in (0, WEIGHT.size - 1):
        changed = WEIGHT.copy()
        changed.flat[element] *= 1.01
        assert fingerprint(changed) != fingerprint(WEIGHT)
    assert len({fingerprint(array) for array in (WEIGHT, WEIGHT.T, WEIGHT.reshape(10, 6), WEIGHT.ravel())}) == 4


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 3), (2, 3, 4)])
def test_a_fingerprint_states_the_shape_and_is_valid_in_a_plan(shape: tuple[int, ...]) -> None:
    values = fingerprint(np.ones(shape, np.float32))
    assert shape_of(values) == shape
    assert not WeightRecord(values, values).is_changed


def test_a_text_that_is_no_fingerprint_is_refused() -> None:
    for text in ("", "sha256:0", "2x3:zz"):
        with pytest.raises(pydantic.ValidationError):
            WeightRecord(text, fingerprint(WEIGHT))
