"""Scores of the plans that `--max-drop` tries outlive an interruption: the same command goes on to the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import compressor
from compressor.pruning import bisect
from compressor.pruning.model import ResampledScore
from compressor.results import NoteCode
from tests.run.budgets.budget_runs import budget_recipe
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import learn


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
