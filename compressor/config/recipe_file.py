"""Recipes from files and flags: `compress.toml`, the flags of a command, and the command line of a recipe."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.config.fields import extra_of, flag_of, is_path
from compressor.config.run import FIELDS, SECTION_OF, SECTIONS, Recipe
from compressor.config.sections import BUDGETS, ROW_SOURCES
from compressor.config.step_list import OPTIONS_OF_STEPS, steps_of, with_flags
from compressor.config.steps import STEPS, Heads, Step, Units, parts_of, step_of, steps_from
from compressor.config.tasks import is_own_task
from compressor.config.values import names_row_file
from compressor.errors import ErrorCode, UsageError, suggestion

_STEPS_HEADER, _STEPS_KEY = re.compile(r"\s*\[\[\s*steps\s*\]\]"), re.compile(r"\s*\[?\s*steps\b")
FILE_NAME = "compress.toml"
"""Name of the recipe in a model folder, which is read where no other recipe is named."""


@dataclass(frozen=True)
class RecipeFile:
    """A recipe file that was read.

    Attributes:
        path: the file.
        fields: field name -> value; relative paths have been joined to the file's folder.
        lines: the line of each step that the file writes out.
    """

    path: Path
    fields: Mapping[str, Any]
    lines: tuple[int, ...] = ()

    def with_flags(
        self, model: str | None, flags: Mapping[str, Any], options: Mapping[str, Any] | None = None
    ) -> Recipe:
        """The recipe of a command with this file: a flag wins over the file, the file over the default.

        The arguments are those of `recipe_of`.

        Raises:
            UsageError: no model is named, or a value is out of its range. The message names the flag or key.
        """
        fields = {**self.fields, **({"model": model} if model else {}), **flags}
        if "model" not in fields:
            raise UsageError(
                f"{self.path}: no model folder is set; use compress MODEL, or add a line model = ...",
                code=ErrorCode.MISSING_VALUE,
                field="model",
            )

        is_listed = "steps" in self.fields and "steps" not in flags
        keys = set[str]()

        def name_of(name: str) -> str:
            if name in flags or name not in self.fields:
                return flag_of(name)
            keys.add(name)
            return name

        if "steps" in flags:  # which replace what the file says of them
            fields = {name: value for name, value in fields.items() if name in flags or name not in OPTIONS_OF_STEPS}
        elif is_listed:
            fields = with_flags(fields, self.fields["steps"], flags)
        try:
            recipe = Recipe(name_of, **fields)
        except UsageError as error:
            is_of_list = "steps" in keys or error.details.get("field") == "steps"
            step = error.details.get("step", 0 if is_of_list else None) if is_listed else None
            if step is None and not keys:
                raise
            raise self.located(error, step) from error
        selecting = selecting_step(recipe)
        if not options or selecting is None:
            return recipe
        return recipe.with_option(type(selecting), "options", {**selecting.options, **options})

    def located(self, error: UsageError, step: int | None) -> UsageError:
        """An error of what the file says, whose message begins with the file, and with the line of a step."""
        line = f":{self.lines[step]}" if step is not None and step < len(self.lines) else ""
        return UsageError(f"{self.path}{line}: {error}", code=error.code, **{**error.details, "path": self.path})


def recipe_of(
    model: str | None, file: str | None, flags: Mapping[str, Any], *, options: Mapping[str, Any] | None = None
) -> Recipe:
    """The recipe of one command: a flag wins over the file, the file over the default.

    Args:
        model: the model folder; None where the file names it.
        file: a recipe file (`--recipe`); None for `compress.toml` in the model folder, if it exists.
        flags: field name -> value of its flag.
        options: options of the method that have a flag of their own; they join those of `flags` or of the file.

    Raises:
        UsageError: the file cannot be read, a key is unknown, a value is out of its range, or the model folder's own
            file sets a field that only the command line or `--recipe` may set. The message names the flag or key.
    """
    return stored_recipe(model, file).with_flags(model, flags, options)


def stored_recipe(model: str | None, file: str | None) -> RecipeFile:
    """The recipe file of a command, see `recipe_of`; one without fields where the model folder has none.

    Raises:
        UsageError: neither is set, the file cannot be read, or the model folder's own file sets a field that only the
            command line or `--recipe` may set.
    """
    if file:
        return read_recipe(Path(file))
    if not model:
        raise UsageError(
            "no model folder is set; use compress MODEL, or --recipe FILE with a line model = ...",
            code=ErrorCode.MISSING_VALUE,
            field="model",
        )
    path = Path(model) / FILE_NAME
    if not path.is_file():
        return RecipeFile(path, {})
    recipe = read_recipe(path)
    check_folder_recipe(recipe)
    return recipe


def selecting_step(recipe: Recipe) -> Heads | Units | None:
    """The step of a recipe whose method selects the first units that are removed; None: none are."""
    return next((step for step in parts_of(steps_of(recipe)) if isinstance(step, Heads | Units)), None)


def read_recipe(path: Path) -> RecipeFile:
    """Read a recipe file. Relative paths in it are joined to its folder.

    Keys may stand alone or in a table named after their section: `keep = 36`, or `[selection]` and `keep = 36`.

    Raises:
        UsageError: the file is missing, is not TOML, or has an unknown key.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except FileNotFoundError as error:
        raise UsageError.of_file(path, "no such recipe; name a TOML file (--recipe)", ErrorCode.FILE_MISSING) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError.of_file(
            path, f"not a recipe ({error}); correct the TOML", ErrorCode.FILE_UNREADABLE
        ) from error
    fields, lines = dict[str, Any](), tuple[int, ...]()
    if "steps" in content:
        fields["steps"], lines = _read_steps(path, text, content.pop("steps"))
    for key, value in content.items():
        table = value if key in SECTIONS and isinstance(value, dict) else {key: value}
        for name, entry in ((name.replace("-", "_"), entry) for name, entry in table.items()):
            if table is value and SECTION_OF.get(name, key) != key:
                text = f"[{key}] {name}: the key belongs to [{SECTION_OF[name]}]; move it there"
                raise UsageError.of_file(path, text, ErrorCode.CONTRADICTION, field=name)
            if name not in FIELDS:
                text = f"unknown key {name}; {suggestion(name, [*FIELDS, *SECTIONS])}"
                raise UsageError.of_file(path, text, ErrorCode.UNKNOWN_NAME, field=name)
            if name in fields:
                text = f"{name} is set twice; keep one of both"
                raise UsageError.of_file(path, text, ErrorCode.CONTRADICTION, field=name)
            names_file = isinstance(entry, str) and _names_file(name, path.parent / entry)
            fields[name] = str(path.parent / entry) if names_file else entry
    return RecipeFile(path, fields, lines)


