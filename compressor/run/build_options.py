"""The sizes that a run's engines must take: those that it times, those that it proves, and those that it scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.config.run import Recipe
from compressor.targets import BuildOptions, span
from compressor.targets.base import Feeds

if TYPE_CHECKING:
    from compressor.tasks import Data

_SCORED_ROWS = 32
"""Rows that are scored at once."""


def build_options(
    recipe: Recipe, lengths: Sequence[int | None], proven: Sequence[Feeds], data: Data | None = None
) -> BuildOptions:
    """What the engines are built for: the sizes timed are the usual ones, all others only widen the span.

    Args:
        recipe: batch sizes, and limits of building.
        lengths: to time, in tokens.
        proven: inputs of the proofs.
        data: its test rows are scored, and what the task makes of them is; None: none are.
    """
    tried = [array.shape for feeds in proven for array in feeds.values() if array.ndim == 2]
    memories = [array.shape[1] for feeds in proven for name, array in feeds.items() if name.startswith("memory_")]
    batches, seqs = [1, *(shape[0] for shape in tried)], [1, *(shape[1] for shape in tried)]
    if data is not None:
        batches.append(max(_SCORED_ROWS, recipe.selection.batch_size) * data.task.beams)
        seqs.append(max(1, data.task.longest, *data.test["length"]))
    return BuildOptions(
        batch=span(recipe.measure.batch, batches),
        seq=span([seq for seq in lengths if seq is not None] or [1], seqs),
        memory=(0, max(memories, default=0), max(memories, default=0)),
        workspace=None if recipe.engine.workspace is None else recipe.engine.workspace << 20,
        timing_cache=recipe.engine.timing_cache,
        hardware_compatible=recipe.engine.hardware_compatible,
        version_compatible=recipe.engine.version_compatible,
        kernel=recipe.engine.kernel,
    )
