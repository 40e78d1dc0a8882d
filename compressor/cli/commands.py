"""Shared parts of the commands: the group, common flags, options from fields with two screens of help, output files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_origin

import click
from click_default_group import DefaultGroup
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from compressor.cli.console import Console
from compressor.config.fields import choices_of, extra_of, flag_of, has_default
from compressor.config.sections import HEADINGS, MODEL
from compressor.errors import ErrorCode, UsageError, most_similar

F = TypeVar("F", bound=Callable[..., Any])

SCREEN = 25
"""Most options that `--help` lists. A command with more lists the basic options; `--help-all` lists every option."""
HELP_ALL = "--help-all"
_COMMON = {
    "quiet": "print results and errors only, no progress and no notes",
    "debug": "show the traceback of an error, and warnings of libraries",
    "json": "print results as JSON on stdout",
}
_COMMON_HEADING = "Common"
_FURTHER_FLAGS = {"out": ["-o"]}
"""Field name -> its additional flags."""
_LONGEST_CHOICES = 60
"""Most characters of choices behind a flag; longer choices end its description."""


class Interrupted(click.ClickException):
    """Ctrl-C."""

    exit_code = 130


@contextmanager
def _broken_pipe_raised() -> Iterator[None]:
    """Raise BrokenPipeError without its error number: click would recognize the number and exit with code 1."""
    try:
        yield
    except BrokenPipeError as error:
        raise BrokenPipeError from error


class Command(click.Command):
    """A command that takes no flag as the value of a flag: `--data --distill` lacks a value.

    It raises errors for Ctrl-C and for a reader of the output that has gone.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _broken_pipe_raised():  # --help is printed here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _broken_pipe_raised():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(str(interrupt) or "interrupted") from interrupt

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            self._require_values(ctx, list(itertools.takewhile(lambda word: word != "--", args)))
        return super().parse_args(ctx, args)

    def _require_values(self, ctx: click.Context, words: Sequence[str]) -> None:
        """Raise BadOptionUsage for an option that is followed by an option instead of its value."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
        with_value = {flag for option in options if not option.is_flag for flag in option.opts}
        for flag, word in itertools.pairwise(words):
            following = word.partition("=")[0]
            if flag in with_value and following in flags:
                raise click.BadOptionUsage(flag, f"Option {flag!r} needs a value, and {following!r} is an option.", ctx)


class CommandGroup(Command, DefaultGroup):
    """The group of commands, in the order in which they are added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def similar_command(self, word: str) -> str | None:
        """The command whose name is most similar to a word; None for a path, and where no name is similar."""
        return most_similar(word, list(self.commands)) if Path(word).name == word else None


