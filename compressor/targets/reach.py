"""The reach of block masks: inputs longer than the masks are refused."""

from __future__ import annotations

from collections.abc import Mapping

from compressor.errors import ErrorCode, InputError
from compressor.targets.base import Feeds


def check_reach(reach: Mapping[str, int], feeds: Feeds) -> None:
    """Raise InputError where an input is longer than the block masks of a graph.

    A runtime on a GPU would read beyond the end of a mask without an error.

    Args:
        reach: input -> number of positions that the masks cover.
        feeds: one batch of inputs.
    """
    for name, maximum in reach.items():
        if name in feeds and feeds[name].shape[1] > maximum:
            raise InputError(
                f"{name}: {feeds[name].shape[1]} positions, the block masks cover {maximum}; pass shorter rows, or"
                " learn masks on longer ones (--max-length)",
                code=ErrorCode.OUT_OF_RANGE,
                tensor=name,
                value=feeds[name].shape[1],
                maximum=maximum,
            )
