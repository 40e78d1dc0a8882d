"""Fields that follow from those of a budget."""

from __future__ import annotations

from compressor.config.sections.budget import BudgetConfig


def test_the_rows_for_losses_are_a_quarter_of_all_rows() -> None:
    for rows in (8, 9, 10, 11, 384, 1024, 2048, 2305, 10_000):
        loss_rows = BudgetConfig(prune_rows=rows).loss_rows
        # A run with few rows holds out a quarter, which with enough rows must be no less.
        assert loss_rows == min(768, (rows + loss_rows) // 4)
