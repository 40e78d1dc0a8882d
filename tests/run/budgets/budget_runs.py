"""Recipes and runs under a budget, on the tiny model of `tests.run.runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import compressor
import graph_passes
from compressor.config.run import Recipe
from compressor.engines.build import ExportedGraph
from compressor.measure import macs
from compressor.results import BudgetRow, NoteCode, Proof, ProofStage, Report
from compressor.targets import Engine
from compressor.units import PrunableGroup, keep_all
from tests.run.runs import learning_recipe


def budget_recipe(inputs: Path, out: Path, **fields: Any) -> Recipe:
    return learning_recipe(inputs, out, keep=None, training_steps=None, **fields)


def run(inputs: Path, out: Path, **fields: Any) -> Report:
    return compressor.compress(budget_recipe(inputs, out, **fields))


def bound(row: BudgetRow) -> float:
    """The cost that a budget allows."""
    assert row.requested is not None
    return row.requested


def codes(report: Report) -> set[NoteCode]:
    return {note.code for note in report.notes}


def exported(groups: list[PrunableGroup], path: Path) -> ExportedGraph:
    """The reference graph of a whole model, as a run hands it on."""
    proof = Proof(variant="dense", stage=ProofStage.EXPORT, error=0.0, tolerance=1e-4, cases=())
    return ExportedGraph("dense", keep_all(groups), path, proof)


def seconds_by_macs(engine: Engine, batch: int, seq: int) -> float:
    """The time of a call of an engine that takes a nanosecond a multiply-accumulate."""
    return 1e-9 * float(macs(graph_passes.load(engine.path), batch, seq) or 0)
