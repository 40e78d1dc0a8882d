"""Engines of other tools that the page of a ladder shows: their metrics and speeds, read from a JSON file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from compressor.config.fields import FieldConflictError, describe_fault
from compressor.errors import ErrorCode, InputError
from compressor.results import Speed

_Positive = Annotated[float, Field(gt=0)]
_Size = Annotated[int, Field(ge=1)]


def _ascending(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError("the first end is above the second")
    return ends


_Interval = Annotated[tuple[float, float], AfterValidator(_ascending)]
_Positives = Annotated[tuple[_Positive, _Positive], AfterValidator(_ascending)]


_REASONS = {
    "missing": "missing",
    "model_type": "not an object",
    "tuple_type": "not a list",
    "string_type": "not a text",
    "string_too_short": "empty",
    "too_long": "not two numbers",
}
"""Messages in place of pydantic's, by the type of the error."""

_FILE = "give a list of objects, each with name, metric, and speed or p50"


class ComparisonPoint(BaseModel):
    """An engine at one size, or at any; messages about a file quote the descriptions of the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, description="a text that says what the engine is")]
    metric: Annotated[float, Field(description="a number on test rows, not scaled: an accuracy of 0.91")]
    metric_interval: Annotated[_Interval | None, Field(description="the ends around the metric: [0.90, 0.92]")] = None
    speed: Annotated[_Positive | None, Field(description="how many times as fast as dense the engine is: 2.5")] = None
    speed_interval: Annotated[_Positives | None, Field(description="the ends around the speed: [2.4, 2.6]")] = None
    p50: Annotated[_Positive | None, Field(description="the median milliseconds of a call, in place of a speed")] = None
    p50_interval: Annotated[_Positives | None, Field(description="the ends around the milliseconds: [5.8, 6.1]")] = None
    batch: Annotated[_Size | None, Field(description="the batch size of the calls; without one, any")] = None
    seq: Annotated[_Size | None, Field(description="the length of the calls in tokens; without one, any")] = None

    @model_validator(mode="after")
    def _has_one_time(self) -> Self:
        if (self.speed is None) == (self.p50 is None):
            number = "neither is" if self.speed is None else "both are"
            text = f"{number} given; give one of speed and p50"
            raise FieldConflictError(ErrorCode.CONTRADICTION, text, "speed")
        for name in ("metric", "speed", "p50"):
            value, ends = getattr(self, name), getattr(self, f"{name}_interval")
            if ends is not None and (value is None or not ends[0] <= value <= ends[1]):
                text = f"{list(ends)} does not include {name}, {'which is missing' if value is None else value}"
                raise FieldConflictError(ErrorCode.CONTRADICTION, text, f"{name}_interval")
        return self

    def is_at(self, speed: Speed) -> bool:
        """Whether it was measured at the size of a speed, or without a size."""
        return self.batch in (None, speed.batch) and self.seq in (None, speed.seq)

    def speed_over(self, dense: float) -> tuple[float, float, float]:
        """How many times as fast as dense it is, with the ends of the interval, which equal it without an interval.

        Args:
            dense: the milliseconds of dense, for a point that has milliseconds.
        """
        if self.speed is not None:
            return (self.speed, *(self.speed_interval or (self.speed, self.speed)))
        assert self.p50 is not None
        low, high = self.p50_interval or (self.p50, self.p50)
        return dense / self.p50, dense / high, dense / low


def dense_p50(speeds: Sequence[Speed]) -> float:
    """The milliseconds of dense at one size: the median over the rungs of a ladder, which all timed it."""
    return statistics.median(speed.dense.p50 for speed in speeds)


def read_points(path: Path) -> tuple[ComparisonPoint, ...]:
    """Read a file of points: a JSON list of objects with the fields of `ComparisonPoint`.

    Raises:
        InputError: the file is missing, is not JSON, or has a bad field; the message names the first one.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        raise InputError(
            f"{path}: {'no such file' if is_missing else error.strerror}; name a file of points (--compare-points)",
            code=ErrorCode.FILE_MISSING if is_missing else ErrorCode.FILE_UNREADABLE,
            path=path,
        ) from error
    try:
        return TypeAdapter(tuple[ComparisonPoint, ...]).validate_json(content, strict=True)
    except pydantic.ValidationError as error:
        raise _input_error(path, error) from error


def _input_error(path: Path, error: pydantic.ValidationError) -> InputError:
    """The error of the first fault of a file, with the number of the point, counted from 1, and the field."""
    fault = error.errors(include_url=False)[0]
    number = next((part + 1 for part in fault["loc"] if isinstance(part, int)), None)
    field = next((part for part in fault["loc"] if isinstance(part, str)), None)
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, FieldConflictError):
        field, reason = cause.fields[0], cause.message
    elif fault["type"] == "json_invalid":
        reason = f"not JSON ({fault['ctx']['error']})"
    elif fault["type"] == "extra_forbidden":
        reason = f"unknown; choose one of {', '.join(ComparisonPoint.model_fields)}"
    else:
        reason = _REASONS.get(fault["type"]) or describe_fault(fault)[1]
    where = ": ".join(filter(None, ("" if number is None else f"point {number}", field)))
    known = ComparisonPoint.model_fields.get(field or "")
    expected = _FILE if known is None else f"give {known.description}"
    return InputError(
        f"{path}: {f'{where}: ' if where else ''}{reason}{'' if ';' in reason else f'; {expected}'}",
        code=ErrorCode.FILE_UNREADABLE,
        path=path,
        point=number,
        field=field,
    )
