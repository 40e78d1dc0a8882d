"""The most that a classifier loses where its answers change."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.measure.ceiling import LossCeiling

ROWS, CLASSES = 500, 3


def drawn(rng: np.random.Generator, scale: float, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a whole model and labels that follow them; at a scale other than 1 it is over- or underconfident."""
    true = 2 * rng.standard_normal((rows, CLASSES))
    labels = (true + rng.gumbel(size=true.shape)).argmax(-1)  # of the softmax of these logits
    return scale * true, labels


def ceiling_of(whole: np.ndarray, labels: np.ndarray, *, are_answers: bool = False) -> LossCeiling:
    ceiling = LossCeiling.of(whole, labels, are_answers=are_answers)
    assert ceiling is not None
    return ceiling


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5, 1.0])
def test_a_change_that_knows_no_label_rarely_loses_more(scale: float, noise: float) -> None:
    """However sure of its answers the whole model is; the true loss is that of many rows."""
    losses, ceilings = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        whole, labels = drawn(rng, scale)
        answers = (whole + scale * noise * rng.standard_normal(whole.shape)).argmax(-1)
        ceilings.append(ceiling_of(whole, labels).loss(answers))
        many, right = drawn(rng, scale, 10_000)
        changed = many + scale * noise * rng.standard_normal(many.shape)
        losses.append((many.argmax(-1) == right).mean() - (changed.argmax(-1) == right).mean())
    assert np.mean(np.array(ceilings) < np.mean(losses)) <= 0.1
    assert np.mean(ceilings) < 2 * np.mean(losses) + 3 / ROWS


def test_an_equal_model_loses_no_more_than_three_rows() -> None:
    """Of so many rows that none changes, three may change among other rows; one cheap change is no reason for less."""
    whole, labels = drawn(np.random.default_rng(0), 1.0)
    ceiling, answers = ceiling_of(whole, labels), whole.argmax(-1)
    assert ceiling.loss(answers) == pytest.approx(3 / ROWS, rel=0.02)
    margins = np.sort(whole, axis=-1)
    row = int((margins[:, -1] - margins[:, -2]).argmin())
    answers[row] = int(whole[row].argsort()[-2])
    assert ceiling.loss(answers) >= 3 / ROWS * 0.98


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_where_labels_are_the_answers_every_change_is_lost(scale: float) -> None:
    """The ceiling of agreement is the share of changed answers, at the upper limit of its interval."""
    rng = np.random.default_rng(0)
    whole, _ = drawn(rng, scale)
    answers = (whole + scale * rng.standard_normal(whole.shape)).argmax(-1)
    share = (whole.argmax(-1) != answers).mean()
    ceiling = ceiling_of(whole, whole.argmax(-1), are_answers=True)
    loss = ceiling.loss(answers)
    assert share < loss < 1.3 * share
    assert isinstance(loss, float), "it is stored as JSON"


def test_few_rows_have_no_ceiling() -> None:
    assert LossCeiling.of(*drawn(np.random.default_rng(0), 1.0, 20)) is None
