"""The recipe of a run: all options of `compress run` in sections, one for each stage that reads it.

A flag of the command, a key of `compress.toml` and a field of a section are the same thing. Field names are unique over
all sections, so a recipe can be written flat: `Recipe(model="model", data="train.tsv", keep="50%")`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pydantic

from compressor.config.fields import Config, flag_of, usage_error
from compressor.config.methods import DEFAULT_BUDGET_METHOD
from compressor.config.recipe_checks import check_agreement
from compressor.config.recipe_fields import (
    BUDGETS,
    BUILD_FIELDS,
    FIELDS,
    FORMER_NAMES,
    SECTION_OF,
    SECTIONS,
    current_fields,
    definite_fields,
)
from compressor.config.recipe_sections import RecipeSections
from compressor.config.step_list import check_steps
from compressor.config.steps import steps_from
from compressor.errors import ErrorCode, UsageError

__all__ = [
    "BUDGETS",
    "BUILD_FIELDS",
    "FIELDS",
    "FORMER_NAMES",
    "SECTIONS",
    "SECTION_OF",
    "Recipe",
    "current_fields",
    "definite_fields",
]


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
        return _with_budget_method({"source": {}, **sections})

    @pydantic.model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.steps is None:
            check_agreement(self)
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


def _with_budget_method(sections: dict[str, Any]) -> dict[str, Any]:
    """The sections with the method that a budget implies, where none is set.

    A loss that is allowed, with neither a number of heads nor anything else to learn, means as few units as it permits.
    """
    parts = {}
    for key in ("selection", "budget", "blocks"):
        part = sections.get(key, {})
        if isinstance(part, Config):
            part = part.model_dump(exclude_unset=True)
        if not isinstance(part, dict):
            return sections
        parts[key] = part
    selection, budget = parts["selection"], parts["budget"]
    if selection.get("method") is not None or selection.get("keep") is not None or selection.get("plan") is not None:
        return sections
    bounded = selection.get("max_drop") is not None and not parts["blocks"]
    if not bounded and not any(budget.get(name) is not None for name in BUDGETS):
        return sections
    return {**sections, "selection": {**selection, "method": DEFAULT_BUDGET_METHOD}}
