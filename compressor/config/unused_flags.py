"""Notes on flags without effect, and on the order of the steps that flags stand for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from compressor.config.fields import flag_of
from compressor.config.methods import BUDGET_METHODS, METHODS, SEARCH_METHODS
from compressor.config.run import FIELDS, Recipe
from compressor.config.sections import AUTO, BUDGETS, BlocksConfig, BudgetConfig
from compressor.config.step_list import steps_of
from compressor.config.steps import Blocks, Follow, Heads, Units, Within, part_of, parts_of
from compressor.results import Note, NoteCode
from compressor.targets import unused_options

_BLOCK_FIELDS = tuple(name for name in BlocksConfig.model_fields if name not in ("drop_blocks", "drop_blocks_by_kind"))
_BUDGET_FIELDS = tuple(name for name in BudgetConfig.model_fields if name != "match_dense")  # distillation uses it too
_LEARNING_FIELDS = ("keep", "method", "certify", "options")
"""Fields that only the selection of units uses, besides those of budgets."""
_TRAINING_FIELDS = ("epochs", "training_steps", "learning_rate")
"""Fields that only training uses."""
_ROW_FIELDS = ("prune_rows", "statistics")
"""Fields that only methods use that order units by rows."""


def unused_field_notes(recipe: Recipe, maximum_length: int | None) -> Iterator[Note]:
    """Fields that were set and have no effect; `maximum_length` is that of the model, None without a limit."""
    rows = recipe.rows
    if rows.sources and "max_length" in recipe.fields_set and maximum_length and rows.max_length > maximum_length:
        yield Note(
            code=NoteCode.LENGTH_LIMITED,
            text=f"--max-length {rows.max_length}: the model takes {maximum_length} tokens; longer rows are cut there",
        )
    for names, reason in _unused_fields(recipe):
        flags = [flag_of(name) for name in names if name in recipe.fields_set]
        if flags:
            yield Note(code=NoteCode.NO_EFFECT, text=f"{reason}: {' and '.join(flags)} had no effect")


def _unused_fields(recipe: Recipe) -> Iterator[tuple[Iterable[str], str]]:
    """Fields that have no effect where they are set, and why."""
    engine, selection, steps = recipe.engine, recipe.selection, parts_of(steps_of(recipe))
    units, masks = part_of(steps, Units), part_of(steps, Blocks) is not None
    learns = any(isinstance(step, Heads | Units | Blocks) for step in steps)
    if not masks and learns:  # else the masks of a plan may use the kernel
        yield (*_BLOCK_FIELDS, "kernel"), "no blocks are dropped (--drop-blocks, --drop-blocks-by-kind)"
    elif not masks:
        yield _BLOCK_FIELDS, "no masks are learned"
    if engine.target != AUTO:
        ignored = unused_options(engine.target)
        yield (name for name in FIELDS if name in ignored), f"the target is {engine.target}"
    if not engine.allows_quantized:
        # An engine in bfloat16 counts the products in fp32 as well.
        names = ("calibration_rows",) if engine.chooses else ("calibration_rows", "allow_float_products")
        yield names, f"the precision is {engine.precision}"
    if recipe.steps is not None:  # flags of steps are refused beside them
        return
    if units is None:
        yield _BUDGET_FIELDS, "no units are removed to meet a budget"
    elif units.learns:
        yield ("statistics",), f"{units.method} keeps no statistics"
    elif not METHODS[units.method].reads_rows:
        yield _changed(_ROW_FIELDS, recipe), f"{units.method} orders units by weights and reads no rows"
    if part_of(steps, Follow) is not None and not masks and not (units and selection.method in BUDGET_METHODS):
        yield _LEARNING_FIELDS, "a plan is followed"
    if not learns:
        yield _changed(_TRAINING_FIELDS, recipe), "nothing is trained on labels"
    elif METHODS[selection.method].kind != "gate" and not masks:  # dropping blocks trains the model
        activity = "searches" if selection.method in SEARCH_METHODS else "removes units"
        yield _changed(_TRAINING_FIELDS, recipe), f"{selection.method} {activity} and does not train"
    elif selection.training_steps is not None:
        yield ("epochs",), f"--training-steps {selection.training_steps} counts"


def _changed(names: Iterable[str], recipe: Recipe) -> list[str]:
    """The fields with another value than their default; the recipe of a report sets every field."""
    return [name for name in names if recipe.value(name) != FIELDS[name].default]


def order_notes(recipe: Recipe) -> Iterator[Note]:
    """Which of two steps removes what, where heads are selected before a budget is met; and how long the run takes."""
    steps = steps_of(recipe)
    for heads, units in itertools.pairwise(parts_of(steps)):
        if isinstance(heads, Heads) and isinstance(units, Units):
            number = "" if heads.keep is None else f" (--keep {heads.keep})"
            budgets = " and ".join(flag_of(name) for name in BUDGETS if getattr(units, name) is not None)
            yield Note(
                code=NoteCode.HEADS_SELECTED_FIRST,
                text=f"{heads.method} selects the heads first{number}; {units.method} then removes neurons only, until"
                f" {budgets or '--max-drop'} is met",
            )
    for step in steps:
        if isinstance(step, Within) and step.minutes is not None:
            text = f"the run takes about {step.minutes:g} min (--minutes)"
            yield Note(code=NoteCode.TIME_LIMITED, text=text)


def nothing_learned_note(recipe: Recipe, *, has_heads: bool) -> Note:
    """What a run without steps delivers; `has_heads` says whether heads were recognized in the model."""
    rows = "" if recipe.rows.data else "rows to learn from (--data) and "
    learned = "the number of heads to keep (--keep)" if has_heads else "a budget, e.g. --macs 70%"
    advice = "" if recipe.selection.keep is not None else f"; add {rows}{learned}, or a plan (--plan)"
    text = f"nothing was learned: the model is exported and built with every unit{advice}"
    return Note(code=NoteCode.NOTHING_LEARNED, text=text)