class HeadedOption(click.Option):
    """An option that help lists under a heading.

    Args:
        is_basic: whether `--help` lists it for a command whose options do not fit on one screen.
        summary: its description there; None: the whole description.
    """

    def __init__(
        self, *args: Any, heading: str, is_basic: bool = True, summary: str | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.heading, self.is_basic, self.summary = heading, is_basic, summary or self.help or ""


class FieldsCommand(Command):
    """A command with options from fields, listed under headings. Its function receives only options that are passed.

    With more than `SCREEN` options, `--help` lists the basic options, and `--help-all` lists all.

    Attributes:
        is_short: whether all options fit on one screen, so that there is no `--help-all`.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.is_short = sum(isinstance(parameter, click.Option) for parameter in self.params) <= SCREEN

    def invoke(self, ctx: click.Context) -> Any:
        ctx.params = {name: value for name, value in ctx.params.items() if value not in (None, ())}
        return super().invoke(ctx)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        parameters = super().get_params(ctx)
        return parameters if self.is_short else [*parameters, _HELP_ALL_OPTION]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        lists_all = self.is_short or HELP_ALL in ctx.meta
        for option in options:
            names, text = option.get_help_record(ctx) or ("", "")
            heading, is_basic = _COMMON_HEADING, False
            if isinstance(option, HeadedOption):
                heading, is_basic = option.heading, option.is_basic
                names, text = (names, text) if lists_all else (names.partition(" / ")[0], option.summary)
            if lists_all or is_basic:
                rows.setdefault(heading, []).append((names, text))
        for heading in _in_order(rows):
            with formatter.section(heading):
                formatter.write_dl(rows[heading])
        if not lists_all:
            formatter.write_paragraph()
            formatter.write_text(f"{HELP_ALL} shows all {len(options)} options.")


def _in_order(headings: Iterable[str]) -> list[str]:
    """Headings in the order of a run; a heading of a command follows its predecessor, and common flags are last."""
    position, positions = -1, dict[str, int]()
    for heading in headings:
        position = HEADINGS.index(heading) if heading in HEADINGS else position
        positions[heading] = len(HEADINGS) if heading == _COMMON_HEADING else position
    return sorted(positions, key=positions.__getitem__)


def _show_all(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL_OPTION = click.Option(
    [HELP_ALL], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Show all options and exit."
)


def common(command: F) -> F:
    """Add `--quiet`, `--debug` and `--json`, which set the attributes of the command's `Console`."""
    for name, text in reversed(_COMMON.items()):
        settings = {"heading": _COMMON_HEADING, "help": text, "expose_value": False, "callback": _set_on_console}
        command = click.option(f"--{name}", cls=HeadedOption, is_flag=True, **settings)(command)
    return command


def _set_on_console(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        setattr(ctx.ensure_object(Console), str(option.name), True)


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
    """The option of a field; its value is None without the flag, or `()` if `multiple`.

    A description consists of clauses separated by semicolons; its summary is the first clause and that of the default.

    Args:
        help_text: description in place of that of the field; None: that of the field.
    """
    default = field.get_default(call_default_factory=True) if has_default(field) else None
    note = " [required]" if field.is_required() else "" if default is None else f" [{_as_text(default)}]"
    clauses = (help_text or field.description or "").split("; ")
    summary = "; ".join([clauses[0], *(clause for clause in clauses[1:] if clause.startswith("default"))])
    choices = tuple(map(str, choices_of(field)))
    metavar = "|".join(choices) or name.split("_")[-1].upper()
    if len(metavar) > _LONGEST_CHOICES:
        metavar = name.split("_")[-1].upper()
        clauses.append(f"one of {', '.join(choices)}")
    settings: dict[str, Any] = {"heading": extra_of(field, "heading"), "is_basic": bool(extra_of(field, "is_basic"))}
    settings |= {"help": f"{'; '.join(clauses)}{note}", "summary": f"{summary}{note}", "cls": HeadedOption}
    if field.annotation is bool:
        return click.option(f"{flag_of(name)}/{flag_of(f'no_{name}')}", name, default=None, **settings)
    metavar = "NAME=VALUE,..." if get_origin(field.annotation) is dict else metavar
    flags = (*_FURTHER_FLAGS.get(name, ()), flag_of(name))
    return click.option(*flags, name, metavar=metavar, multiple=multiple, **settings)


def recipe_option(command: F) -> F:
    """Add `--recipe`, whose value is the argument `file`."""
    return click.option(
        *("--recipe", "file"),
        cls=HeadedOption,
        heading=MODEL,
        metavar="FILE",
        help="TOML file of options; default: MODEL/compress.toml",
    )(command)


def _as_text(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def check_output_file(out: Path, *, force: bool, also: tuple[Path, ...] = ()) -> None:
    """Check that a file can be written.

    Raises:
        UsageError: the file is a folder, its folder does not exist, or a file exists and `force` is not set.
    """
    if out.is_dir():
        raise UsageError.of_file(out, "is a folder; name the file to write (-o)", ErrorCode.INVALID_VALUE)
    if not out.parent.is_dir():
        raise UsageError.of_file(
            out.parent, "no such folder; create it, or write to another file (-o)", ErrorCode.FILE_MISSING
        )
    for path in (out, *also):
        if path.exists() and not force:
            raise UsageError.of_file(
                path, "exists; add --force to replace it, or write to another file (-o)", ErrorCode.OUTPUT_EXISTS
            )
