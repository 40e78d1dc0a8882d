"""Dense against compressed, on the built engines: the metric on the test rows, then the times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compressor.config.run import Recipe
from compressor.errors import UsageError
from compressor.measure import interleave, paired_interval
from compressor.model_folder import ModelFolder, example_inputs
from compressor.model_folder.example_inputs import takes_text, token_limit
from compressor.progress import Listener, ProgressCallback
from compressor.report import Score, Speed
from compressor.run.variant import Variant
from compressor.targets.segment_stream import Stream, limits
from compressor.tasks import Data, statistics
from compressor.tasks.segment_streams import Streams, read

_LENGTH = 128
"""Tokens to time where the recipe does not say."""


def scores(
    dense: Variant, compressed: Variant, data: Data | None, recipe: Recipe, listen: Listener
) -> tuple[Score, ...]:
    """The metric of both engines on the test rows, and a paired interval of the difference; nothing without rows."""
    if data is None:
        return ()
    task = data.task
    found = []
    for side in (dense, compressed):
        with listen.stage(f"{side.name}: scoring on the test rows") as tell:
            found.append(_statistics(side, data, recipe.selection.batch_size, tell))
    interval = paired_interval(found[0], found[1], task.score, recipe.selection.seed)
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


def speeds(
    dense: Variant,
    compressed: Variant,
    folder: ModelFolder,
    recipe: Recipe,
    tokens: Sequence[int | None],
    listen: Listener,
) -> tuple[Speed, ...]:
    """Both engines timed in turn, at each batch size of the recipe and each of the `lengths`."""
    rows = []
    for batch, seq in itertools.product(recipe.measure.batch, tokens):
        feeds = {name: value.numpy() for name, value in example_inputs(folder, batch, seq or 1).items()}
        with listen.stage(f"timing both, batch {batch}" + (f", {seq} tokens" if seq else "")) as tell:
            row = interleave(
                dense.engine,
                compressed.engine,
                feeds,
                batch=batch,
                seq=seq,
                seconds=recipe.measure.seconds,
                seed=recipe.selection.seed,
                tell=tell,
            )
        rows.append(row)
    return tuple(rows)


def lengths(
    recipe: Recipe, folder: ModelFolder, reach: int | None = None, longest: int | None = None
) -> tuple[int | None, ...]:
    """The lengths to time, in tokens; None alone for a model of images or sound, which have one size.

    Args:
        recipe: may name lengths.
        folder: the model.
        reach: positions that the masks of the plan reach over; None: there are none.
        longest: positions of the longest row, which masks that reach farther are timed at; None: there are no rows.

    Raises:
        UsageError: lengths were asked for of such a model, or longer ones than the masks reach over.
    """
    if not takes_text(folder):
        if recipe.measure.seq:
            raise UsageError(
                f"--seq {','.join(map(str, recipe.measure.seq))}: {folder.path} takes no text; leave it out"
            )
        return (None,)
    over = [seq for seq in recipe.measure.seq or () if reach is not None and seq > reach]
    if over:
        raise UsageError(
            f"--seq {over[0]}: the masks reach over {reach} positions, the length of the rows that they are of; time"
            " shorter ones, or learn on longer rows (--max-length)"
        )
    usual = _LENGTH if reach is None else min(reach, longest or reach)
    return recipe.measure.seq or (min(usual, token_limit(folder.model) or usual),)


def _statistics(side: Variant, data: Data, streams: int, tell: ProgressCallback) -> np.ndarray:
    done = 0

    def forward(batch: dict[str, Tensor]) -> np.ndarray:
        return data.task.scored(side.engine.run({name: value.numpy() for name, value in batch.items()}))

    def progress(rows: int) -> None:
        nonlocal done
        tell(done := done + rows, len(data.test))

    if isinstance(data.task, Streams) and limits(side.graph) is not None:  # without memory, a segment is a row
        stream = Stream(side.engine, side.graph)

        def segment(ids: Tensor) -> Tensor:
            return torch.from_numpy(stream.read(ids.numpy()))

        return read(data.task, data.test, segment, streams, progress)
    return statistics(data.task, data.test, forward, progress=progress)
