"""The sizes of a run: lengths to time, inputs of the proofs, and the sizes that engines must take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from compressor.block_masks.attention_maps import load_maps, mask_length
from compressor.config.sections import MeasureConfig
from compressor.engines.prove import Case, Inputs, make_cases, proven_shapes
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import ModelFolder, example_inputs
from compressor.model_folder.example_inputs import takes_text, token_limit
from compressor.run.proof_lengths import both_sides, longest_text, switch_lengths
from compressor.run.row_cases import row_cases
from compressor.run.run_context import RunInputs, RunSizes
from compressor.run.stages import build_options
from compressor.tasks import Data

_LENGTH = 128
"""Length to time where the recipe sets none, in tokens."""
_SIDE_BATCH = 2
"""Batch size of the proofs on both sides of a length at which the model changes; the second row is padded."""


def work_out_sizes(run: RunInputs) -> RunSizes:
    """Work out every size of a run before anything is built.

    Args:
        run: the settings and steps, the model, the rows, and the plan to follow.

    Raises:
        InputError: a row is longer than the masks of the plan, or attention maps are too short.
        UsageError: a length to time is longer than the masks.
    """
    recipe, model, data, folder = run.recipe, run.model, run.data, run.model.folder
    mask_reach = _mask_reach(run)
    if run.blocks is not None and run.blocks.maps is not None and mask_reach is not None:
        load_maps(run.blocks.maps, folder.model, model.sites, mask_reach)
    longest_row = mask_reach
    if mask_reach is not None and data is not None:
        row = min(mask_length(folder.model, data, recipe.rows.max_length), _longest(data))
        if row > mask_reach:
            raise InputError(
                f"a row has {row} tokens, but the masks of the plan cover {mask_reach}; cut rows"
                f" (--max-length {mask_reach})",
                code=ErrorCode.TOO_LONG,
                field="max_length",
                value=row,
            )
        longest_row = min(mask_reach, _longest(data))
    lengths = timed_lengths(recipe.measure, folder, mask_reach, longest_row)

    def inputs(batch: int, seq: int, seed: int) -> dict[str, Tensor]:
        return example_inputs(folder, batch, seq, seed)

    limits = [size for size in (token_limit(folder.model), mask_reach) if size is not None]
    limit = min(limits, default=None)
    shapes = [*recipe.engine.parsed_shapes, *proven_shapes(recipe.measure.batch, lengths)]
    served = () if data is None else row_cases(data, inputs, longest=limit)
    made_up = _cases(inputs, limit, mask_reach, shapes)
    longest = longest_text((*made_up, *served))
    switches = switch_lengths(folder, longest, limit) if longest else ()
    sides = [(_SIDE_BATCH, length) for length in both_sides(switches, 0, longest)]
    if sides:
        made_up = _cases(inputs, limit, mask_reach, (*shapes, *sides))
    cases = (*made_up, *served)
    options = build_options(recipe, lengths, [case.feeds for case in cases], data)
    beyond = tuple(switch for switch in switches if switch >= longest)
    return RunSizes(lengths, cases, mask_reach, longest_row, options, beyond)


def _cases(
    inputs: Inputs, limit: int | None, mask_reach: int | None, shapes: Sequence[tuple[int, int]]
) -> tuple[Case, ...]:
    return make_cases(inputs, maximum_length=limit, mask_reach=mask_reach, shapes=shapes)


def timed_lengths(
    config: MeasureConfig, folder: ModelFolder, mask_reach: int | None = None, longest_row: int | None = None
) -> tuple[int | None, ...]:
    """The lengths to time, in tokens; `(None,)` for a model of images or sound, which have one size.

    Args:
        config: the configured lengths, if any.
        folder: the model.
        mask_reach: positions that the masks of the plan cover; None: no masks.
        longest_row: length of the longest row, at which masks that cover more are timed; None: no rows.

    Raises:
        UsageError: lengths are set for a model without text, or are longer than the masks.
    """
    if not takes_text(folder):
        if config.seq:
            raise UsageError(
                f"--seq {','.join(map(str, config.seq))}: {folder.path} takes no text; omit it",
                code=ErrorCode.CONTRADICTION,
                field="seq",
            )
        return (None,)
    longer = [seq for seq in config.seq or () if mask_reach is not None and seq > mask_reach]
    if longer:
        raise UsageError(
            f"--seq {longer[0]}: the masks cover {mask_reach} positions, the maximum length of their rows; time shorter"
            " lengths, or learn on longer rows (--max-length)",
            code=ErrorCode.TOO_LONG,
            field="seq",
            value=longer[0],
        )
    usual = _LENGTH if mask_reach is None else min(mask_reach, longest_row or mask_reach)
    return config.seq or (min(usual, token_limit(folder.model) or usual),)


def _mask_reach(run: RunInputs) -> int | None:
    """Positions that the masks of the plan cover, or will cover; None without masks."""
    model = run.model.folder.model
    if run.blocks is not None:
        return mask_length(model, run.rows, run.recipe.rows.max_length)
    masks = run.followed.plan.masks.values() if run.followed is not None else ()
    limits = [token_limit(model), *(size for mask in masks for size in (mask.queries, mask.keys))]
    return min(size for size in limits if size is not None) if masks else None


def _longest(data: Data) -> int:
    splits: Sequence[Iterable[int]] = [rows["length"][:] for rows in (data.train, data.eval, data.test)]
    return max(length for lengths in splits for length in (0, *lengths))
