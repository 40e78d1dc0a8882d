"""What all configurations share: their base class, fields with metadata, and errors that name a flag or a key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from compressor.errors import ErrorCode, UsageError, suggestion

_PLACEHOLDER, _PERCENTAGE = re.compile(r"<(\w+)>"), re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*")


class FieldConflictError(ValueError):
    """Fields that contradict each other, or one that needs another.

    Args:
        message: `<name>` stands for a field; it is replaced by the flag or the key of a file that set the field.
        fields: the fields at fault, the main one first.
        step: the index of the step at fault in a list that is written out; None: no single step is.
    """

    def __init__(self, code: ErrorCode, message: str, *fields: str, step: int | None = None) -> None:
        super().__init__(_PLACEHOLDER.sub(r"\1", message))
        self.code, self.message, self.fields, self.step = code, message, fields, step

    def text(self, name_of: Callable[[str], str]) -> str:
        """The message with each `<name>` replaced by `name_of(name)`."""
        return _PLACEHOLDER.sub(lambda field: name_of(field[1]), self.message)


@dataclass(frozen=True)
class Rule:
    """An option that needs others, or excludes them; or a fact that may not hold, without either.

    Names are those of options, which count where they differ from their default, of options with a text as their value
    (`device=cpu`), and of facts that hold.

    Attributes:
        option: the option or fact that the rule is about.
        text: why, and how to mend it; `<name>` stands for a field.
        needs: of these, at least one has to be set; empty: none has to be.
        excludes: of these, none may be set.
        fields: the fields at fault, the main one first; by default those of `option` and of the first of the others.
        code: the kind of the error.
    """

    option: str
    text: str
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    code: ErrorCode = ErrorCode.CONTRADICTION


def check_rules(
    rules: Sequence[Rule],
    options: Mapping[str, Any],
    facts: Mapping[str, tuple[str, Any]],
    fields: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that options and facts follow rules.

    Args:
        options: option that is set -> its value.
        facts: fact that holds -> the field that it follows from, and the value to show.
        fields: fact that may not hold -> the field that it follows from.

    Raises:
        FieldConflictError: a rule is violated.
    """
    texts = {f"{name}={value}": (name, value) for name, value in options.items() if isinstance(value, str)}
    known = {name: (name, value) for name, value in options.items()} | texts | dict(facts)
    for rule in rules:
        excluded = [name for name in rule.excludes if name in known][:1]
        is_met = any(name in known for name in rule.needs) if rule.needs else bool(rule.excludes)
        if rule.option not in known or (is_met and not excluded):
            continue
        subject = ", ".join(shown(*known[name]) for name in (rule.option, *excluded))
        at_fault = [known[name][0] for name in (rule.option, *excluded)]
        if not excluded:
            at_fault += [fields.get(name, name.partition("=")[0]) for name in rule.needs[:1]]
        raise FieldConflictError(rule.code, f"{subject}: {rule.text}", *(rule.fields or at_fault))


def shown(name: str, value: Any) -> str:
    """A field with its value, for the messages of conflicts; without it where it is a switch or has several parts."""
    has_text = isinstance(value, str | int | float | Path) and value is not True
    return f"<{name}>" + (f" {value:g}" if isinstance(value, float) else f" {value}" if has_text else "")


class Config(BaseModel):
    """Base of every configuration: frozen, without unknown fields, and validated at construction.

    Attributes:
        rules: which options go together.
        facts: property, named in rules -> the option that it follows from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)
    rules: ClassVar[tuple[Rule, ...]] = ()
    facts: ClassVar[Mapping[str, str]] = {}

    @property
    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        fields = type(self).model_fields
        return {
            name: value
            for name, value in self
            if fields[name].is_required() or value != fields[name].get_default(call_default_factory=True)
        }

    @pydantic.model_validator(mode="after")
    def _follows_rules(self) -> Self:
        facts = {name: (field, getattr(self, field)) for name, field in self.facts.items() if getattr(self, name)}
        check_rules(self.rules, self.changed, facts, self.facts)
        return self


class InvalidValueError(ValueError):
    """A value that its field cannot hold; the message says why and how to mend it."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_VALUE) -> None:
        super().__init__(message)
        self.code = code


def config_field(
    heading: str,
    description: str,
    default: Any = None,
    *,
    required: bool = False,
    runs_code: bool = False,
    is_secret: bool = False,
    is_basic: bool = False,
    choices: Sequence[str] = (),
) -> Any:
    """A field of a configuration.

    Args:
        heading: section of `--help` and of the documentation that lists it.
        description: its help text, in clauses separated by semicolons; the first clause says what the value is.
        default: value where the field is not set.
        required: whether the field has no default.
        runs_code: whether the field makes the command load code or trust another machine; a model folder's own recipe
            may not set it.
        is_secret: whether no message may show its value; such a field is a list, and its flag may be repeated.
        is_basic: whether `--help` lists the field of a command whose options do not all fit on one screen.
        choices: the accepted names, where they come from a registry rather than from a `Literal`.
    """
    extra: dict[str, Any] = {
        "heading": heading,
        "runs_code": runs_code,
        "is_secret": is_secret,
        "is_basic": is_basic,
    }
    if choices:
        extra["enum"] = list(choices)
    options: dict[str, Any] = {} if required else {"default": default}
    return Field(description=description, json_schema_extra=extra, **options)


def extra_of(field: FieldInfo, name: str) -> Any:
    """One of the properties that `config_field` gave a field."""
    extra = field.json_schema_extra
    return extra.get(name) if isinstance(extra, dict) else None


