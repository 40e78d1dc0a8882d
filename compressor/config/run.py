"""The recipe of a run: all options of `compress run` in sections, one for each stage that reads it.

A flag of the command, a key of `compress.toml` and a field of a section are the same thing. Field names are unique over
all sections, so a recipe can be written flat: `Recipe(model="model", data="train.tsv", keep="50%")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import pydantic

from compressor.config.fields import Config, flag_of, usage_error
from compressor.config.methods import DEFAULT_BUDGET_METHOD
from compressor.config.rules import check
from compressor.config.sections import (
    AUTO,
    BUDGETS,
    BUILD_FIELDS,
    FIELDS,
    SECTION_OF,
    SECTIONS,
    BlocksConfig,
    BudgetConfig,
    DistillationConfig,
    SelectionConfig,
    definite_fields,
)
from compressor.config.step_list import RecipeSections, option_of, with_option
from compressor.config.steps import Step, steps_from
from compressor.environment import has_pytorch
from compressor.errors import ErrorCode, UsageError

__all__ = ["BUDGETS", "BUILD_FIELDS", "FIELDS", "SECTIONS", "SECTION_OF", "Recipe", "definite_fields"]

PLAIN_MAX_DROP, PLAIN_MINUTES = 0.01, 20.0
"""Loss of the metric, and minutes of the run, of a recipe that has rows and says nothing else. When the rows are read,
the loss becomes a point of the metric of their task (`compressor.run.load.with_point`)."""

_LEAST_SETTINGS: dict[str, Any] = {"prune_rows": 256, "calibration_rows": 100, "seconds": 1.0}
"""Settings of a plain run that are smaller in fewer minutes than those -> their least values."""


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
            text = f"{name_of!r}: fields of a recipe are given by name; use Recipe(model=...)"
            raise UsageError(text, code=ErrorCode.INVALID_VALUE, value=name_of)
        steps = steps_from(fields["steps"]) if fields.get("steps") is not None else None

        def name_in_message(name: str) -> str:
            option = None if name in fields else option_of(steps or (), name)
            return name_of(name) if option is None else option[1]

        try:
            # The loss that a step of a list allows bounds the run too.
            bounds = [bound for step in steps or () if (bound := getattr(step, "max_drop", None)) is not None]
            implied = {"max_drop": max(bounds)} if bounds and fields.get("max_drop") is None else {}
            super().__init__(**{**fields, **implied, "steps": steps})
        except pydantic.ValidationError as error:
            fault = usage_error(error, FIELDS, name_in_message)
            if (option := option_of(steps or (), fault.details["field"])) is not None:
                fault.details.setdefault("step", option[0])
            raise fault from error
        selection = fields.get("selection") or ()
        named = selection.model_fields_set if isinstance(selection, Config) else selection
        if steps is None and "max_drop" not in (*named, *fields):
            self.selection.model_fields_set.discard("max_drop")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _into_sections(cls, fields: Any) -> Any:
        """Move fields that are given directly into their sections, with those that they imply."""
        if not isinstance(fields, dict):
            return fields
        sections: dict[str, Any] = {name: {} for name in SECTIONS}
        for name, value in fields.items():
            if isinstance(value, Config | dict) and name in SECTIONS:
                sections[name] |= value.model_dump(exclude_unset=True) if isinstance(value, Config) else value
            elif name in SECTION_OF:
                sections[SECTION_OF[name]] |= {name: value}
            else:
                sections[name] = value
        parts = [sections[name] for name in SECTIONS]
        if sections.get("steps") is None and all(isinstance(part, dict) for part in parts):
            set_fields = {name: value for part in parts for name, value in part.items()}
            for name, value in _implied(set_fields).items():
                sections[SECTION_OF[name]] |= {name: value}
        return sections

    @pydantic.model_validator(mode="after")
    def _fields_agree(self) -> Self:
        check(self)
        return self

    @property
    def allows_a_point(self) -> bool:
        """Whether a loss of the metric is allowed that no field sets: a point."""
        return self.selection.max_drop is not None and "max_drop" not in self.fields_set

    def updated(self, **fields: Any) -> Recipe:
        """A copy with other values for some fields, which are not validated.

        Raises:
            UsageError: a recipe has no such field.
        """
        sections: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in SECTION_OF:
                raise UsageError(
                    f"{name}: a recipe has no such field; see docs/recipe.md", code=ErrorCode.UNKNOWN_NAME, field=name
                )
            sections.setdefault(SECTION_OF[name], {})[name] = value
        copies = {key: getattr(self, key).model_copy(update=values) for key, values in sections.items()}
        return self.model_copy(update=copies)

    def with_option(self, kind: type[Step], name: str, value: Any) -> Recipe:
        """A copy with another value for an option of its step of a kind, which flags or a list request.

        Args:
            name: the option; its flag has the same name.
        """
        if self.steps is None:
            return self.updated(**{name: value})
        return self.model_copy(update={"steps": tuple(with_option(step, kind, name, value) for step in self.steps)})


def _implied(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that follow from those that are set.

    1. Rows and nothing that says what to do: as many units are removed as a point of the metric permits, what is left
       is distilled where PyTorch is installed, and the fastest engine that holds is delivered.
    2. A budget, or a loss that is allowed with neither a number of heads nor anything else to learn: the method that
       removes units without training.

    Args:
        fields: the fields that are set, by name. Their values are not validated yet, as this decides which there are.
    """
    implied: dict[str, Any] = {}
    if _says_nothing(fields):
        minutes = fields.get("minutes", PLAIN_MINUTES)
        implied = {"max_drop": PLAIN_MAX_DROP, **({"distill": True, "minutes": minutes} if has_pytorch() else {})}
        settings = {"target": AUTO, "precision": AUTO, **_settings_within(minutes)}
        implied |= {name: value for name, value in settings.items() if name not in fields}
    is_set = {name for name, value in {**fields, **implied}.items() if value is not None}
    bounded = "max_drop" in is_set and "plan" not in is_set and not fields.keys() & BlocksConfig.model_fields.keys()
    if not is_set & {"method", "keep"} and (bounded or is_set & set(BUDGETS)):
        implied["method"] = DEFAULT_BUDGET_METHOD
    return implied


def _settings_within(minutes: Any) -> dict[str, Any]:
    """The settings of a plain run of few minutes: what takes time in proportion to them, down to a least value."""
    try:
        share = float(minutes) / PLAIN_MINUTES
    except (TypeError, ValueError):  # which is refused later
        return {}
    if not 0 < share < 1:
        return {}
    return {name: max(least, type(least)(share * FIELDS[name].default)) for name, least in _LEAST_SETTINGS.items()}


_NO_REQUEST = {"seed", "batch_size", "match_dense", "minutes"}
"""Fields of steps that do not say what to do with the model. The minutes are those of the plain run."""


def _says_nothing(fields: Mapping[str, Any]) -> bool:
    """Whether there are rows to learn from, no plan to follow, and no field that says what to do with the model."""
    of_steps = (SelectionConfig, BudgetConfig, BlocksConfig, DistillationConfig)
    requests = {"precision", *(name for section in of_steps for name in section.model_fields)} - _NO_REQUEST
    if fields.get("data") is None or fields.keys() & requests or fields.get("target") == AUTO:
        return False
    model = fields.get("model")
    return model is None or not (Path(model) / "plan.json").exists()
