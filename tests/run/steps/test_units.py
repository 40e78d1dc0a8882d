"""The engine that is delivered after units were removed: the faster of the two nearest, built with the plan."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compressor.config.sections import EngineConfig
from compressor.engines.choices import Choice
from compressor.engines.choose import ChosenEngine
from compressor.errors import ErrorCode, InputError
from compressor.results import NoteCode
from compressor.run.steps import units
from compressor.run.steps.base import DELIVERED, LABEL, State
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.store import Store

CHOICES = [Choice(EngineConfig(precision=precision)) for precision in ("fp32", "int8")]
FIRST, SECOND = (choice.label for choice in CHOICES)


class Chosen:
    """A choice between two engines, of which some cannot be built with the plan, and one is the fastest."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, fastest: int = 0, failing: tuple[str, ...] = ()) -> None:
        variant: Any = object()
        first, second = (ChosenEngine(variant, choice) for choice in CHOICES)
        self.engine = ChosenEngine(variant, first.choice, runner_up=second)
        self.store, self.notes, self.built = Store(path, version=1), list[Any](), list[str]()
        log = SimpleNamespace(stage=lambda name: nullcontext(), add_notes=self.notes.extend)
        run = SimpleNamespace(engine_trials=lambda *arguments: None, work=SimpleNamespace(scratch=path), log=log)
        self.context: Any = SimpleNamespace(run=run)
        self.scorer: Any = SimpleNamespace(dense=SimpleNamespace(graph=None))
        self.failing = failing
        patch.setattr(units, "_build_plan", self._build)
        patch.setattr(units, "fastest_of", lambda trials, engines, stage: fastest)

    def _build(self, context: Any, candidate: ChosenEngine, folder: Path, plan: Any) -> str:
        self.built.append(candidate.choice.label)
        if candidate.choice.label in self.failing:
            raise InputError("it cannot be built; try another", code=ErrorCode.UNSUPPORTED)
        return candidate.choice.label

    def label(self) -> str:
        plan: Any = None
        state = State(SelectedPlan(plan), self.engine, self.scorer)
        delivered = units.with_last_engine(state, self.context, self.store)
        assert delivered.engine is not None
        assert delivered.selected.engine == delivered.engine.choice.label
        return delivered.engine.choice.label


@pytest.mark.parametrize(
    ("fastest", "failing", "label"),
    [
        (0, (), FIRST),
        (1, (), SECOND),
        (0, (FIRST,), SECOND),
        (0, (SECOND,), FIRST),
        (0, (FIRST, SECOND), FIRST),
    ],
)
def test_the_faster_engine_that_can_be_built_is_delivered(
    fastest: int, failing: tuple[str, ...], label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Chosen(tmp_path, monkeypatch, fastest, failing)
    assert chosen.label() == label == chosen.store.load(DELIVERED, LABEL)
    assert chosen.built == [FIRST, SECOND]
    assert [note.code for note in chosen.notes] == ([NoteCode.ENGINE_CHOSEN] if label == SECOND else [])


@pytest.mark.parametrize("label", [FIRST, SECOND])
def test_a_resumed_run_delivers_the_same_engine(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path, version=1).memo(DELIVERED, {"engines": [FIRST, SECOND]}, lambda _: label, LABEL)
    chosen = Chosen(tmp_path, monkeypatch, fastest=1 - [FIRST, SECOND].index(label))
    assert chosen.label() == label
    assert not chosen.built
