"""The most that a classifier loses where its answers change."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.measure.ceiling import LossCeiling

ROWS, CLASSES = 500, 3


def statistics(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.stack([logits.argmax(-1), labels], axis=-1)


def accuracy(values: np.ndarray) -> float:
    return float((values[:, 0] == values[:, 1]).mean())


def error_rate(values: np.ndarray) -> float:
    return 1 - accuracy(values)


def drawn(rng: np.random.Generator, scale: float, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a whole model and labels that follow them; at a scale other than 1 it is over- or underconfident."""
    true = 2 * rng.standard_normal((rows, CLASSES))
    labels = (true + rng.gumbel(size=true.shape)).argmax(-1)  # of the softmax of these logits
    return scale * true, labels


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("noise", [0.2, 0.5, 1.0])
def test_a_change_that_knows_no_label_rarely_loses_more(scale: float, noise: float) -> None:
    """However sure of its answers the whole model is; the true loss is that of many rows."""
    losses, ceilings = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        whole, labels = drawn(rng, scale)
        ceiling = LossCeiling.of(whole, labels, statistics, accuracy, seed)
        ceilings.append(ceiling.loss(whole + scale * noise * rng.standard_normal(whole.shape), higher_is_better=True))
        many, answers = drawn(rng, scale, 10_000)
        changed = many + scale * noise * rng.standard_normal(many.shape)
        losses.append(accuracy(statistics(many, answers)) - accuracy(statistics(changed, answers)))
    assert np.mean(np.array(ceilings) < np.mean(losses)) <= 0.1
    assert np.mean(ceilings) < 2 * np.mean(losses)


def test_an_equal_model_loses_no_more_than_three_rows() -> None:
    """Of so many rows that none changes, three may change among other rows."""
    whole, labels = drawn(np.random.default_rng(0), 1.0)
    ceiling = LossCeiling.of(whole, labels, statistics, accuracy, 0)
    assert ceiling.loss(2 * whole, higher_is_better=True) == pytest.approx(3 / ROWS, rel=0.02)


def test_a_loss_counts_whichever_direction_is_better() -> None:
    rng = np.random.default_rng(0)
    whole, labels = drawn(rng, 1.0)
    changed = whole + rng.standard_normal(whole.shape)
    of_accuracy, of_errors = (
        LossCeiling.of(whole, labels, statistics, score, 0).loss(changed, higher_is_better=higher)
        for score, higher in ((accuracy, True), (error_rate, False))
    )
    assert of_accuracy == pytest.approx(of_errors)
    assert of_accuracy > 0


def test_where_labels_are_the_answers_every_change_is_lost() -> None:
    """The ceiling of agreement is the share of changed answers, at the upper limit of its interval."""
    rng = np.random.default_rng(0)
    whole, _ = drawn(rng, 1.0)
    changed = whole + rng.standard_normal(whole.shape)
    ceiling = LossCeiling.of(whole, whole.argmax(-1), statistics, accuracy, 0)
    share = (whole.argmax(-1) != changed.argmax(-1)).mean()
    assert share < ceiling.loss(changed, higher_is_better=True) < 1.3 * share
