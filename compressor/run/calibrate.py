"""Calibration rows: training rows from which the ranges of activations are measured."""

from __future__ import annotations

import numpy as np

from compressor.targets.base import Feeds
from compressor.tasks import Data


def calibration_rows(data: Data, count: int, seed: int) -> list[Feeds]:
    """Training rows with the lengths of the evaluation rows, each as a batch of one.

    For each row a length is drawn from the evaluation rows, and a training row of the nearest length is drawn, so that
    ranges are measured on inputs such as those that the engine will get.

    Args:
        data: the rows.
        count: maximum number of rows.
        seed: seed of the draw.
    """
    train, rng = data.train, np.random.default_rng(seed)
    order = rng.permutation(len(train))
    lengths = np.asarray(train["length"])[order]
    order, lengths = order[np.argsort(lengths, kind="stable")], np.sort(lengths, kind="stable")
    drawn = rng.choice(np.asarray(data.eval["length"] if len(data.eval) else lengths), min(count, len(train)))
    free = np.ones(len(train), bool)
    feeds: list[Feeds] = []
    for length in drawn:
        candidates = np.flatnonzero(free)
        index = candidates[np.argmin(np.abs(lengths[candidates] - length))]
        free[index] = False
        batch = data.task.collate([train[int(order[index])]])
        feeds.append({name: tensor.numpy() for name, tensor in batch.items() if name != data.task.label_name})
    return feeds
