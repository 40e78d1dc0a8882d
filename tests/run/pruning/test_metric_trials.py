"""The loss that is expected of a plan follows its divergence, and is known better than by the plan alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.model_folder import ModelFolder, load
from compressor.progress import NullListener, RunLog
from compressor.run.pruning.metric_trials import (
    ResampledScore,
    TrialScorer,
    estimate_losses,
    scored_statistics,
    upper_losses,
)
from compressor.tasks import Data, open_data
from compressor.tasks.forwards import forward_arguments
from compressor.training.distillation import Distillation
from tests import folders
from tests.tasks import questions
from tests.tasks.rows import jsonl, tsv
from tests.training.students import changed

DRAWS = 200
NAN = float("nan")


def scores(losses: Sequence[float], divergences: Sequence[float], noise: float, seed: int = 0) -> list[ResampledScore]:
    """The whole model with metric 0.9, and plans whose losses are disturbed in the same way as those of their draws."""
    rng = np.random.default_rng(seed)
    plans = []
    for loss, divergence in zip(losses, divergences, strict=True):
        metric, *draws = 0.9 - loss + noise * rng.standard_normal(1 + DRAWS)
        plans.append(ResampledScore(metric, np.array(draws), divergence))
    return [ResampledScore(0.9, np.full(DRAWS, 0.9), 0.0), *plans]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_losses_in_proportion_to_divergences_are_those_of_the_plans(higher_is_better: bool) -> None:
    divergences = [0.01, 0.02, 0.05]
    sign = 1 if higher_is_better else -1
    whole, *plans = scores([sign * 0.2 * divergence for divergence in divergences], divergences, noise=0.0)
    estimates = estimate_losses(whole, plans, higher_is_better=higher_is_better)
    assert [estimate.loss for estimate in estimates] == pytest.approx([0.002, 0.004, 0.01])
    assert [estimate.error for estimate in estimates] == pytest.approx([0, 0, 0])


def test_a_small_loss_is_known_better_where_larger_ones_are() -> None:
    """Beside the truth, the error and the error that is reported are those of the larger losses in proportion."""
    divergences = [0.02, 0.05, 0.1]
    alone, together = [], []
    for seed in range(50):
        whole, *plans = scores([0.2 * divergence for divergence in divergences], divergences, 0.006, seed)
        alone += estimate_losses(whole, plans[:1], higher_is_better=True)
        together += estimate_losses(whole, plans, higher_is_better=True)[:1]
    for estimates, error in ((alone, 0.006), (together, 0.02 / 0.17 * np.sqrt(3) * 0.006)):
        assert np.std([estimate.loss for estimate in estimates]) == pytest.approx(error, rel=0.3)
        assert [estimate.error for estimate in estimates] == pytest.approx(np.full(50, error), rel=0.3)


def test_a_plan_loses_more_than_its_upper_loss_about_once_in_twenty_times() -> None:
    """The true losses are in proportion to the divergences; the scores and their draws have noise of the same size."""
    divergences = [0.02, 0.05, 0.08]
    exceeded = 0
    for seed in range(400):
        whole, *plans = scores([0.2 * divergence for divergence in divergences], divergences, 0.006, seed)
        exceeded += 0.2 * divergences[0] > upper_losses(whole, plans, higher_is_better=True)[0]
    assert 0.02 < exceeded / 400 < 0.09


@pytest.mark.parametrize(("metric", "divergence"), [(0.5, NAN), (0.5, float("inf")), (NAN, 0.03)])
def test_a_plan_without_finite_answers_loses_everything_and_says_nothing_about_others(
    metric: float, divergence: float
) -> None:
    whole, *plans = scores([0.002, 0.004], [0.01, 0.02], noise=0.0)
    failed = ResampledScore(metric, np.full(DRAWS, metric), divergence)
    with_failed = estimate_losses(whole, [*plans, failed], higher_is_better=True)
    assert with_failed[:2] == estimate_losses(whole, plans, higher_is_better=True)
    assert with_failed[2].loss == np.inf


def test_a_model_that_answers_by_chance_says_nothing_about_small_changes() -> None:
    whole, *plans = scores([0.002, 0.004, 0.4], [0.01, 0.02, 40.0], noise=0.0)
    estimates = estimate_losses(whole, plans, higher_is_better=True)
    assert [estimate.loss for estimate in estimates[:2]] == pytest.approx([0.002, 0.004])


def test_a_plan_is_not_accepted_against_what_it_certainly_loses_itself() -> None:
    whole, *plans = scores([0.03, 0.04, 0.05], [0.1, 0.4, 0.45], noise=0.001)
    (expected, *_), (upper, *_) = (
        estimate_losses(whole, plans, higher_is_better=True),
        upper_losses(whole, plans, higher_is_better=True),
    )
    assert expected.loss < 0.015
    assert upper == pytest.approx(0.028, abs=0.003)


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_plans_without_divergence_lose_what_they_show(loss: float) -> None:
    whole, *plans = scores([loss, loss], [0.0, 0.0], noise=0.0)
    estimates = estimate_losses(whole, plans, higher_is_better=True)
    assert [estimate.loss for estimate in estimates] == pytest.approx([loss, loss])


def test_undefined_draws_are_ignored() -> None:
    whole, *plans = scores([0.002, 0.004], [0.01, 0.02], noise=0.001)
    plans[0].draws[3] = NAN
    assert np.isfinite(estimate_losses(whole, plans, higher_is_better=True)).all()


def regression(path: Path) -> tuple[ModelFolder, Data]:
    """A regression with one row more than a batch holds."""
    rows = [f"{number % 7}\t{' '.join(folders.WORDS[number % 9 : number % 9 + 5])}" for number in range(33)]
    file = tsv(path / "rows.tsv", *rows)
    torch.manual_seed(0)
    folder = load(folders.save(folders.bert(num_labels=1), path / "model"))
    return folder, open_data(folders.rows_config(file, file, file), folder)


def question_answering(path: Path) -> tuple[ModelFolder, Data]:
    """Questions about contexts of several windows."""
    contexts = [" ".join(questions.WORDS[: 2 + number]) for number in range(10)]
    file = jsonl(path / "rows.jsonl", *(questions.row(context) for context in contexts))
    folder = questions.folder_of(questions.wordpieces())
    return folder, open_data(folders.rows_config(file, file, file, max_length=10, stride=2), folder)


@pytest.mark.parametrize("source", [regression, question_answering])
def test_scores_are_those_of_the_rows(source: Callable[[Path], tuple[ModelFolder, Data]], tmp_path: Path) -> None:
    folder, data = source(tmp_path)
    model, log = folder.model.eval(), RunLog(NullListener())
    scorer = TrialScorer(model, data.task, data.eval, 0, log)
    whole, before = scorer.score_whole(), {name: tensor.clone() for name, tensor in scorer.whole_state.items()}
    same = scorer.score("the same weights")
    assert (same.metric, same.divergence) == (whole.metric, pytest.approx(0, abs=1e-9))
    np.testing.assert_array_equal(same.draws, whole.draws)
    model.load_state_dict(changed(model).state_dict())
    other = scorer.score("other weights")
    values = scored_statistics(model, data.task, data.eval, "other weights", log)
    assert other.metric == data.task.score(values)
    assert 0 < other.divergence < np.inf
    for name, tensor in scorer.whole_state.items():
        assert torch.equal(tensor, before[name])


def test_the_whole_model_computes_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = load(folders.save(folders.bert(), tmp_path / "model"))
    file = tsv(tmp_path / "rows.tsv", *(f"{number % 2}\tword {number}" for number in range(20)))
    data = open_data(folders.rows_config(file, file, file), folder)
    model, computed = folder.model.eval(), []
    forward = type(model).forward

    @functools.wraps(forward)
    def counted(self: nn.Module, *args: object, **inputs: Tensor) -> object:
        computed.extend(["model" if self is model else "whole model"] * len(inputs["input_ids"]))
        return forward(self, *args, **inputs)

    monkeypatch.setattr(type(model), "forward", counted)
    scorer = TrialScorer(model, data.task, data.eval, 0, RunLog(NullListener()))
    scores = [scorer.score_whole(), scorer.score("trial 1"), scorer.score("trial 2")]
    assert [score.divergence for score in scores] == pytest.approx([0, 0, 0], abs=1e-9)
    assert computed.count("whole model") <= 2 * 20  # a batch beforehand shows whether the task is a regression
    assert computed.count("model") == 2 * 20


def test_the_divergence_of_a_regression_is_over_the_variance_of_all_rows(tmp_path: Path) -> None:
    """One row is left for the last batch, whose own variance is zero."""
    folder, data = regression(tmp_path)
    model, student = folder.model.eval(), changed(folder.model).eval()
    distillation = Distillation.of(model, data.task.loss_outputs).with_variance_of(data.task, data.eval)
    batch = data.task.model_inputs(data.task.collate(list(data.eval)))
    with torch.no_grad():
        dense, other = (part(**forward_arguments(part, batch)).logits.double() for part in (model, student))
    expected = float((dense - other).square().mean() / dense.var(correction=0))
    assert distillation.mean_divergence(student, data.task, data.eval) == pytest.approx(expected, rel=1e-4)
