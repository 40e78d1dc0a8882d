"""Divergences of arrays are those of tensors."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.answers import DECODER_MASK, EMBEDDING, LABELS, MASK, AnswerKind
from compressor.measure.divergence import divergence, variance_of
from compressor.models.forwards import tensors_of
from compressor.training import divergence as tensors

SHAPES: dict[str, tuple[tuple[str, ...], tuple[int, ...], AnswerKind | None]] = {
    "classes": (("logits",), (4, 3), None),
    "independent classes": (("logits",), (4, 3), AnswerKind.CLASSES),
    "a number": (("logits",), (4, 1), None),
    "numbers": (("logits",), (4, 3), AnswerKind.NUMBERS),
    "tokens": (("logits",), (4, 6, 5), None),
    "a span": (("start_logits", "end_logits"), (4, 6), None),
    "embeddings": ((EMBEDDING,), (4, 8), None),
    "vectors": (("states",), (4, 6, 5), AnswerKind.VECTOR),
}


@pytest.mark.parametrize("marks", [MASK, DECODER_MASK, LABELS])
@pytest.mark.parametrize("name", SHAPES)
def test_divergences_of_arrays_and_of_tensors_are_equal(name: str, marks: str) -> None:
    names, shape, kind = SHAPES[name]
    rng = np.random.default_rng(len(name))
    dense, changed = ({output: rng.normal(size=shape).astype(np.float32) for output in names} for _ in range(2))
    shown = np.arange(6) < rng.integers(1, 7, 4)[:, None]
    batch = {marks: np.where(shown, 1, -100) if marks == LABELS else shown.astype(np.int64)}
    variance = variance_of([dense], names, kind)
    actual = divergence(dense, changed, names, batch, variance, kind=kind, temperature=2.0)
    pair = (tensors_of(dense), tensors_of(changed))
    expected = tensors.divergence(*pair, names, tensors_of(batch), kind=kind, temperature=2.0)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-6, atol=1e-12)
    assert (actual > 0).all()
    assert not divergence(dense, dense, names, batch, variance, kind=kind).any()
