"""Speeds of candidates: of the whole model, and with about as many units as a budget leaves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from compressor.config.sections import EngineConfig
from compressor.engines import choose
from compressor.engines.choices import Choice
from compressor.engines.choose import fastest, time_pruned, time_whole
from compressor.engines.trials import EngineTrials, Trial
from compressor.progress import ignore_progress
from compressor.results import Candidate, Note, NoteCode, Size
from compressor.targets import Engine
from graph_passes import PlanError

MILLISECONDS = {"dense": 12.0, "a": 4.0, "b": 5.0, "slow": 9.0, "half of a": 3.0, "half of b": 2.0, "half of slow": 1.0}
"""Time of each engine: `b` overtakes `a` when units are removed."""


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> EngineTrials:
    """Trials whose engines are names, timed by the table."""

    def median_times(engines: Sequence[Any], feeds: object, seconds: float) -> list[float]:
        return [MILLISECONDS[engine] / 1e3 for engine in engines]

    monkeypatch.setattr(choose, "median_times", median_times)
    notes: list[Note] = []
    log = SimpleNamespace(stage=lambda name: nullcontext(ignore_progress), notes=notes, add_notes=notes.extend)
    inputs: dict[Size, object] = {Size(1, 128): {}, Size(8, 128): {}}
    scorer = SimpleNamespace(dense=SimpleNamespace(engine="dense"))
    return cast(EngineTrials, SimpleNamespace(scorer=scorer, inputs=inputs, seconds=1.0, log=log))


def trial(name: str, *, holds: bool = True) -> Trial:
    candidate = Candidate(target=name, precision="fp32", holds=holds)
    return Trial(Choice(EngineConfig()), candidate, cast(Any, SimpleNamespace(engine=name)))


def half(trial: Trial, share: float) -> Engine:
    assert share == 0.5
    return cast(Engine, f"half of {trial.candidate.target}")


def test_the_engine_that_is_fastest_with_half_of_the_units_is_chosen(trials: EngineTrials) -> None:
    built = time_whole(trials, [trial("a"), trial("b"), trial("slow")])
    assert [row.candidate.speed for row in built] == pytest.approx([3.0, 12 / 5, 12 / 9])
    assert fastest(built, higher_is_better=True).candidate.target == "a"
    timed = time_pruned(trials, built, 0.5, half)
    assert [row.candidate.speed_pruned for row in timed] == [pytest.approx(4.0), pytest.approx(6.0), None]
    assert fastest(timed, higher_is_better=True).candidate.target == "b"


def fail(trial: Trial, share: float) -> Engine:
    raise PlanError("a product does not read units")


def test_engines_are_compared_by_the_whole_model_where_no_half_can_be_built(trials: EngineTrials) -> None:
    built = time_whole(trials, [trial("a"), trial("b")])
    assert time_pruned(trials, built, 0.5, fail) == built
    (note,) = cast(Any, trials.log).notes
    assert note.code is NoteCode.ENGINES_COMPARED_WHOLE


def test_an_engine_without_a_half_is_a_row_with_its_reason(trials: EngineTrials) -> None:
    built = time_whole(trials, [trial("a"), trial("b")])
    timed = time_pruned(
        trials, built, 0.5, lambda trial, share: (fail if trial.candidate.target == "b" else half)(trial, share)
    )
    assert [bool(row.candidate.failure) for row in timed] == [False, True]
    assert fastest(timed, higher_is_better=True).candidate.target == "a"
    assert cast(Any, trials.log).notes == []


def test_engines_that_lose_too_much_or_could_not_be_built_are_not_built_again(trials: EngineTrials) -> None:
    failed = Trial(Choice(EngineConfig()), Candidate(target="c", precision="fp32", failure="missing", holds=False))
    built = time_whole(trials, [trial("a"), trial("b", holds=False), failed])
    timed = time_pruned(trials, built, 0.5, lambda trial, share: pytest.fail("it is built"))
    assert timed == built


def test_no_engine_is_built_again_where_every_unit_is_left(trials: EngineTrials) -> None:
    built = time_whole(trials, [trial("a"), trial("b")])
    assert time_pruned(trials, built, 1.0, fail) == built


def test_no_candidate_is_tried_after_the_deadline_once_one_holds() -> None:
    attempts: list[Choice] = []

    def build(choice: Choice, quantized: object) -> Trial:
        attempts.append(choice)
        return trial("a", holds=len(attempts) > 1)

    late = cast(EngineTrials, SimpleNamespace(is_late=True, build=build, score=lambda built: built))
    every = [Choice(EngineConfig(), form) for form in ("first", "second", "third")]
    *_, last = choose._built(late, every, {})
    assert [choice.form for choice in attempts] == ["first", "second"]
    assert (last.choice.form, last.candidate.holds, bool(last.candidate.failure)) == ("third", False, True)
