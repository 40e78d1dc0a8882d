"""The sizes of a run: lengths to time, inputs of the proofs, and the sizes that engines must take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from compressor.config.fields import flag_of
from compressor.config.sections import MeasureConfig
from compressor.engines.prove import both_sides, longest_text, make_cases, proven_shapes
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import ModelFolder, example_feeds
from compressor.model_folder.feeds import takes_text
from compressor.model_folder.text_limits import token_limit
from compressor.run.run_context import RunInputs, RunSizes
from compressor.run.stages import build_options, row_cases
from compressor.tasks import Data

if TYPE_CHECKING:
    from compressor.generation.workload import Workload

_LENGTH = 128
"""Length to time where the recipe sets none, in tokens."""
_SIDE_BATCH = 2
"""Batch size of the proofs on both sides of a length at which the model changes; the second row is padded."""


def work_out_sizes(run: RunInputs) -> RunSizes:
    """Work out every size of a run before anything is built.

    Raises:
        InputError: a row is longer than the masks of the plan, or attention maps are too short.
        UsageError: a length to time is longer than the masks.
    """
    recipe, model, data, folder = run.recipe, run.model, run.data, run.model.folder
    mask_reach = _mask_reach(run)
    longest_row = mask_reach
    if mask_reach is not None and data is not None:
        from compressor.block_masks.attention_maps import load_maps, mask_length  # masks need PyTorch

        if run.blocks is not None and run.blocks.maps is not None:
            load_maps(run.blocks.maps, folder.network, model.sites, mask_reach)
        row = min(mask_length(folder.network, data, recipe.rows.max_length), _longest(data))
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

    inputs = partial(example_feeds, folder)
    limits = [size for size in (token_limit(folder.model), mask_reach) if size is not None]
    limit = min(limits, default=None)
    shapes = [*recipe.engine.parsed_shapes, *proven_shapes(recipe.measure.batch, lengths)]
    served = () if data is None else row_cases(data, inputs, longest=limit)
    cases = partial(make_cases, inputs, maximum_length=limit, mask_reach=mask_reach)
    generated = cases(shapes=shapes)
    longest = longest_text((*generated, *served))
    switches: tuple[int, ...] = ()
    if longest and folder.access.changes_with_length:
        from compressor.run.proof_lengths import switch_lengths

        switches = switch_lengths(folder, longest, limit)
    sides = [(_SIDE_BATCH, length) for length in both_sides(switches, 0, longest)]
    if sides:
        generated = cases(shapes=(*shapes, *sides))
    proven = (*generated, *served)
    options = build_options(recipe, lengths, [case.feeds for case in proven], data)
    beyond = tuple(switch for switch in switches if switch >= longest)
    workload = None
    if folder.generates and not recipe.export.no_cache:
        workload = work_out_workload(recipe.measure, folder, data)
    return RunSizes(lengths, proven, mask_reach, longest_row, options, beyond, workload)


def work_out_workload(config: MeasureConfig, folder: ModelFolder, data: Data | None) -> Workload:
    """The requests that a model that generates is timed at: those of the settings, else the median training example.

    An example without a target is cut in the middle: its first half is the prompt.

    Raises:
        UsageError: the model reads fewer tokens than a request has.
    """
    from compressor.generation.workload import NEW_TOKENS, PROMPT, Workload

    model = folder.model
    limit, has_source = token_limit(model) or math.inf, bool(model.config.is_encoder_decoder)
    prompt, new = (min(size, int(min(limit, 2 * size)) // 2) for size in (PROMPT, NEW_TOKENS))
    if data is not None and len(data.train):
        lengths = data.train["length"][:]
        length = round(float(np.median(lengths)))
        if has_source:
            new = max(1, round(float(np.median([len(ids) for ids in data.train["labels"][:]]))))
        prompt, new = (length, new) if has_source else (max(1, length // 2), max(1, length - length // 2))
    prompts, new = config.prompt_tokens or (prompt,), config.new_tokens or new
    reads = max((*prompts, new) if has_source else (max(prompts) + new,))
    if reads > limit:
        raise UsageError(
            f"--prompt-tokens {max(prompts)}, --new-tokens {new}: the model reads at most {limit} tokens; time fewer",
            code=ErrorCode.TOO_LONG,
            field="prompt_tokens",
            value=reads,
        )
    return Workload(tuple(itertools.product(config.batch, prompts)), new)


def check_requests(config: MeasureConfig, folder: ModelFolder) -> None:
    """Raise UsageError for sizes of requests to a model that does not generate."""
    for field in ("prompt_tokens", "new_tokens"):
        if getattr(config, field) is not None and not folder.generates:
            text = f"{flag_of(field)}: {folder.path} generates no text; omit it"
            raise UsageError(text, code=ErrorCode.CONTRADICTION, field=field)


def timed_lengths(
    config: MeasureConfig, folder: ModelFolder, mask_reach: int | None = None, longest_row: int | None = None
) -> tuple[int | None, ...]:
    """The lengths to time, in tokens; `(None,)` for a model of images or sound, which have one size.

    Raises:
        UsageError: lengths are set for a model without text, or are longer than the masks.
    """
    if not takes_text(folder):
        if config.seq:
            text = f"--seq {','.join(map(str, config.seq))}: {folder.path} takes no text; omit it"
            raise UsageError(text, code=ErrorCode.CONTRADICTION, field="seq")
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
        from compressor.block_masks.attention_maps import mask_length

        return mask_length(model, run.rows, run.recipe.rows.max_length)
    masks = run.followed.plan.masks.values() if run.followed is not None else ()
    limits = [token_limit(model), *(size for mask in masks for size in (mask.queries, mask.keys))]
    return min(size for size in limits if size is not None) if masks else None


def _longest(data: Data) -> int:
    splits: Sequence[Iterable[int]] = [rows["length"][:] for rows in (data.train, data.eval, data.test)]
    return max(length for lengths in splits for length in (0, *lengths))
