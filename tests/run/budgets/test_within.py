"""Attempts to remove units and to train the rest: the fastest that holds the metric is delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compressor
from compressor.config.run import Recipe
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import load
from compressor.pruning.model import ResampledScore
from compressor.report import load as load_report
from compressor.results import NoteCode
from compressor.run.steps import within
from compressor.store import Store
from graph_passes import Plan
from tests.command import compress
from tests.faults import fails_with
from tests.run.budgets.budget_runs import budget_recipe
from tests.run.listeners import RecordingListener, interrupt

pytestmark = pytest.mark.usefixtures("times_by_macs")

Losses = Callable[..., list[float]]


def recipe_of(inputs: Path, out: Path, **fields: Any) -> Recipe:
    return budget_recipe(inputs, out, **{"max_drop": 0.5, "distill": True, "distill_steps": 3, **fields})


def holding(*numbers: int) -> Losses:
    """Losses of which those of some attempts are within what is allowed."""

    def losses(whole: object, scores: Sequence[ResampledScore], **kind: object) -> list[float]:
        return [0.0 if number in numbers else 1.0 for number in range(len(scores))]

    return losses


def finish(recipe: Recipe, stage: str = "") -> tuple[Plan, dict[str, torch.Tensor], RecordingListener]:
    """The plan and the weights of a run, which is interrupted before a stage and repeated."""
    if stage:
        with pytest.raises(KeyboardInterrupt):
            compressor.compress(recipe, RecordingListener(stage, interrupt))
    listener = RecordingListener()
    compressor.compress(recipe, listener)
    out = recipe.output.out
    return Plan.load(out / "plan.json"), dict(load(out).model.state_dict()), listener


@pytest.mark.parametrize("held", [(0,), (0, 1), (1,)])
def test_an_attempt_goes_on_from_the_fastest_that_holds(
    held: tuple[int, ...], answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three attempts; the delivered plan is that of the fastest that holds, and what starts from it keeps less."""
    monkeypatch.setattr(within, "upper_losses", holding(*held))
    monkeypatch.setattr(within, "_CLOSE", 1.0)
    attempts: list[within._Attempt] = []
    write = within._Search._write

    def record(search: within._Search, stored: Sequence[within._Attempt]) -> None:
        attempts[:] = stored
        write(search, stored)

    monkeypatch.setattr(within._Search, "_write", record)
    recipe = recipe_of(answered, tmp_path / "out")
    plan, _, listener = finish(recipe)
    assert NoteCode.BUDGET_MET in listener.codes
    trained = [listener.codes.count(code) for code in (NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN)]
    assert (sum(trained), plan.method) == (1, "reconstruct")  # notes are those of the delivered attempt
    assert plan.heads_kept + plan.neurons_kept < plan.heads + plan.neurons
    for number, attempt in enumerate(attempts):
        faster = [attempts[start].speedup for start in held if start < number]
        assert attempt.start == (None if not faster else max(held, key=lambda n: attempts[n].speedup * (n < number)))
        failed = [other.speedup for index, other in enumerate(attempts[:number]) if index not in held]
        assert all(attempt.speedup > speed for speed in faster)
        assert all(attempt.speedup < speed for speed in failed if speed > max(faster, default=0))


@pytest.mark.parametrize(
    "stage", ["scoring the whole model", "training on the outputs", "scoring attempt 2", "compressed: exporting"]
)
def test_an_interrupted_run_goes_on_to_the_same_weights(
    stage: str, answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(within, "upper_losses", holding(0))
    expected = finish(recipe_of(answered, tmp_path / "whole"))
    plan, weights, listener = finish(recipe_of(answered, tmp_path / "out"), stage)
    assert plan == expected[0]
    assert all(torch.equal(weights[name], weight) for name, weight in expected[1].items())
    assert NoteCode.RESUMED in listener.codes


def test_where_no_attempt_holds_every_unit_stays_and_the_command_fails(
    answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(within, "upper_losses", holding())
    out = tmp_path / "out"
    arguments = ["--max-drop", "0.5", "--distill", "--distill-steps", "2", "--batch", "1", "--seq", "8"]
    data = ["--data", str(answered / "rows.tsv"), "--max-length", "8", "--batch-size", "8", "--seconds", "0.01"]
    result = compress(capfd, str(answered / "model"), *data, *arguments, "-o", str(out))
    assert result.code == 4
    report = load_report(out)
    assert NoteCode.NOTHING_HOLDS in {note.code for note in report.notes}
    assert report.plan.heads_kept + report.plan.neurons_kept == report.plan.heads + report.plan.neurons
    assert not (out / "model.safetensors").exists()  # the weights are those of the model folder


def test_too_few_minutes_are_refused(answered: Path, tmp_path: Path) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field="minutes"):
        compressor.compress(recipe_of(answered, tmp_path / "out", minutes=1e-3))


def test_minutes_bound_the_training_of_every_attempt(
    answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(within, "upper_losses", holding(0, 1, 2, 3, 4))
    trained: list[float] = []
    run = within.distill.FUNCTIONS.run

    def train(step: Any, *arguments: Any) -> Any:
        trained.append(step.minutes)
        return run(step, *arguments)

    functions = within.distill.FUNCTIONS
    monkeypatch.setattr(within.distill, "FUNCTIONS", type(functions)(train, check=functions.check))
    finish(recipe_of(answered, tmp_path / "out", minutes=5))
    assert len(trained) > 1
    assert all(minutes * (5 - number) < 5 for number, minutes in enumerate(trained))


def test_attempts_are_stored_as_they_are(tmp_path: Path) -> None:
    store = Store(tmp_path)
    score = within._Score(metric=0.1 + 0.2, draws=(float("nan"), 0.3), divergence=float("inf"))
    attempts = (within._Attempt(speedup=3.5), within._Attempt(speedup=2.0, start=0, score=score, failure="x"))
    (tmp_path / "attempts.json").write_bytes(within._ATTEMPTS.dump_json(attempts))
    first, second = within._stored(store)
    assert first == attempts[0]
    resampled = second.resampled
    assert resampled is not None
    assert (resampled.metric, resampled.divergence) == (0.1 + 0.2, np.inf)
    assert np.isnan(resampled.draws[0])
