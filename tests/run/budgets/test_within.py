"""Attempts to remove units, and to train the rest or not: the fastest that holds the metric is delivered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import compressor
from compressor.config.run import Recipe
from compressor.config.sections import EngineConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import load
from compressor.pruning.bisect import ResampledScore
from compressor.report import load as load_report
from compressor.report.frontier import FRONTIER_HTML, FRONTIER_JSON, Frontier
from compressor.results import DropStatus, NoteCode
from compressor.run import pipeline
from compressor.run.rebuild import load_run
from compressor.run.run_context import RunContext
from compressor.run.steps import distill, within
from compressor.store import Store
from graph_passes import Plan
from tests.command import compress
from tests.run.budgets.budget_runs import budget_recipe
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import learn

pytestmark = pytest.mark.usefixtures("times_by_macs")

Losses = Callable[..., list[float]]


UNTRAINED: dict[str, Any] = {"max_drop": 0.9, "certify": 0.5, "distill": False, "distill_steps": 2000}
SHORT = "--batch 1 --seq 8 --seconds 0.01 --threads 1 --max-length 8".split()


def recipe_of(inputs: Path, out: Path, **fields: Any) -> Recipe:
    return budget_recipe(inputs, out, **{"max_drop": 0.5, "distill": True, "distill_steps": 3, **fields})


def holding(*numbers: int) -> Losses:
    """Losses of which those of some attempts are within what is allowed."""

    def losses(whole: object, scores: Sequence[ResampledScore], **kind: object) -> list[float]:
        return [0.0 if number in numbers else 1.0 for number in range(len(scores))]

    return losses


def recorded(patch: pytest.MonkeyPatch) -> list[within._Attempt]:
    """The attempts of the next run, as they were last stored."""
    attempts: list[within._Attempt] = []
    write = within._Search._write

    def record(search: within._Search, stored: Sequence[within._Attempt]) -> None:
        attempts[:] = stored
        write(search, stored)

    patch.setattr(within._Search, "_write", record)
    return attempts


def finish(recipe: Recipe, stage: str = "") -> tuple[Plan, dict[str, torch.Tensor], RecordingListener]:
    """The plan and the weights of a run, which is interrupted before a stage and repeated."""
    if stage:
        with pytest.raises(KeyboardInterrupt):
            compressor.compress(recipe, RecordingListener(stage, interrupt))
    listener = RecordingListener()
    compressor.compress(recipe, listener)
    out = recipe.output.out
    return Plan.load(out / "plan.json"), dict(load(out).model.state_dict()), listener


@pytest.mark.parametrize(
    "held", [pytest.param((0,), marks=pytest.mark.zoo), (0, 1), pytest.param((1,), marks=pytest.mark.zoo)]
)
def test_an_attempt_goes_on_from_the_fastest_that_holds(
    held: tuple[int, ...], answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three attempts; the delivered plan is that of the fastest that holds, and what starts from it keeps less."""
    monkeypatch.setattr(within, "upper_losses", holding(*held))
    monkeypatch.setattr(within, "_CLOSE_TRAINED", 1.0)
    attempts = recorded(monkeypatch)
    learned = learn(recipe_of(answered, tmp_path / "out"))
    plan, codes = learned.selected.plan, learned.listener.codes
    assert NoteCode.BUDGET_MET in codes
    trained = [codes.count(code) for code in (NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN)]
    assert (sum(trained), plan.method) == (1, "reconstruct")  # notes are those of the delivered attempt
    assert plan.heads_kept + plan.neurons_kept < plan.heads + plan.neurons
    for number, attempt in enumerate(attempts):
        faster = [attempts[start].speedup for start in held if start < number]
        assert attempt.start == (None if not faster else max(held, key=lambda n: attempts[n].speedup * (n < number)))
        failed = [former.speedup for index, former in enumerate(attempts[:number]) if index not in held]
        assert all(attempt.speedup > speed for speed in faster)
        assert all(attempt.speedup < speed for speed in failed if speed > max(faster, default=0))