def _read_steps(path: Path, text: str, tables: Any) -> tuple[list[Step], tuple[int, ...]]:
    """The steps of `[[steps]]`, and the line of each; relative paths in their options are joined to the folder."""
    tables = tables if isinstance(tables, list) else [tables]
    content = text.splitlines()
    lines = tuple(number for number, line in enumerate(content, 1) if _STEPS_HEADER.match(line))
    if len(lines) != len(tables):  # they are an array, `steps = [...]`, whose steps have no lines of their own
        first = next((number for number, line in enumerate(content, 1) if _STEPS_KEY.match(line)), 1)
        lines = (first,) * max(1, len(tables))
    steps = list[Step]()
    try:
        for table in tables:
            steps.append(_joined(step_of(table), path.parent))
        return list(steps_from(steps)), lines
    except UsageError as error:
        raise RecipeFile(path, {}, lines).located(error, len(steps)) from error


def _joined(step: Step, folder: Path) -> Step:
    """A step whose relative paths, and those of the steps that it carries out, are joined to a folder."""
    changes: dict[str, Any] = {name: folder / value for name, value in step if isinstance(value, Path)}
    if step.parts != (step,):
        changes["steps"] = tuple(_joined(part, folder) for part in step.parts)
    return step.model_copy(update=changes)


def check_folder_recipe(recipe: RecipeFile) -> None:
    """Check that a recipe inside a model folder sets nothing unsafe, since a downloaded folder is not trusted.

    1. Fields that load code or trust another machine are refused.
    2. Paths that leave the folder are refused.

    Raises:
        UsageError: code `UNSAFE_RECIPE`; it names the flag that sets the field from the command line.
    """
    for name, key, reason in _unsafe_fields(recipe):
        flag = f"{flag_of(name)} or " if name == key else ""
        raise UsageError.of_file(
            recipe.path,
            f"{key} may not be set by the model folder's own recipe, because {reason}; if you trust the folder, use"
            f" {flag}--recipe {shlex.quote(str(recipe.path))}",
            ErrorCode.UNSAFE_RECIPE,
            field=name,
        )


