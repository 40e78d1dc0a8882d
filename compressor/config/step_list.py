"""The sections of a recipe together, and the list of steps that its flags stand for.

This module and `compressor.config.rules` are the only ones that know which flags go together; everything behind them
walks the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SerializeAsAny

from compressor.config.fields import flag_of
from compressor.config.methods import BUDGET_METHODS, DEFAULT_BUDGET_METHOD, METHODS, SEARCH_METHODS
from compressor.config.sections import (
    BUDGETS,
    FIELDS,
    SECTION_OF,
    SECTIONS,
    BlocksConfig,
    BudgetConfig,
    DistillationConfig,
    Sections,
    SelectionConfig,
    graph_of,
)
from compressor.config.steps import (
    STEPS,
    Blocks,
    Distill,
    Follow,
    Heads,
    Step,
    StepT,
    Units,
    Within,
    part_of,
    parts_of,
    step_of,
)
from compressor.errors import ErrorCode, UsageError

_LEARNING = ("batch_size", "seed")

OPTIONS_OF_STEPS = frozenset(
    name
    for section in (SelectionConfig, BudgetConfig, BlocksConfig, DistillationConfig)
    for name in section.model_fields
    if name not in ("seed", "batch_size", "max_drop", "match_dense", "compare_points")
)
"""Flags that set an option of a step; the others of their sections are settings of the run."""


class RecipeSections(Sections):
    """The sections of a recipe, and what a run does by them; `Recipe` checks that they agree.

    Attributes:
        steps: the steps of the run, written out; None: those that the flags stand for, see `step_list.steps_of`.
    """

    steps: tuple[SerializeAsAny[Step], ...] | None = None

    @property
    def plan_file(self) -> Path | None:
        """The plan to follow: the one configured; else, unless blocks are dropped from it, that of the model folder."""
        if self.selection.plan is not None or self.blocks.drops_any:
            return self.selection.plan
        return self.stored_plan

    @property
    def stored_plan(self) -> Path | None:
        """The plan in the model folder, to which its weights belong; None: there is none.

        A graph beside a plan is what is left under it.
        """
        stored = self.source.model / "plan.json"
        return stored if stored.exists() and self.graph is None else None

    @property
    def graph(self) -> Path | None:
        """The ONNX graph that is compressed; None: it is a model folder with weights of PyTorch."""
        return graph_of(self.source.model)

    @property
    def selects_heads(self) -> bool:
        """Whether heads are selected before any other unit is removed.

        Where blocks are dropped, the fastest engine is chosen, or a teacher is named, they are only if a number of
        heads, or another method than the default, is set. A run that quantizes and keeps 100% of the heads learns
        nothing.
        """
        selection = self.selection
        if self.plan_file is not None or selection.method in BUDGET_METHODS or self.learns_units:
            return False
        if self.rows.data is None:  # which a number of heads requires
            return selection.keep is not None
        if self.engine.compares and selection.keep == "100%":
            return False
        # A budget without a method has one of its own, so that this one was set.
        taught = self.distillation.distill and self.distillation.teacher is not None
        drops = self.blocks.drop_blocks is not None or self.blocks.drop_blocks_by_kind
        is_set = self.budget.is_set or selection.keep is not None or selection.method != FIELDS["method"].default
        return is_set or not (drops or self.engine.compares or taught)

    @property
    def learns_units(self) -> bool:
        """Whether a gate learns which units meet the budget, of the types that `prune_units` allows.

        This needs costs that are sums over units, which times are not, and no number of heads.
        """
        budget, selection = self.budget, self.selection
        if self.rows.data is None or METHODS[selection.method].kind != "gate":
            return False
        return budget.is_set and not budget.is_timed and selection.keep is None

    @property
    def prunes(self) -> bool:
        """Whether units are removed under a budget, or as many as the metric allows."""
        return self.budget.is_set or (self.plan_file is None and self.selection.method in BUDGET_METHODS)

    @property
    def fields_set(self) -> frozenset[str]:
        """Names of the fields that were set, even to their defaults."""
        return frozenset().union(*(getattr(self, section).model_fields_set for section in SECTIONS))

    def value(self, name: str) -> Any:
        """The value of a field, by its name alone."""
        return getattr(getattr(self, SECTION_OF[name]), name)

    def flat(self) -> dict[str, Any]:
        """Every field as JSON, by name, without sections: what reports store."""
        fields = {
            name: value
            for section in SECTIONS
            for name, value in getattr(self, section).model_dump(mode="json").items()
        }
        if self.steps is not None:
            fields["steps"] = [{step.name: step.model_dump(mode="json", exclude_unset=True)} for step in self.steps]
        return fields


def steps_of(recipe: RecipeSections) -> tuple[Step, ...]:
    """The steps of a recipe, in order: those that it writes out, or those of its flags; empty if nothing is learned.

    A plan is followed in place of learning one. A budget removes units of those that are selected, or that the plan
    keeps; blocks are dropped from the heads that are left, and whatever is left is distilled.
    """
    return tuple(_completed(recipe, requested_steps(recipe)))


def rungs_of(steps: Sequence[Step]) -> tuple[tuple[Step, ...], ...]:
    """The parts of a list after each of which a ladder delivers: each is in order, and the next begins with it again.

    A list whose parts do not all have steps of the same kinds, with the same budgets, is no ladder, but one part.
    """
    order, parts = list(STEPS), list[list[Step]]()
    for step in steps:
        if not parts or order.index(step.name) <= order.index(parts[-1][-1].name):
            parts.append([])
        parts[-1].append(step)
    kinds = {tuple((step.name, _budgets_of(step)) for step in part) for part in parts}
    is_ladder = len(kinds) == 1 and any(budgets for _, budgets in kinds.pop())
    return tuple(map(tuple, parts)) if is_ladder else (tuple(steps),)


def _budgets_of(step: Step) -> tuple[str, ...]:
    return tuple(name for name in BUDGETS if getattr(step, name, None) is not None)


def requested_kinds(recipe: RecipeSections) -> tuple[type[Step], ...]:
    """The kinds of the steps that flags or the list of a recipe request, whether or not they go together."""
    if recipe.steps is not None:
        return tuple(map(type, parts_of(recipe.steps)))
    requests: dict[type[Step], object] = {
        Follow: recipe.selection.plan or recipe.stored_plan,
        Heads: recipe.selects_heads,
        Units: recipe.prunes,
        Blocks: recipe.blocks.drops_any,
        Distill: recipe.distillation.distill,
    }
    return tuple(kind for kind, is_requested in requests.items() if is_requested)


def requested_steps(recipe: RecipeSections) -> tuple[Step, ...]:
    """The steps that flags or the list of a recipe request, whether or not they go together.

    Raises:
        pydantic.ValidationError: a rule of one of the steps is violated.
    """
    steps = recipe.steps
    if steps is None:
        steps = tuple(step_of_flags(recipe, kind) for kind in requested_kinds(recipe))
    *_, last, distill = (None, None, *steps)
    if not (isinstance(last, Units) and isinstance(distill, Distill)):
        return steps
    if not last.is_unbounded or last.max_drop is None or last.certify is not None:
        return steps
    # As many units are removed as the metric permits after they are distilled.
    parts = (last, distill.model_copy(update={"minutes": None}))
    return (*steps[:-2], Within(max_drop=last.max_drop, minutes=distill.minutes, steps=parts))


def step_of_flags(recipe: RecipeSections, kind: type[StepT]) -> StepT:
    """The step of a kind, with the options that the flags of a recipe set.

    Raises:
        pydantic.ValidationError: a rule of the step is violated.
    """
    selection = recipe.selection
    options = {name: recipe.value(kind.flags.get(name, name)) for name in kind.model_fields}
    if kind is Follow:
        options["plan"] = selection.plan or recipe.stored_plan
    elif kind is Heads and (selection.method not in SEARCH_METHODS or selection.keep is not None):
        options["max_drop"] = None
    elif kind is Blocks:
        options["share"] = options["share"] or 0.0
    elif kind is Distill and options["learning_rate"] is None:
        del options["learning_rate"]
    elif kind is Units:
        options |= _changes_of_units(recipe)
        if recipe.learns_units:
            del options["statistics"]  # a note says that it has no effect
    return kind(**options)


def _changes_of_units(recipe: RecipeSections) -> dict[str, Any]:
    """The options of the step that meets a budget which are not those of its flags.

    Where heads are selected first, or a gate learns the units, flags of the selection concern these. Where all heads
    stay, neurons alone are removed.
    """
    selection, changes = recipe.selection, dict[str, Any]()
    prunes_alone = selection.method in BUDGET_METHODS
    if not (prunes_alone or recipe.learns_units):
        changes = {"method": DEFAULT_BUDGET_METHOD, "options": {}}
    if not prunes_alone:
        changes["keep"] = None
    if recipe.selects_heads:
        changes["certify"] = None
    if selection.keep == "100%" and not (prunes_alone or recipe.selects_heads):
        changes["prune_units"] = "neurons"
    return changes


def _completed(recipe: RecipeSections, steps: Sequence[Step]) -> Iterator[Step]:
    """Steps with the seed and the batch size of the run where they set none, and with neurons as units after heads.

    Units that the metric alone bounds are removed in attempts.
    """
    follows_heads = False
    for step in steps:
        if isinstance(step, Units) and step.is_unbounded:
            step = Within(max_drop=step.max_drop, steps=(step,))
        yield _with_settings(recipe, step, follows_heads=follows_heads)
        follows_heads |= isinstance(step, Heads)


def _with_settings(recipe: RecipeSections, step: Step, *, follows_heads: bool) -> Step:
    if isinstance(step, Within):
        parts = (_with_settings(recipe, part, follows_heads=follows_heads) for part in step.steps)
        return step.model_copy(update={"steps": tuple(parts)})
    unset = (type(step).model_fields.keys() & set(_LEARNING)) - step.model_fields_set
    changes = {name: getattr(recipe.selection, name) for name in unset}
    if follows_heads and "prune_units" in type(step).model_fields:
        changes["prune_units"] = "neurons"
    return step.model_copy(update=changes) if changes else step


def extended_plan(recipe: RecipeSections) -> Path | None:
    """The plan in the model folder that a recipe follows and removes more units from; None: it does not."""
    steps, stored = parts_of(steps_of(recipe)), recipe.stored_plan
    first = steps[0] if steps and stored is not None else None
    is_followed = isinstance(first, Follow) and first.plan.resolve() == (stored or first.plan).resolve()
    return stored if is_followed and part_of(steps, Units) is not None else None


def option_of(steps: Sequence[Step], flag: str) -> tuple[int, str] | None:
    """The step of a list that sets what a flag sets, and its name there: `units.macs`, `distill`; None: no step does.

    The step is given by its index in the list.
    """
    parts = [(number, part) for number, step in enumerate(steps) for part in (step, *step.parts)]
    for number, part in parts:
        if part.name == flag:
            return number, flag
        if (option := part.option_of(flag)) in part.model_fields_set:
            return number, f"{part.name}.{option}"
    return None


def with_flags(fields: Mapping[str, Any], steps: Sequence[Step], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe whose file writes the steps out, with the options that flags replace.

    A flag replaces the option of the only step that has it.

    Raises:
        UsageError: no step has the option, several have it, or it cannot have the value.
    """
    changed = list(steps)
    for name in (name for name in flags if name in OPTIONS_OF_STEPS):
        readers = ((step, [part for part in (step, *step.parts) if part.option_of(name)]) for step in changed)
        matching = [(step, parts[0]) for step, parts in readers if parts]
        heads = [pair for pair in matching if isinstance(pair[1], Heads)]
        matching = heads or matching  # the flags of a selection are those of the heads where there are any
        if len(matching) != 1:
            number = f"{len(matching)} steps have" if matching else "no step has"
            raise UsageError(
                f"{flag_of(name)}: {number} this option, and the recipe file writes the steps out; set it there",
                code=ErrorCode.CONTRADICTION,
                field=name,
                value=flags[name],
            )
        ((step, part),) = matching
        changed[changed.index(step)] = with_option(step, type(part), part.option_of(name) or name, flags[name])
    bounded = [step for step in changed if getattr(step, "max_drop", None) is not None]
    if "max_drop" in flags and len(bounded) == 1:
        step = bounded[0]
        changed[changed.index(step)] = with_option(step, type(step), "max_drop", flags["max_drop"])
    replaced = flags.keys() & OPTIONS_OF_STEPS
    return {**{name: value for name, value in fields.items() if name not in replaced}, "steps": changed}


def with_option(step: Step, kind: type[Step], option: str, value: Any) -> Step:
    """A step with another value for an option of the part of it that is of a kind; as it is if it has no such part."""
    part = step.part(kind)
    if part is None:
        return step
    changed = _changed(part, option, value)
    if part is step:
        return changed
    return _changed(step, "steps", tuple(changed if each is part else each for each in step.parts))


def _changed(step: Step, option: str, value: Any) -> Step:
    return step_of({step.name: {**{name: getattr(step, name) for name in step.model_fields_set}, option: value}})