def is_path(field: FieldInfo) -> bool:
    """Whether a field names a file or folder; in a recipe it is relative to the recipe's folder."""
    return any(kind is Path or Path in get_args(kind) for kind in (field.annotation, *get_args(field.annotation)))


def flag_of(name: str) -> str:
    """The flag of a field: `eval_data` is `--eval-data`."""
    return f"--{name.replace('_', '-')}"


def has_default(field: FieldInfo) -> bool:
    """Whether a field has a default that a reader should see."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return default is not False and default not in (None, (), {})


def choices_of(field: FieldInfo) -> tuple[Any, ...]:
    """The values that a field chooses among; empty where it takes any value."""
    if registered := extra_of(field, "enum"):
        return tuple(registered)
    annotations = [field.annotation, *get_args(field.annotation)]
    return next((get_args(kind) for kind in annotations if get_origin(kind) is Literal), ())


_MESSAGES: Mapping[str, str] = {
    "float_parsing": "not a number",
    "float_type": "not a number",
    "int_parsing": "not a whole number",
    "int_type": "not a whole number",
    "int_from_float": "not a whole number",
    "bool_parsing": "neither true nor false",
    "finite_number": "not finite",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "model_type": "not an object",
    "tuple_type": "not a list",
    "string_type": "not a text",
    "string_too_short": "empty",
    "too_long": "more than {max_length} values",
}
"""Messages of this package in place of pydantic's, by the type of the error."""


def usage_error(
    error: pydantic.ValidationError, fields: Mapping[str, FieldInfo], name_of: Callable[[str], str]
) -> UsageError:
    """The first error of a validation as one line, with the field's flag or key, the code, and the value.

    Args:
        fields: the fields by name, for their help texts.
        name_of: the flag or key under which a field was set.
    """
    fault = error.errors(include_url=False)[0]
    secrets = {name for name, field in fields.items() if extra_of(field, "is_secret")}
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, FieldConflictError):
        at_fault = {} if cause.step is None else {"step": cause.step}
        return UsageError(cause.text(name_of), code=cause.code, field=cause.fields[0], fields=cause.fields, **at_fault)
    if fault["type"] == "extra_forbidden":
        unknown = str(fault["loc"][-1])
        message = f"unknown field {unknown}; {suggestion(unknown, list(fields))}"
        return UsageError(
            message, code=ErrorCode.UNKNOWN_NAME, field=unknown, value=None if secrets else fault["input"]
        )
    name = next((str(part) for part in reversed(fault["loc"]) if part in fields), "")
    if fault["type"] == "missing" and name:
        hint = f" ({text})" if (text := fields[name].description) else ""
        message = f"{name_of(name)}: missing{hint}; give a value"
        return UsageError(message, code=ErrorCode.MISSING_VALUE, field=name)
    code, message = describe_fault(fault)
    description = fields[name].description if name else None
    hint = "" if ";" in message or not description else f" ({description}); change its value"
    # Without a name the value is that of all fields.
    value = None if name in secrets or (secrets and not name) else fault["input"]
    subject = "" if not name else f"{name_of(name)}: " if name in secrets else f"{name_of(name)} {value!r}: "
    return UsageError(f"{subject}{message}{hint}", code=code, field=name, value=value)


def describe_fault(fault: Mapping[str, Any]) -> tuple[ErrorCode, str]:
    """Code and message of an error in one field, an item of `pydantic.ValidationError.errors()`."""
    kind, cause = str(fault["type"]), fault.get("ctx", {}).get("error")
    if isinstance(cause, InvalidValueError):
        return cause.code, str(cause)
    if kind == "literal_error" and (names := re.findall(r"'([^']*)'", str(fault["ctx"]["expected"]))):
        return ErrorCode.UNKNOWN_NAME, f"unknown; {suggestion(str(fault['input']), names)}"
    if kind == "float_parsing" and (percentage := _PERCENTAGE.fullmatch(str(fault["input"]))):
        return ErrorCode.INVALID_VALUE, f"not a number; write {float(percentage[1]) / 100:g}"
    ranges = ("greater_than", "less_than", "finite_number", "literal_error", "too_short", "too_long")
    code = ErrorCode.OUT_OF_RANGE if kind.startswith(ranges) else ErrorCode.INVALID_VALUE
    if kind in _MESSAGES:
        return code, _MESSAGES[kind].format(**fault.get("ctx", {}))
    message = " ".join(str(fault["msg"]).removeprefix("Value error, ").split())
    return code, message[0].lower() + message[1:]


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """A validator that accepts the given names and raises InvalidValueError for others."""

    def check(value: str) -> str:
        if value not in names:
            raise InvalidValueError(f"unknown; {suggestion(value, names)}", ErrorCode.UNKNOWN_NAME)
        return value

    return check


def as_list(value: Any) -> Any:
    """A list: text is split at commas (`1,8`, as a flag gives it), and any other single value becomes a list of one."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value if isinstance(value, (list, tuple)) else [value]


def reference_rows(fields: Mapping[str, FieldInfo]) -> Iterator[tuple[str, str, str]]:
    """Rows (name, default, description with choices) of the documentation's table of fields."""
    for name, field in fields.items():
        value = field.get_default()
        text = f"{value:.4g}" if isinstance(value, float) else str(value).strip("()").rstrip(",")
        default = text if has_default(field) or value is False else ""
        choices = ", ".join(f"`{choice}`" for choice in choices_of(field))
        yield f"`{name}`", default, f"{field.description}{f'; one of {choices}' if choices else ''}".replace("|", "/")
