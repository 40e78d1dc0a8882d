"""Options of a command made from the fields of its configuration: one field, one flag."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from compressor.cli.command_group import Command
from compressor.config.fields import choices_of, extra_of, flag_of, has_default, heading_of

F = TypeVar("F", bound=Callable[..., Any])
_COMMON = "Common"
_FURTHER_FLAGS = {"out": ["-o"], "compare_with": ["--with"]}
"""Field name -> its flags beside that of its name."""


class FieldsCommand(Command):
    """A command that lists its options under the headings of their fields."""

    def __init__(self, *args: Any, fields: Mapping[str, FieldInfo] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.fields = fields or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            field = self.fields.get(str(option.name))
            record = option.get_help_record(ctx)
            if record and isinstance(option, click.Option):
                rows.setdefault(heading_of(field) if field else _COMMON, []).append(record)
        for heading, records in sorted(rows.items(), key=lambda row: row[0] == _COMMON):
            with formatter.section(heading):
                formatter.write_dl(records)


def options_of(fields: Mapping[str, FieldInfo] | type[BaseModel], *, without: Collection[str] = ()) -> Callable[[F], F]:
    """A decorator that gives a command one option per field.

    Args:
        fields: fields by name, or a model that has them.
        without: fields that are arguments of the command, or that it sets itself.
    """
    by_name = fields if isinstance(fields, Mapping) else fields.model_fields

    def decorate(command: F) -> F:
        for name, field in reversed(list(by_name.items())):
            if name not in without:
                command = option_of(name, field, multiple=bool(extra_of(field, "is_secret")))(command)
        return command

    return decorate


def option_of(name: str, field: FieldInfo, *, multiple: bool = False, help_text: str | None = None) -> Callable[[F], F]:
    """The option of one field; its value is None where the flag is not given, or `()` if `multiple`.

    Args:
        name: name of the field.
        field: the field, with its description and default.
        multiple: whether the flag may be repeated.
        help_text: description in place of that of the field; None: that of the field.
    """
    default = field.get_default(call_default_factory=True) if has_default(field) else None
    note = " [required]" if field.is_required() else "" if default is None else f" [{_as_text(default)}]"
    text = f"{help_text or field.description}{note}"
    if field.annotation is bool:
        return click.option(f"{flag_of(name)}/{flag_of(f'no_{name}')}", name, default=None, help=text)
    flags = (*_FURTHER_FLAGS.get(name, ()), flag_of(name))
    return click.option(*flags, name, metavar=_metavar(name, field), help=text, multiple=multiple)


def _as_text(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _metavar(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is dict:
        return "NAME=VALUE,..."
    choices = choices_of(field)
    return "|".join(map(str, choices)) if choices else name.split("_")[-1].upper()
