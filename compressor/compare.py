"""Dense against compressed, on the built engines: the metric on the test rows, then the times."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from compressor.errors import UsageError
from compressor.folder import ModelFolder, example_inputs
from compressor.folder.inputs import takes_text, token_limit
from compressor.measure import interleave, paired_interval
from compressor.progress import Listener, Tell
from compressor.recipe import Recipe
from compressor.report import Score, Speed
from compressor.side import Side
from compressor.targets.stream import Stream
from compressor.tasks import Data, statistics
from compressor.tasks.streams import Streams, read

_LENGTH = 128
"""Tokens to time where the recipe does not say."""


def scores(dense: Side, compressed: Side, data: Data | None, recipe: Recipe, listen: Listener) -> tuple[Score, ...]:
    """The metric of both engines on the test rows, and a paired interval of the difference; nothing without rows."""
    if data is None:
        return ()
    task = data.task
    found = []
    for side in (dense, compressed):
        with listen.stage(f"{side.name}: scoring on the test rows") as tell:
            found.append(_statistics(side, data, recipe.batch_size, tell))
    interval = paired_interval(found[0], found[1], task.score, recipe.seed)
    return (
        Score(
            metric=task.metric,
            split="test",
            rows=len(data.test),
            dense=task.score(found[0]),
            compressed=task.score(found[1]),
            **interval._asdict(),
            higher_is_better=task.higher_is_better,
        ),
    )


def speeds(dense: Side, compressed: Side, folder: ModelFolder, recipe: Recipe, listen: Listener) -> tuple[Speed, ...]:
    """Both engines timed in turn, at each batch size and length of the recipe."""
    rows = []
    for batch, seq in itertools.product(recipe.batch, lengths(recipe, folder)):
        feeds = {name: value.numpy() for name, value in example_inputs(folder, batch, seq or 1).items()}
        with listen.stage(f"timing both, batch {batch}" + (f", {seq} tokens" if seq else "")) as tell:
            row = interleave(
                dense.engine,
                compressed.engine,
                feeds,
                batch=batch,
                seq=seq,
                seconds=recipe.seconds,
                seed=recipe.seed,
                tell=tell,
            )
        rows.append(row)
    return tuple(rows)


def lengths(recipe: Recipe, folder: ModelFolder) -> tuple[int | None, ...]:
    """The lengths to time, in tokens; None alone for a model of images or sound, which have one size.

    Raises:
        UsageError: lengths were asked for of such a model.
    """
    if not takes_text(folder):
        if recipe.seq:
            raise UsageError(f"--seq {','.join(map(str, recipe.seq))}: {folder.path} takes no text; leave it out")
        return (None,)
    return recipe.seq or (min(_LENGTH, token_limit(folder.model) or _LENGTH),)


def _statistics(side: Side, data: Data, streams: int, tell: Tell) -> np.ndarray:
    done = 0

    def forward(batch: dict[str, Tensor]) -> np.ndarray:
        return side.engine.run({name: value.numpy() for name, value in batch.items()})["logits"]

    def progress(rows: int) -> None:
        nonlocal done
        tell(done := done + rows, len(data.test))

    if isinstance(data.task, Streams):
        stream = Stream(side.engine, side.graph)

        def segment(ids: Tensor) -> Tensor:
            return torch.from_numpy(stream.read(ids.numpy()))

        return read(data.task, data.test, segment, streams, progress)
    return statistics(data.task, data.test, forward, progress=progress)
