"""The sizes that a run's engines must take: those that it times, those that it proves, and those that it scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compressor.recipe import Recipe
from compressor.targets import Tuning, span
from compressor.targets.base import Feeds

_SCORED_ROWS = 32
"""Rows that are scored at once."""


def tuning(
    recipe: Recipe,
    lengths: Sequence[int | None],
    proven: Iterable[Feeds],
    *,
    longest: int | None = None,
    beams: int = 1,
) -> Tuning:
    """What the engines are built for: the sizes timed are the usual ones, all others only widen the span.

    Args:
        recipe: batch sizes, and limits of building.
        lengths: to time, in tokens.
        proven: inputs of the proofs.
        longest: tokens of the longest row that is scored; None: none is.
        beams: rows that one scored row becomes.
    """
    tried = [array.shape for feeds in proven for array in feeds.values() if array.ndim == 2]
    memories = [array.shape[1] for feeds in proven for name, array in feeds.items() if name.startswith("memory_")]
    batches, seqs = [1, *(shape[0] for shape in tried)], [1, *(shape[1] for shape in tried)]
    if longest is not None:
        batches.append(max(_SCORED_ROWS, recipe.batch_size) * beams)
        seqs.append(longest)
    return Tuning(
        batch=span(recipe.batch, batches),
        seq=span([seq for seq in lengths if seq is not None] or [1], seqs),
        memory=(0, max(memories, default=0), max(memories, default=0)),
        workspace=None if recipe.workspace is None else recipe.workspace << 20,
        timing_cache=recipe.timing_cache,
        hardware_compatible=recipe.hardware_compatible,
        version_compatible=recipe.version_compatible,
    )
