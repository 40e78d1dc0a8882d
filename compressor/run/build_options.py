"""The sizes and settings that the engines of a run are built with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.config.run import Recipe
from compressor.targets import BuildOptions, span
from compressor.targets.base import Feeds

if TYPE_CHECKING:
    from compressor.tasks import Data

_NORM_SECONDS = 1.0
"""Maximum time spent on choosing the form of normalizations."""


def build_options(
    recipe: Recipe, lengths: Sequence[int | None], proven: Sequence[Feeds], data: Data | None = None
) -> BuildOptions:
    """Sizes and settings of the engines, which are optimized for the timed sizes and take every size that occurs.

    Args:
        recipe: batch sizes to time, and settings of the build.
        lengths: lengths to time, in tokens.
        proven: inputs of the proofs.
        data: the rows, whose evaluation and test rows are scored; None: no rows are scored.

    Returns:
        The options; `workspace` in bytes.
    """
    shapes = [array.shape for feeds in proven for array in feeds.values() if array.ndim == 2]
    memories = [array.shape[1] for feeds in proven for name, array in feeds.items() if name.startswith("memory_")]
    batches, seqs = [1, *(shape[0] for shape in shapes)], [1, *(shape[1] for shape in shapes)]
    if data is not None:
        from compressor.tasks.scoring import BATCH_SIZE  # needs PyTorch, as rows do

        limits = [data.task.size_limits(rows) for rows in (data.test, data.eval)]
        rows = max(BATCH_SIZE, recipe.selection.batch_size) * max(count for count, _ in limits)
        batches.append(rows * data.task.beams)
        seqs.append(max(1, data.task.max_new_tokens, *(length for _, length in limits)))
    engine = recipe.engine
    return BuildOptions(
        batch=span(recipe.measure.batch, batches),
        seq=span([seq for seq in lengths if seq is not None] or [1], seqs),
        memory=(0, max(memories, default=0), max(memories, default=0)),
        workspace=None if engine.workspace is None else engine.workspace << 20,
        timing_cache=engine.timing_cache,
        hardware_compatible=engine.hardware_compatible,
        version_compatible=engine.version_compatible,
        kernel=engine.kernel,
        norm_seconds=min(_NORM_SECONDS, recipe.measure.seconds),
        shapes=engine.parsed_shapes,
    )
