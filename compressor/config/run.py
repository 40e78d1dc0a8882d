"""The recipe of a run: all options of `compress run` in sections, one for each stage that reads it.

A flag of the command, a key of `compress.toml` and a field of a section are the same thing. Field names are unique over
all sections, so a recipe can be written flat: `Recipe(model="model", data="train.tsv", keep="50%")`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pydantic

from compressor.config.fields import Config, flag_of, usage_error
from compressor.config.methods import DEFAULT_BUDGET_METHOD
from compressor.config.recipe_checks import check_agreement, check_settings
from compressor.config.recipe_fields import BUDGETS, BUILD_FIELDS, FIELDS, SECTION_OF, SECTIONS, definite_fields
from compressor.config.recipe_sections import RecipeSections
from compressor.config.sections import AUTO
from compressor.config.step_list import check_steps
from compressor.config.steps import steps_from
from compressor.errors import ErrorCode, UsageError

__all__ = ["BUDGETS", "BUILD_FIELDS", "FIELDS", "SECTIONS", "SECTION_OF", "Recipe", "definite_fields"]

PLAIN_MAX_DROP, PLAIN_MINUTES = 0.01, 20.0
"""Loss of the metric, and minutes of the training, of a recipe that has rows and says nothing else."""


class Recipe(RecipeSections):
    """Everything that decides what a run computes. It is frozen, and validated at construction.

    Fields of the sections are given directly, by keyword; docs/recipe.md and `compress recipe` list them with their
    defaults.

    Args:
        name_of: the name of a field in messages; by default its flag.
        source: the model.
        rows: rows to learn from, to choose on and to report on.
        selection: how heads are selected.
        budget: what the compressed model may cost.
        blocks: how blocks of the attention maps are dropped.
        distillation: how the compressed model is trained on the outputs of a whole one.
        engine: what is built.
        export: how the graph is exported.
        measure: sizes to time.
        output: the folder to write.
        steps: what the run does to the model, in order; None: what the flags say.

    Raises:
        UsageError: a field is missing, unknown or out of its range, or two fields contradict each other.
    """

    def __init__(self, name_of: Callable[[str], str] = flag_of, /, **fields: Any) -> None:
        if not callable(name_of):
            raise UsageError(
                f"{name_of!r}: fields of a recipe are given by name; use Recipe(model=...)",
                code=ErrorCode.INVALID_VALUE,
                value=name_of,
            )
        try:
            super().__init__(**_with_settings_of_steps(fields))
        except pydantic.ValidationError as error:
            raise usage_error(error, FIELDS, name_of) from error

    @pydantic.model_validator(mode="before")
    @classmethod
    def _into_sections(cls, fields: Any) -> Any:
        """Move fields that are given directly into their sections."""
        if not isinstance(fields, dict):
            return fields
        sections: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in SECTION_OF:
                sections[name] = value
                continue
            section = sections.setdefault(SECTION_OF[name], {})
            if not isinstance(section, dict):
                section = sections[SECTION_OF[name]] = section.model_dump(exclude_unset=True)
            section[name] = value
        return _with_defaults({"source": {}, **sections})

    @pydantic.model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.steps is None:
            check_agreement(self)
        check_settings(self)
        check_steps(self)
        return self

    def updated(self, **fields: Any) -> Recipe:
        """A copy with other values for some fields, which are not validated.

        Raises:
            UsageError: a recipe has no such field.
        """
        sections: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in SECTION_OF:
                raise UsageError(
                    f"{name}: a recipe has no such field; see docs/recipe.md",
                    code=ErrorCode.UNKNOWN_NAME,
                    field=name,
                )
            sections.setdefault(SECTION_OF[name], {})[name] = value
        copies = {key: getattr(self, key).model_copy(update=values) for key, values in sections.items()}
        return self.model_copy(update=copies)


def _with_settings_of_steps(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a recipe; where its steps are written out, the loss that one of them allows bounds the run too."""
    if fields.get("steps") is None:
        return fields
    steps = steps_from(fields["steps"])
    bounds = [bound for step in steps if (bound := getattr(step, "max_drop", None)) is not None]
    settings = {"max_drop": max(bounds)} if bounds and fields.get("max_drop") is None else {}
    return {**fields, **settings, "steps": steps}


def _with_defaults(sections: dict[str, Any]) -> dict[str, Any]:
    """The sections with what the fields that are set imply.

    1. Rows and nothing that says what to do: as many units are removed as a point of the metric permits, what is left
       is distilled, and the fastest engine that holds is delivered.
    2. A budget, or a loss that is allowed with neither a number of heads nor anything else to learn: the method that
       removes units without training.
    """
    parts = {}
    for key in ("source", "rows", "selection", "budget", "blocks", "distillation", "engine"):
        part = sections.get(key, {})
        if isinstance(part, Config):
            part = part.model_dump(exclude_unset=True)
        if not isinstance(part, dict):
            return sections
        parts[key] = part
    if sections.get("steps") is not None:
        return sections
    selection, budget = parts["selection"], parts["budget"]
    if _says_nothing(parts):
        selection = {**selection, "max_drop": PLAIN_MAX_DROP}
        plain = {"distillation": {"distill": True, "minutes": PLAIN_MINUTES}, "selection": selection}
        sections = {**sections, **plain, "engine": {"target": AUTO, "precision": AUTO, **parts["engine"]}}
    if any(selection.get(name) is not None for name in ("method", "keep", "plan")):
        return sections
    bounded = selection.get("max_drop") is not None and not parts["blocks"]
    if not bounded and not any(budget.get(name) is not None for name in BUDGETS):
        return sections
    return {**sections, "selection": {**selection, "method": DEFAULT_BUDGET_METHOD}}


def _says_nothing(parts: dict[str, dict[str, Any]]) -> bool:
    """Whether there are rows to learn from, no plan to follow, and no field that says what to do with the model."""
    requests = [*parts["blocks"], *parts["distillation"], *(parts["selection"].keys() - {"seed", "batch_size"})]
    requests += [name for name in parts["budget"] if name != "match_dense"]
    engine = parts["engine"]
    if "precision" in engine or engine.get("target") == AUTO:  # an engine of the whole model is requested
        return False
    model = parts["source"].get("model")
    has_plan = model is not None and (Path(model) / "plan.json").exists()
    return parts["rows"].get("data") is not None and not requests and not has_plan