@pytest.mark.zoo
@pytest.mark.parametrize(("fields", "stage"), [({}, "training on the outputs"), (UNTRAINED, "certificate")])
def test_an_interrupted_run_learns_the_same(
    fields: dict[str, Any], stage: str, answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(within, "upper_losses", holding(0))
    expected = learn(recipe_of(answered, tmp_path / "whole", **fields))
    recipe = recipe_of(answered, tmp_path / "out", **fields)
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(recipe, RecordingListener(stage, interrupt))
    resumed = learn(recipe)
    assert NoteCode.RESUMED in resumed.codes
    assert resumed.selected.plan == expected.selected.plan
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in expected.weights.items())
    assert resumed.selected.certificate == expected.selected.certificate
    assert (expected.selected.certificate is None) == (fields is not UNTRAINED)


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("fields", "stages"),
    [
        ({}, ("scoring the whole model", "training on the outputs", "scoring attempt 2", "compressed: exporting")),
        (UNTRAINED, ("refitting", "scoring attempt 2", "certificate", "compressed: exporting")),
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_weights(
    fields: dict[str, Any], stages: Sequence[str], answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(within, "upper_losses", holding(0))
    expected = finish(recipe_of(answered, tmp_path / "whole", **fields))
    certificate = load_report(tmp_path / "whole").certificate
    assert (certificate is None) == (fields is not UNTRAINED)
    for number, stage in enumerate(stages):
        out = tmp_path / f"{number}"
        plan, weights, listener = finish(recipe_of(answered, out, **fields), stage)
        assert plan == expected[0]
        assert all(torch.equal(weights[name], weight) for name, weight in expected[1].items())
        assert NoteCode.RESUMED in listener.codes
        assert load_report(out).certificate == certificate


def test_attempts_that_are_not_trained_begin_with_the_whole_model(
    answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an attempt exceeds its speed by bounds the next one, and no plan is scored twice."""
    monkeypatch.setattr(within, "upper_losses", holding(1, 3))
    listener = RecordingListener("compressed: exporting", interrupt)
    recipe = recipe_of(answered, tmp_path / "out", max_drop=0.9, distill=False, distill_steps=2000)
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(recipe, listener)
    attempts = within._stored(Store(tmp_path / "out.partial" / "learning" / "within"))
    scored = [attempt for attempt in attempts if attempt.score is not None]
    assert all(attempt.start is None and attempt.minutes is None for attempt in attempts)
    assert len({tuple(attempt.counts.values()) for attempt in scored}) == len(scored) == 5
    assert len([stage for stage in listener.stages if stage.startswith("scoring attempt")]) == len(scored)


@pytest.mark.parametrize(
    "fields",
    [{}, pytest.param({"max_drop": 0.9, "distill": False, "distill_steps": 2000}, marks=pytest.mark.zoo)],
)
def test_slower_attempts_that_hold_are_rungs(
    fields: dict[str, Any], answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a finished folder; the engine of the run is the last rung of the page, although the run was resumed."""
    monkeypatch.setattr(within, "upper_losses", holding(0, 1))
    plan, _, listener = finish(recipe_of(answered, tmp_path / "out", **fields), "compressed: exporting")
    ladder = tmp_path / "out" / "ladder"
    frontier = Frontier.model_validate_json((ladder / FRONTIER_JSON).read_bytes())
    assert (ladder / FRONTIER_HTML).is_file()
    slower, fastest = frontier.rungs
    assert frontier.is_judged
    assert frontier.fastest is not None
    assert frontier.ended is None
    assert (slower.folder, fastest.folder) == (slower.name, "..")
    assert slower.heads + slower.neurons > fastest.heads + fastest.neurons == plan.heads_kept + plan.neurons_kept
    assert NoteCode.RUNG_FINISHED in listener.codes
    run = load_run(ladder / slower.name, {})
    assert all(proof.holds for proof in run.report.proofs)
    assert run.report.speeds
    assert {group.name for group in run.report.plan.groups} == {group.name for group in plan.groups}
    assert (ladder / slower.name / "model.safetensors").is_file()
    assert Plan.load(ladder / slower.name / "plan.json").groups == run.report.plan.groups


@pytest.mark.zoo
@pytest.mark.parametrize("fails", [True, False])
def test_rungs_that_cannot_be_built_in_time_are_named(
    fails: bool, answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(within, "upper_losses", holding(0, 1))
    deliver, rungs = pipeline._deliver, within._rungs

    def deliver_all_but_rungs(run: RunContext, *arguments: Any) -> Any:
        if run.work.result.parent.name == "ladder":
            raise InputError("the outputs differ", code=ErrorCode.NUMBERS_DIFFER)
        return deliver(run, *arguments)

    def rungs_without_time(*arguments: Any) -> Any:
        milder = rungs(*arguments)
        assert milder is not None
        return replace(milder, deadline=0.0)

    if fails:
        monkeypatch.setattr(pipeline, "_deliver", deliver_all_but_rungs)
    else:
        monkeypatch.setattr(within, "_rungs", rungs_without_time)
    _, _, listener = finish(recipe_of(answered, tmp_path / "out"))
    ladder = tmp_path / "out" / "ladder"
    frontier = Frontier.model_validate_json((ladder / FRONTIER_JSON).read_bytes())
    assert [rung.folder for rung in frontier.rungs] == [".."]
    assert frontier.ended is not None
    assert not [path for path in ladder.iterdir() if path.is_dir()]
    assert NoteCode.LADDER_ENDED in listener.codes


@pytest.mark.parametrize("distills", [True, pytest.param(False, marks=pytest.mark.zoo)])
def test_where_no_attempt_holds_every_unit_stays(
    distills: bool, answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command fails after trainings, and says why once."""
    monkeypatch.setattr(within, "upper_losses", holding())
    out = tmp_path / "out"
    arguments = ["--max-drop", "0.5", *(["--distill", "--distill-steps", "2", "--batch-size", "8"] if distills else [])]
    result = compress(capfd, answered / "model", "--data", answered / "rows.tsv", *arguments, *SHORT, "-o", out)
    assert result.code == (4 if distills else 0)
    assert result.err.count("no unit is removed: none of ") == 1
    report = load_report(out)
    code = NoteCode.NOTHING_HOLDS if distills else NoteCode.NOTHING_REMOVED
    assert code in {note.code for note in report.notes}
    assert report.plan.heads_kept + report.plan.neurons_kept == report.plan.heads + report.plan.neurons
    assert not (out / "model.safetensors").exists()  # the weights are those of the model folder


@pytest.mark.zoo
def test_a_loss_on_the_test_rows_alone_ends_with_its_exit_code(
    answered: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model answers all test rows rightly, and every attempt holds."""
    monkeypatch.setattr(within, "upper_losses", holding(0, 1, 2, 3, 4))
    rows, out = answered / "rows.tsv", tmp_path / "out"
    data: list[str | Path] = ["--data", rows, "--test-data", rows]
    result = compress(capfd, answered / "model", *data, "--max-drop", "0", *SHORT, "-o", out)
    assert (result.code, result.error_code) == (4, ErrorCode.METRIC_FELL)
    report = load_report(out)
    assert report.drop_status is DropStatus.FAILED
    assert report.scores[0].dense == 1
    assert report.plan.neurons_kept + report.plan.heads_kept < report.plan.neurons + report.plan.heads


def test_rows_of_another_task_end_the_run(inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The whole model gives one answer to all rows, so that no plan could lose anything."""
    rows: list[str | Path] = ["--data", inputs / "rows.tsv"]
    result = compress(capfd, inputs / "model", *rows, "--max-drop", "0.01", *SHORT, "-o", tmp_path / "out")
    assert (result.code, result.error_code) == (3, ErrorCode.LABEL_MISMATCH)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("max_drop", "lost", "precision", "expected"),
    [
        (0.03, 0.0, "fp32", [0, 1, 2]),
        (0.03, 0.015, "fp32", [0]),
        (0.03, 0.015, "int8", [0, 1, 2]),  # scores of engines that round have what rounding costs
        (0.03, 0.015, "int4w", [0, 1, 2]),
        (0.03, -0.02, "fp32", [0, 1, 2]),
        (0.0, 0.0, "fp32", []),
        (0.1, 0.2, "fp32", []),
    ],
)
def test_attempts_hold_whose_loss_is_allowed_beside_that_of_the_engine(
    max_drop: float, lost: float, precision: str, expected: list[int]
) -> None:
    def score(loss: float) -> ResampledScore:
        return ResampledScore(0.9 - loss, np.full(50, 0.9 - loss), loss)

    search: Any = object.__new__(within._Search)
    search.step, search.trains = SimpleNamespace(max_drop=max_drop, trains=True), True
    recipe = Recipe(model="m", precision=precision)
    built = EngineConfig(precision=recipe.engine.definite_precision)
    search.base = SimpleNamespace(engine=SimpleNamespace(lost=lambda task: lost, choice=SimpleNamespace(config=built)))
    rows = SimpleNamespace(eval_task=SimpleNamespace(higher_is_better=True))
    search.context = SimpleNamespace(run=SimpleNamespace(rows=rows, recipe=recipe))
    search.whole = score(0.0)
    losses = [0.01, 0.02, 0.03, 0.04]
    attempts = [within._Attempt(speedup=2.0, score=score(loss)) for loss in losses]
    assert search._holding(attempts) == expected


def test_attempts_are_scored_as_the_engine_rounds(
    answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score by which an attempt holds is that of the engine that is delivered, on the same rows."""
    monkeypatch.setattr(within, "upper_losses", holding(0))
    attempts = recorded(monkeypatch)
    compressor.compress(recipe_of(answered, tmp_path / "out", precision="int8", max_drop=0.9))
    report = load_report(tmp_path / "out")
    (delivered,) = (attempt for attempt in attempts if attempt.holds)
    assert delivered.counts == {group.name: len(group.kept) for group in report.plan.groups}
    (score,) = (score for score in report.scores if score.split == "eval")
    assert delivered.score is not None
    assert delivered.score.metric == score.compressed
    assert delivered.score.divergence > 0


def test_no_unit_is_removed_where_no_attempt_fits(
    answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = recorded(monkeypatch)
    compressor.compress(recipe_of(answered, tmp_path / "out", minutes=1e-3))
    report = load_report(tmp_path / "out")
    assert not attempts
    assert (report.plan.heads_kept, report.plan.neurons_kept) == (report.plan.heads, report.plan.neurons)
    assert NoteCode.TIME_LIMITED in [note.code for note in report.notes]


@pytest.mark.zoo
@pytest.mark.parametrize(
    "stage",
    ["", "refitting", "scoring attempt 1", "compressed: exporting"],
)
def test_units_are_removed_without_training_where_none_fits(
    stage: str, answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(within, "upper_losses", holding(0))
    monkeypatch.setattr(
        within, "_deadline", lambda *_: time.perf_counter() + 30
    )  # a training has a quarter of 5 minutes
    plan, _, listener = finish(recipe_of(answered, tmp_path / "out", minutes=5), stage)
    assert not any("training on the outputs" in each for each in listener.stages)
    assert not {NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN} & set(listener.codes)
    codes = [note.code for note in load_report(tmp_path / "out").notes]
    assert (codes.count(NoteCode.BUDGET_MET), codes.count(NoteCode.TIME_LIMITED)) == (1, 2)
    assert plan.heads_kept + plan.neurons_kept < plan.heads + plan.neurons


@pytest.mark.zoo
def test_minutes_bound_the_training_of_every_attempt(
    answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(within, "upper_losses", holding(0, 1, 2, 3, 4))
    trained: list[float] = []
    run = distill.FUNCTIONS.run

    def train(step: Any, *arguments: Any) -> Any:
        trained.append(step.minutes)
        return run(step, *arguments)

    functions = distill.FUNCTIONS
    monkeypatch.setattr(distill, "FUNCTIONS", type(functions)(train, check=functions.check))
    monkeypatch.setattr(within._Search, "_holds_untrained", lambda *_: False)
    learn(recipe_of(answered, tmp_path / "out", minutes=5))
    assert len(trained) > 1
    assert all(minutes * (5 - number) < 5 for number, minutes in enumerate(trained))


@pytest.mark.parametrize(
    "stage", ["", *(pytest.param(f"scoring attempt {n} without", marks=pytest.mark.zoo) for n in (1, 2))]
)
def test_the_minutes_go_to_attempts_that_do_not_hold_untrained(
    stage: str, answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts that hold as they are get faster; the first that does not is trained, and so are later ones."""
    monkeypatch.setattr(within, "upper_losses", holding(0, 1))
    recipe = recipe_of(answered, tmp_path / "out", minutes=5)
    if stage:
        with pytest.raises(KeyboardInterrupt):
            compressor.compress(recipe, RecordingListener(stage, interrupt))
    learned = learn(recipe)
    stages, plan = learned.listener.stages, learned.selected.plan
    checked = [name for name in stages if "without training" in name]
    scored = {name for name in stages if name.startswith("scoring attempt") and name not in checked}
    assert not any("attempt 1 on" in name or "attempt 2 on" in name for name in scored)
    assert any("training on the outputs" in name for name in stages)
    assert NoteCode.BUDGET_MET in learned.codes
    assert not {NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN} & learned.codes  # the delivered attempt is not trained
    assert plan.heads_kept + plan.neurons_kept < plan.heads + plan.neurons
    assert all(torch.isfinite(weight).all() for weight in learned.weights.values())


def test_attempts_are_stored_as_they_are(tmp_path: Path) -> None:
    search: Any = object.__new__(within._Search)
    search.store = Store(tmp_path)
    score = ResampledScore(0.1 + 0.2, np.array([float("nan"), 0.3]), float("inf"))
    attempts = (within._Attempt(speedup=3.5), within._Attempt(speedup=2.0, start=0, score=score, failure="x"))
    search._write(attempts)
    first, second = within._stored(search.store)
    assert first == attempts[0]
    assert second.score is not None
    assert (second.score.metric, second.score.divergence) == (0.1 + 0.2, np.inf)
    np.testing.assert_array_equal(second.score.draws, score.draws)
