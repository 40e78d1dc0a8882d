"""What a reader must know of a run beside its numbers: a sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from compressor.config.fields import extra_of, flag_of
from compressor.config.run import FIELDS, Recipe
from compressor.config.sections import BlocksConfig
from compressor.model_folder import ModelFolder
from compressor.models import SegmentConfig
from compressor.report import EngineFacts
from compressor.run.plan_source import SelectedPlan
from compressor.tasks import Data
from graph_passes import Plan

_BLOCK_FIELDS = tuple(name for name in BlocksConfig.model_fields if name not in ("drop_blocks", "drop_blocks_by_kind"))
_PACE = ("epochs", "steps", "learning_rate")
"""What training alone reads of a recipe."""


def unused(recipe: Recipe, longest: int | None, *, learns: bool) -> Iterator[str]:
    """What was asked for and has no effect."""
    if recipe.rows.available and "max_length" in recipe.fields_set and longest and recipe.rows.max_length > longest:
        yield f"--max-length {recipe.rows.max_length}: the model takes {longest} tokens, longer rows are cut there"
    of_masks = (*_BLOCK_FIELDS, "kernel") if learns else _BLOCK_FIELDS  # a plan's masks may be computed by the kernel
    blocks = [flag_of(name) for name in of_masks if name in recipe.fields_set and not recipe.blocks.drops_any]
    if blocks:
        why = "no blocks are to go (--blocks, --prune)" if learns else "no masks are learned"
        yield f"{why}: {' and '.join(blocks)} had no effect"
    built = [
        flag_of(name)
        for name, field in FIELDS.items()
        if extra_of(field, "target") == "trt" and name in recipe.fields_set and recipe.engine.target != "trt"
    ]
    if built:
        yield f"TensorRT alone builds so, and the target is {recipe.engine.target}: {' and '.join(built)} had no effect"
    paces = [flag_of(name) for name in _PACE if recipe.value(name) != FIELDS[name].default]
    if learns and recipe.selection.searches and paces and not recipe.blocks.drops_any:
        yield f"{recipe.selection.method} searches and trains nothing: {' and '.join(paces)} had no effect"


def unmeasured(facts: Mapping[str, EngineFacts]) -> Iterator[str]:
    """Engines, by name of their side, whose memory could not be measured."""
    for name, found in facts.items():
        if found.peak_memory_bytes is None:
            yield f"{name}: its memory was not measured: too little is free to load it once more, or nothing tells"


def aligned(plan: Plan, lengths: Iterable[int | None], longest: int | None = None) -> Iterator[str]:
    """Where the masks are for longer rows than some that are measured.

    Args:
        plan: with the masks.
        lengths: tokens of the rows that are measured.
        longest: of the rows that the masks were learned on; None: as many as they reach over.
    """
    if not plan.masks:
        return
    reach = min(size for mask in plan.masks.values() for size in (mask.queries, mask.keys))
    reach = reach if longest is None else min(reach, longest)
    others = sorted({seq for seq in lengths if seq is not None and seq < reach})
    if others:
        yield f"the masks are of rows of up to {reach} tokens; at {', '.join(map(str, others))} their beginning counts"


def of_run(folder: ModelFolder, chosen: SelectedPlan, data: Data | None) -> Iterator[str]:
    """What was made, how, and what was not measured."""
    if chosen.trained:
        how = "with its masks" if chosen.plan.masks else "while its heads were chosen"
        yield (
            f"the compressed model was trained {how}; dense is the model folder as it was given, with every head,"
            " through the same export, passes and runtime"
        )
    config = folder.config
    if isinstance(config, SegmentConfig) and config.memory_length:
        yield (
            f"the graph reads a text segment by segment: it takes a memory a layer, {config.memory_length} positions at"
            " most and none at first, and gives the memories for the next segment; times are with memories as"
            " long as they become beside the tokens that are timed"
        )
    elif folder.task == "causal-lm":
        yield "the language model is exported without a key/value cache: every call reads the whole text"
    if data is None:
        yield "no rows were given, so no metric was measured (--data, --eval-data or --test-data)"
