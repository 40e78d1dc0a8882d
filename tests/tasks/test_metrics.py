"""Metrics agree with their definitions, on any rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, matthews_corrcoef

from compressor.tasks import Metric, task_classes
from compressor.tasks.metrics import (
    accuracy,
    bits_per_token,
    bleu,
    bleu_counts,
    f1,
    macro_f1,
    matthews,
    mean_loss,
    pearson,
    perplexity,
    spearman,
)

CLASSES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30)
WORDS = [*"one two dog cat house red blue big".split(), "Two", ",", "dog's", "1,000", "."]
SENTENCES = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)


@settings(max_examples=30, deadline=None)
@given(CLASSES)
def test_metrics_of_classes_agree_with_their_definition(pairs: list[tuple[int, int]]) -> None:
    statistics = np.array(pairs, np.float64)
    predicted, labels = np.array(pairs).T
    equal = sum(prediction == label for prediction, label in pairs)
    assert accuracy(statistics) == pytest.approx(equal / len(pairs))
    is_first = np.stack([predicted == 1, labels == 1])
    assert f1(statistics) == pytest.approx(f1_score(is_first[1], is_first[0], zero_division=0.0))
    by_class = [f1_score(labels == number, predicted == number, zero_division=0.0) for number in sorted(set(labels))]
    assert macro_f1(statistics) == pytest.approx(np.mean(by_class))
    undefined = len(set(predicted)) == 1 or len(set(labels)) == 1
    assert matthews(statistics) == pytest.approx(0 if undefined else matthews_corrcoef(labels, predicted))


def test_correlations_of_constants_are_zero() -> None:
    constant, varied = np.ones(4), np.arange(4.0)
    assert spearman(np.stack([constant, varied], axis=1)) == pearson(np.stack([varied, constant], axis=1)) == 0.0
    assert spearman(np.stack([varied, varied**3], axis=1)) == pytest.approx(1.0)
    assert pearson(np.stack([varied, -varied], axis=1)) == pytest.approx(-1.0)


def test_perplexity_of_a_broken_model_is_infinite() -> None:
    assert perplexity(np.array([[1e6, 2.0]])) == math.inf


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 9)), min_size=1, max_size=9), st.randoms())
def test_a_resample_of_blocks_is_scored_as_its_text(blocks: list[tuple[float, int]], random: Any) -> None:
    resample = np.array(random.choices(blocks, k=len(blocks)))
    expected = sum(loss for loss, _ in resample) / sum(tokens for _, tokens in resample)
    assert mean_loss(resample) == pytest.approx(expected)
    assert math.log(perplexity(resample)) == pytest.approx(expected)
    assert bits_per_token(resample) == pytest.approx(math.log2(perplexity(resample)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=8), st.integers(0, 99))
def test_counts_of_any_rows_give_the_bleu_of_sacrebleu(pairs: list[tuple[str, str]], seed: int) -> None:
    counts = np.stack([bleu_counts(*pair) for pair in pairs])
    for chosen in (np.arange(len(pairs)), np.random.default_rng(seed).integers(0, len(pairs), len(pairs))):
        translations, references = zip(*(pairs[index] for index in chosen), strict=True)
        expected = sacrebleu.corpus_bleu(list(translations), [list(references)]).score
        assert bleu(counts[chosen]) == expected


@pytest.mark.parametrize("metric", [metric for task in task_classes() for metric in task.metrics], ids=lambda m: m.name)
def test_every_metric_has_a_point(metric: Metric) -> None:
    expected = {"bleu": 1.0, "loss": 0.00995, "bits-per-character": 0.01436}
    expected |= {"perplexity": 0.3, "pseudo_perplexity": 0.3}  # 1% of the whole model's
    assert metric.point_of(lambda: 30.0) == pytest.approx(expected.get(metric.name, 0.01), rel=1e-3)
    assert metric.point_of(lambda: 30.0) < metric.maximum
