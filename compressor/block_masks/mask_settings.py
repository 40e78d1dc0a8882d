"""A recipe's block settings applied to a model: the share to drop of each kind of attention, the length of masks."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from compressor.config.run import Recipe
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder.example_inputs import token_limit
from compressor.tasks import Data
from compressor.units import Site
from graph_passes import Kind, SitePlan


def shares_by_kind(recipe: Recipe, sites: Sequence[Site | SitePlan]) -> dict[Kind, float]:
    """The share of blocks to drop from each kind of attention that the model has.

    Raises:
        UsageError: the recipe sets a share for a kind that the model lacks.
    """
    blocks, kinds = recipe.blocks, list(dict.fromkeys(site.kind for site in sites))
    for kind in blocks.drop_blocks_by_kind:
        if kind not in kinds:
            raise UsageError(
                f"--drop-blocks-by-kind {kind}: the model has no attention of this kind; it has {', '.join(kinds)}",
                code=ErrorCode.UNSUPPORTED_MODEL,
                field="drop_blocks_by_kind",
                value=kind,
                choices=tuple(kinds),
            )
    return {kind: blocks.drop_blocks_by_kind.get(kind, blocks.drop_blocks or 0.0) for kind in kinds}


def mask_length(model: PreTrainedModel, data: Data, recipe: Recipe) -> int:
    """Number of positions that masks cover: those of the longest possible row, even if the data has none so long."""
    if data.task.reads_streams:
        return max(1, *(length - 1 for length in data.train["length"][:]))
    limit, maximum = token_limit(model), recipe.rows.max_length
    return maximum if limit is None else min(maximum, limit)
