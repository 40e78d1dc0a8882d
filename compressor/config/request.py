"""Base of the configurations that a command constructs from its flags alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator

from compressor.config.fields import Config, InvalidValueError, flag_of, usage_error
from compressor.errors import ErrorCode, UsageError


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
