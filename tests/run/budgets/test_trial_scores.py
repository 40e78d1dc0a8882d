"""Scores of the plans that `--max-drop` tries outlive an interruption: the same command goes on to the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import compressor
from compressor.pruning import bisect
from compressor.pruning.bisect import AttemptScores
from compressor.pruning.model import ResampledScore
from compressor.results import NoteCode
from tests.run.budgets.budget_runs import budget_recipe
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import learn


def test_scores_are_kept_by_the_numbers_of_units(tmp_path: Path) -> None:
    kept = AttemptScores(tmp_path / "trials.json", "one")
    assert kept.find({"a": 8}) is None
    for count, metric in ((8, 0.1 + 0.2), (16, np.nan)):
        kept.keep({"a": count}, ResampledScore(metric, np.array([metric, 0.3]), np.inf))
    score = AttemptScores(kept.path, "one").find({"a": 8})
    assert score is not None
    assert (score.metric, score.draws.tolist(), score.divergence) == (0.1 + 0.2, [0.1 + 0.2, 0.3], np.inf)
    undefined = kept.find({"a": 16})
    assert undefined is not None
    assert not undefined.is_finite
    assert kept.find({"a": 24}) is None
    assert AttemptScores(kept.path, "two").find({"a": 8}) is None
    kept.path.write_text("{")
    assert kept.find({"a": 8}) is None


@pytest.mark.usefixtures("times_by_macs")
def test_an_interrupted_bisection_goes_on_to_the_same_plan(
    answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trial does not hold. A run is interrupted before the second one and before the certificate."""

    def losses(dense: object, scores: Sequence[ResampledScore], **kind: object) -> list[float]:
        return [float(score.divergence >= scores[0].divergence) for score in scores]

    monkeypatch.setattr(bisect, "upper_losses", losses)
    whole, recipe = (budget_recipe(answered, tmp_path / name, max_drop=0.9, certify=0.5) for name in ("whole", "out"))
    expected = learn(whole)
    listeners = [RecordingListener(stage, interrupt) for stage in ("weights, trial 2", "certificate")]
    for listener in listeners:
        with pytest.raises(KeyboardInterrupt):
            compressor.compress(recipe, listener)
    resumed = learn(recipe)
    assert resumed.selected.plan == expected.selected.plan
    assert resumed.selected.plan.neurons_kept < resumed.selected.plan.neurons
    assert resumed.selected.certificate == expected.selected.certificate
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in expected.weights.items())
    assert NoteCode.RESUMED in resumed.codes
    trials = [
        [stage for stage in stages if "trial" in stage]
        for stages in (expected.stages, listeners[1].stages, resumed.stages)
    ]
    assert len(trials[0]) >= 4
    assert trials[1:] == [trials[0][2:], []]
    tested = resumed.stages.count("scoring a plan for the certificate on the evaluation rows")
    # Those that are tested besides the whole model, and the delivered one.
    assert resumed.stages.count("refitting the remaining weights") == tested
