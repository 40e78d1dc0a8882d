"""What a step that drops blocks means for a model: the share of each kind of attention, and the length of masks."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from compressor.config.steps import Blocks
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder.example_inputs import token_limit
from compressor.tasks import Data
from compressor.tasks.segment_streams import Streams
from compressor.units import Site
from graph_passes import Kind, SitePlan


def shares_by_kind(step: Blocks, sites: Sequence[Site | SitePlan]) -> dict[Kind, float]:
    """The share of blocks to drop from each kind of attention that the model has.

    Raises:
        UsageError: the step sets a share for a kind that the model lacks.
    """
    kinds = list(dict.fromkeys(site.kind for site in sites))
    for kind in step.share_by_kind:
        if kind not in kinds:
            raise UsageError(
                f"--drop-blocks-by-kind {kind}: the model has no attention of this kind; it has {', '.join(kinds)}",
                code=ErrorCode.UNSUPPORTED_MODEL,
                field="drop_blocks_by_kind",
                value=kind,
                choices=tuple(kinds),
            )
    return {kind: step.share_by_kind.get(kind, step.share) for kind in kinds}


def mask_length(model: PreTrainedModel, data: Data, max_length: int) -> int:
    """Number of positions that masks cover: those of the longest possible row, even if the data has none so long.

    Args:
        model: the model, which may have a longest length of its own.
        data: the rows.
        max_length: length at which rows are cut, in tokens.
    """
    if isinstance(data.task, Streams):
        return max(1, *(length - 1 for length in data.train["length"][:]))
    limit = token_limit(model)
    return max_length if limit is None else min(max_length, limit)
