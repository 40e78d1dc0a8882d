"""Configurations that commands construct from their flags alone: their base class, and those of short commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from compressor.config.fields import Config, InvalidValueError, config_field, flag_of, one_of, usage_error
from compressor.config.sections import ENGINE, MEASURING, OUTPUT
from compressor.config.values import Count, as_list
from compressor.errors import ErrorCode, UsageError
from compressor.targets import DEFAULT_TARGET, TARGETS


class Request(Config):
    """A configuration that raises usage errors, which name the flag and hold a code, the field and the value.

    Raises:
        UsageError: a field is missing, unknown or invalid, or two fields contradict each other.
    """

    def __init__(self, **values: Any) -> None:
        for name, field in type(self).model_fields.items():
            if field.is_required() and values.get(name) is None:
                raise UsageError(
                    f"{flag_of(name)} is missing: {field.description}", code=ErrorCode.MISSING_VALUE, field=name
                )
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise usage_error(error, type(self).model_fields, flag_of) from error


def _check_writable(path: Path) -> Path:
    # Checked before the work whose result is written there.
    if not path.absolute().parent.is_dir():
        raise InvalidValueError(f"the folder {path.parent} does not exist; create it first", ErrorCode.FILE_MISSING)
    if not os.access(path.absolute().parent, os.W_OK):
        raise InvalidValueError(f"the folder {path.parent} cannot be written", ErrorCode.FILE_UNWRITABLE)
    if path.is_dir():
        raise InvalidValueError("this is a folder; give the name of a file", ErrorCode.FILE_UNWRITABLE)
    return path


OutputFile = Annotated[Path, AfterValidator(_check_writable)]
"""A file to write, in a folder that exists."""


class CostsOutput(Config):
    """The page or picture that `compress costs` writes."""

    out: Path | None = config_field(OUTPUT, "page (.html) or picture (.png) to write", is_path=True)
    force: bool = config_field(OUTPUT, "replace the file if it exists", False)


class SitesOptions(Request):
    """What `compress sites` counts of each group.

    Raises:
        UsageError: the length is no positive number.
    """

    count: bool = config_field(
        MEASURING, "count parameters and multiply-accumulates, for which the model is exported", True
    )
    seq: Count | None = config_field(
        MEASURING,
        "length in tokens at which multiply-accumulates are counted; default: 128, at most the model's maximum",
    )


_Target = Annotated[str, AfterValidator(one_of(tuple(TARGETS)))]


class BenchConfig(Config):
    """Which runtimes `compress bench` compares, and by how many callers."""

    target: Annotated[tuple[_Target, ...], Field(min_length=1), BeforeValidator(as_list)] = config_field(
        ENGINE,
        "runtime of the engines; for the folder of a run several, separated by commas, by default its own",
        (DEFAULT_TARGET,),
    )
    callers: Count = config_field(
        MEASURING, "callers at once, with one thread each, whose throughput is measured too (folder of a run)", 1
    )
