"""The recipe of a run: all options of `compress run` in sections, one for each stage that reads it.

A flag of the command, a key of `compress.toml` and a field of a section are the same thing. Field names are unique over
all sections, so a recipe can be written flat: `Recipe(model="model", data="train.tsv", keep="50%")`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import pydantic

from compressor.config.fields import Config, fields_with, flag_of, usage_error
from compressor.config.methods import DEFAULT_BUDGET_METHOD
from compressor.config.recipe_checks import check_agreement
from compressor.config.recipe_fields import BUDGETS, BUILD_FIELDS, FIELDS, SECTION_OF, SECTIONS, definite_fields
from compressor.config.recipe_sections import RecipeSections
from compressor.config.sections import BudgetConfig, DistillationConfig
from compressor.errors import ErrorCode, UsageError

__all__ = ["BUDGETS", "BUILD_FIELDS", "FIELDS", "SECTIONS", "SECTION_OF", "Recipe", "definite_fields"]
_LEARNED_FORM = 3
"""Form of plans and checkpoints that an interrupted run leaves; those of another form are learned again."""


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
            super().__init__(**fields)
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
        check_agreement(self)
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

    def learning_key(self, stage: Literal["heads", "pruned"] | None = None, **fingerprints: str) -> str:
        """Hash of the fields that decide what is learned, and of the fingerprints of the files that they name.

        Where blocks are dropped, the engine's settings are included, since they decide whether a mask pays.

        Args:
            stage: what is learned first, without the fields that decide later stages alone; None: everything.
            fingerprints: hashes of the model and of the rows.
        """
        names = set(fields_with(FIELDS, "decides_plan"))
        if stage is not None:
            names -= set(DistillationConfig.model_fields)
        if stage == "heads":
            names -= set(BudgetConfig.model_fields)
        if self.selection.keep is None and self.selection.searches:  # the allowed loss then decides how many heads go
            names.add("max_drop")
        if self.prunes and stage != "heads":
            names |= {"target", "provider", "precision", "threads", "batch", "seq", "shapes", "max_drop"}
            names |= {"keep_unread_positions", "pool_in_graph", "opset", "attention"}  # costs depend on the graph
        if self.blocks.drops_any:
            names |= {"provider", "precision", "threads", "batch", "seq"}
            for name, file in (("maps", self.blocks.maps), ("kernel", self.engine.kernel)):
                if file is not None:
                    fingerprints[name] = _file_hash(file)
        if self.budget.start_from is not None and stage != "heads":
            # The plan holds the fingerprint of the weights.
            fingerprints["start"] = _file_hash(self.budget.start_from / "plan.json")
        if self.start_plan_file is not None:
            fingerprints["start"] = _file_hash(self.start_plan_file)
        if self.distills and self.plan_file is not None:
            fingerprints["plan"] = _file_hash(self.plan_file)
        if stage is None and self.distillation.teacher is not None:
            fingerprints["teacher"] = _folder_hash(self.distillation.teacher)
        content = {name: value for name, value in self.flat().items() if name in names} | fingerprints
        content["form"] = _LEARNED_FORM
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_hash(file: Path) -> str:
    """Hash of the content of a file; empty where there is none."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _folder_hash(folder: Path) -> str:
    """Hash of the names and contents of the files of a model folder, without its subfolders."""
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    return hashlib.sha256("".join(f"{file.name} {_file_hash(file)} " for file in files).encode()).hexdigest()


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