def _unsafe_fields(recipe: RecipeFile) -> Iterator[tuple[str, str, str]]:
    """Each field that is unsafe, its key in the file, and why."""
    folder = recipe.path.parent.resolve()

    def leaves(path: Path) -> bool:
        return not path.resolve().is_relative_to(folder)

    for step in parts_of(recipe.fields.get("steps", ())):
        for name, value in step:
            if name == "ray" and value is not None:
                yield name, f"{step.name}.{name}", "it can run code on another machine"
            if isinstance(value, Path) and leaves(value):
                yield name, f"{step.name}.{name}", f"{value} lies outside the model folder"
    for name, value in recipe.fields.items():
        if name == "steps":
            continue
        if (extra_of(FIELDS[name], "runs_code") and value is not False) or (name == "task" and is_own_task(value)):
            yield name, name, "it can run code"
        if isinstance(value, str) and _names_file(name, Path(value)) and leaves(Path(value)):
            yield name, name, f"{value} lies outside the model folder"


def _names_file(name: str, path: Path) -> bool:
    """Whether a value names a file; the value of a field of rows may name a data set of a hub instead."""
    if name in ROW_SOURCES:
        return names_row_file(path) or path.exists()
    return is_path(FIELDS[name])


def command_line(recipe: Recipe) -> str:
    """The command that runs exactly this recipe, whatever recipe files exist."""
    words = ["compress", "run", str(recipe.source.model), "--recipe", os.devnull]
    for name, field in FIELDS.items():
        value = recipe.value(name)
        # A budget, or the loss of the metric alone, implies another method than the default of the field.
        bounded = recipe.budget.is_set or recipe.selection.max_drop is not None
        implies_method = bounded and recipe.steps is None
        is_default = value == field.default and not (name == "method" and implies_method)
        if name in ("model", "compare_points") or is_default:  # one rung has no page of a ladder
            continue
        if name == "epochs" and recipe.selection.training_steps is not None:
            continue  # steps replace epochs
        if isinstance(value, bool):
            words.append(flag_of(name) if value else flag_of(f"no_{name}"))
        else:
            words += [flag_of(name), _as_text(value)]
    if recipe.steps is not None:
        words += ["--steps", steps_text(recipe.steps)]
    return shlex.join(words)


def steps_text(steps: Iterable[Step]) -> str:
    """Steps as one line of TOML, as `--steps` reads them; options that are not set are left out."""
    return _as_toml([{step.name: step.model_dump(mode="json", exclude_unset=True)} for step in steps])


def _as_toml(value: Any) -> str:
    """A value of JSON as one of TOML, in which tables are written otherwise and null does not exist."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(name)} = {_as_toml(item)}" for name, item in value.items() if item is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={_as_text(item)}" for name, item in value.items())
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def json_schema() -> dict[str, Any]:
    """The JSON schema of `compress.toml`: every field of a recipe as a key, all optional.

    As `read_recipe` does, it accepts keys in a table named after their section, dashes for underscores, and values as
    the text of their flag.
    """
    properties: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        schema = section.model_json_schema()
        keys = {key: _accepted(key, content) for key, content in schema["properties"].items()}
        keys |= {key.replace("_", "-"): content for key, content in keys.items()}
        properties |= keys
        tables[name] = {"type": "object", "additionalProperties": False, "properties": keys}
        definitions |= schema.get("$defs", {})
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "compress.toml",
        "type": "object",
        "additionalProperties": False,
        "properties": {"steps": _steps_schema()} | tables | properties,
    }
    return schema | ({"$defs": definitions} if definitions else {})


def _steps_schema() -> dict[str, Any]:
    """The schema of `[[steps]]`: tables with one step each."""
    options: dict[str, Any] = {name: {option: {} for option in step.model_fields} for name, step in STEPS.items()}
    tables = {name: {"type": "object", "properties": properties} for name, properties in options.items()}
    table = {"type": "object", "additionalProperties": False, "minProperties": 1, "maxProperties": 1}
    return {"type": "array", "items": {**table, "properties": tables}}


def _accepted(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a field with all forms of values that a file may have."""
    kept = {key: value for key, value in schema.items() if key in ("title", "description", "default")}
    extras = {"heading", "runs_code", "is_secret", "is_basic", *kept}
    content = {key: value for key, value in schema.items() if key not in extras}
    forms = [content]
    if content.get("type") not in ("string", "boolean") and "enum" not in content:
        forms.append({"type": "string"})
    if "items" in content:  # a single value for a list of one
        forms.append(content["items"])
    if name in BUDGETS:  # several values are a ladder
        forms.append({"type": "array", "items": {"type": ["number", "string"]}})
    return kept | (content if len(forms) == 1 else {"anyOf": forms})
