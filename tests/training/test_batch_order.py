"""The order of rows depends only on the seed."""

from __future__ import annotations

from compressor.training.batch_order import row_order


def test_every_epoch_visits_each_row_once_in_batches_of_similar_length() -> None:
    lengths = [1 + row % 40 for row in range(400)]
    order = row_order(lengths, batch_size=8, batches=100, seed=0)
    assert sorted(order[:400]) == sorted(order[400:]) == list(range(400))
    batches = [[lengths[row] for row in order[start : start + 8]] for start in range(0, len(order), 8)]
    spread = [max(batch) - min(batch) for batch in batches]
    assert sum(spread) / len(spread) < 3
    assert order == row_order(lengths, 8, 100, 0) != row_order(lengths, 8, 100, 1)
