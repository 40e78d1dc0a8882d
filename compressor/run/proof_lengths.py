"""The lengths of proofs on both sides of every length at which a model changes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from compressor.engines.prove import Case
from compressor.model_folder import ModelFolder, copy_of, example_inputs, fresh_model
from compressor.models.forward_changes import Change, changes_of_forward, configured_switches, switch_of_changes

logger = logging.getLogger(__name__)

_SHORTEST = 5
"""Tokens of the shortest text that is run to notice a change: those of the shortest case of a proof."""


def switch_lengths(folder: ModelFolder, longest: int, limit: int | None) -> tuple[int, ...]:
    """The lengths in tokens after which a model may compute something else, ascending.

    They follow from the configuration, and from what forwards of a model that nothing has run on change in it.

    Args:
        folder: a model that reads text.
        longest: the longest text that is served; the model runs on nothing longer.
        limit: tokens that the model takes; None: any number.
    """
    lengths = set(configured_switches(folder.config))
    if not folder.example:  # of which the length is fixed
        changed = _noticed_switch(folder, longest if limit is None else min(longest, limit))
        lengths |= {changed} if changed is not None else set()
    return tuple(sorted(length for length in lengths if limit is None or length < limit))


def _noticed_switch(folder: ModelFolder, longest: int) -> int | None:
    """The length up to which forwards change the same attributes of a model; None: at all lengths up to `longest`."""
    fresh = fresh_model(folder)

    def changes_at(length: int) -> tuple[Change, ...]:
        return changes_of_forward(copy_of(fresh), example_inputs(folder, 1, length))

    try:
        return switch_of_changes(changes_at, _SHORTEST, longest)
    except Exception as error:  # a model may not run at each length; where a proof needs one, the proof says so
        logger.debug("%s: no forward to notice changes: %s", folder.path, error)
        return None


def both_sides(switches: Iterable[int], shortest: int, longest: int) -> tuple[int, ...]:
    """Lengths on both sides of some switches, greater than `shortest` and at most `longest`."""
    sides = {length for switch in switches for length in (switch, switch + 1)}
    return tuple(sorted(length for length in sides if shortest < length <= longest))


def longest_text(cases: Sequence[Case]) -> int:
    """Tokens of the longest text of the cases; 0 without texts."""
    texts = [array for case in cases for name, array in case.feeds.items() if name.endswith("input_ids")]
    return max((array.shape[-1] for array in texts), default=0)
