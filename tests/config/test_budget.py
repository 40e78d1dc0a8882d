"""Fields that follow from those of a budget."""

from __future__ import annotations

from compressor.config.steps import Units


def test_the_rows_for_losses_are_a_quarter_of_all_rows() -> None:
    for rows in (8, 9, 10, 11, 384, 1024, 2048, 2305, 10_000):
        loss_rows = Units(macs=0.5, prune_rows=rows).loss_rows
        # A run with few rows holds out a quarter, which with enough rows must be no less.
        assert loss_rows == min(768, (rows + loss_rows) // 4)


def test_many_rows_may_have_more_tokens_and_few_rows_no_fewer() -> None:
    tokens = [Units(macs=0.5, prune_rows=rows).prune_tokens for rows in (8, 512, 2048, 4096, 8192)]
    assert tokens[0] == tokens[1] == tokens[2] == 64 * 2048
    assert tokens[3:] == [64 * 4096, 64 * 8192]
    assert Units(macs=0.5, prune_rows=4096).loss_tokens == 32 * 4096
