"""Recipes and runs under a budget, on the tiny model of `tests.run.runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import compressor
from compressor.config.run import Recipe
from compressor.results import BudgetRow, NoteCode, Report
from tests.run.runs import learning_recipe


def budget_recipe(inputs: Path, out: Path, **fields: Any) -> Recipe:
    return learning_recipe(inputs, out, keep=None, steps=None, **fields)


def run(inputs: Path, out: Path, **fields: Any) -> Report:
    return compressor.compress(budget_recipe(inputs, out, **fields))


def bound(row: BudgetRow) -> float:
    """The cost that a budget allows."""
    assert row.requested is not None
    return row.requested


def codes(report: Report) -> set[NoteCode]:
    return {note.code for note in report.notes}
