"""The frontier of a ladder of budgets: the loss and the speed of each rung, and engines of other tools beside them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, computed_field, model_validator

from compressor.config.fields import FieldConflictError, usage_error
from compressor.errors import ErrorCode, InputError
from compressor.report import formatting
from compressor.results import (
    MissingTarget,
    Report,
    Score,
    Speed,
    deciding_scores,
    headline_scores,
    is_within,
    keeps_metric,
)

FRONTIER_JSON, FRONTIER_HTML = "frontier.json", "frontier.html"
_UNKNOWN_SPEED = "at an unknown speed"
_Positive = Annotated[float, Field(gt=0)]
_Size = Annotated[int, Field(ge=1)]


def _ascending(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError("the first end is above the second")
    return ends


_Interval = Annotated[tuple[float, float], AfterValidator(_ascending)]
_Positives = Annotated[tuple[_Positive, _Positive], AfterValidator(_ascending)]
_FILE = "give a list of objects, each with name, metric, and speed or p50"


class ComparisonPoint(BaseModel):
    """An engine at one size, or at any size; messages about a file quote the descriptions of the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, description="a text that says what the engine is")]
    metric: Annotated[float, Field(description="a number on test rows, not scaled: an accuracy of 0.91")]
    metric_interval: Annotated[_Interval | None, Field(description="the ends around the metric: [0.90, 0.92]")] = None
    speed: Annotated[_Positive | None, Field(description="how many times as fast as dense the engine is: 2.5")] = None
    speed_interval: Annotated[_Positives | None, Field(description="the ends around the speed: [2.4, 2.6]")] = None
    p50: Annotated[_Positive | None, Field(description="the median milliseconds of a call, in place of a speed")] = None
    p50_interval: Annotated[_Positives | None, Field(description="the ends around the milliseconds: [5.8, 6.1]")] = None
    batch: Annotated[_Size | None, Field(description="the batch size of the calls; by default any")] = None
    seq: Annotated[_Size | None, Field(description="the length of the calls in tokens; by default any")] = None

    @model_validator(mode="after")
    def _has_one_time(self) -> Self:
        if (self.speed is None) == (self.p50 is None):
            number = "neither" if self.speed is None else "both"
            text = f"{number} of <speed> and <p50> given; give one of them"
            raise FieldConflictError(ErrorCode.CONTRADICTION, text, "speed")
        for name in ("metric", "speed", "p50"):
            value, ends = getattr(self, name), getattr(self, f"{name}_interval")
            if ends is not None and (value is None or not ends[0] <= value <= ends[1]):
                text = f"<{name}_interval> {list(ends)}: does not include <{name}> {value}; correct one of them"
                raise FieldConflictError(ErrorCode.CONTRADICTION, text, f"{name}_interval")
        return self

    def is_at(self, speed: Speed) -> bool:
        """Whether the engine was measured at the size of a speed, or has no size, which stands for any."""
        return self.batch in (None, speed.batch) and self.seq in (None, speed.seq)

    def speed_over(self, dense: float) -> tuple[float, float, float]:
        """The speed over dense, with the ends of its interval; without an interval the ends equal the speed.

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
        text = f"{'no such file' if is_missing else error.strerror}; name a file of points (--compare-points)"
        code = ErrorCode.FILE_MISSING if is_missing else ErrorCode.FILE_UNREADABLE
        raise InputError.of_file(path, text, code) from error
    try:
        return TypeAdapter(tuple[ComparisonPoint, ...]).validate_json(content, strict=True)
    except pydantic.ValidationError as error:
        raise _input_error(path, error) from error


def _input_error(path: Path, error: pydantic.ValidationError) -> InputError:
    """The error of the first fault of a file, with the number of the point, counted from 1, and the field."""
    number = next((part + 1 for part in error.errors()[0]["loc"] if isinstance(part, int)), None)
    fault = usage_error(error, ComparisonPoint.model_fields, str)
    field = fault.details["field"] or None
    where, remedy = "" if number is None else f"point {number}: ", "" if field else f"; {_FILE}"
    text = f"{path}: {where}{fault}{remedy}"
    return InputError(text, code=ErrorCode.FILE_UNREADABLE, path=path, point=number, field=field)


class Rung(BaseModel):
    """A rung of a ladder.

    Attributes:
        name: name of the rung.
        folder: its folder, beside the page.
        heads: number of heads that are kept.
        neurons: number of neurons that are kept.
        macs: kept share of the multiply-accumulates of the whole model, the largest of all sizes; None: the report does
            not count them.
        scores: metrics of both engines, those on test rows first.
        speeds: ratios of both engines' times, per size, without the samples.
        seconds: duration of the run.
        holds: whether the metric holds: by the judgement of the run (`Frontier.is_judged`), or if the whole interval of
            its loss, on evaluation rows or, without their labels, on test rows, is within the loss that is allowed;
            None: no loss was set.
        missing: the requested target, if the machine lacks it.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    folder: str = ""
    heads: int
    neurons: int
    macs: float | None = None
    scores: tuple[Score, ...]
    speeds: tuple[Speed, ...]
    seconds: float
    holds: bool | None
    missing: MissingTarget | None = None

    @property
    def headline(self) -> list[Score]:
        """The scores to quote: those on test rows, if they have labels."""
        return headline_scores(self.scores)

    @property
    def ratio(self) -> float:
        """The geometric mean of its speeds over sizes; zero where none was measured."""
        ratios = [speed.ratio for speed in self.speeds if speed.void is None]
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0


class Frontier(BaseModel):
    """The finished rungs of a ladder, from the mildest budget to the strictest.

    Attributes:
        model: name of the model folder.
        max_drop: the loss of the metric that is allowed; None: no bound.
        rungs: the rungs.
        is_judged: whether the run judged its rungs, all of which hold, by their largest likely loss.
        ended: the rung before which the ladder ends, and why it is missing; None: all rungs are finished.
        points: engines of other tools that the page shows.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    max_drop: float | None
    rungs: tuple[Rung, ...]
    is_judged: bool = False
    ended: str | None = None
    points: tuple[ComparisonPoint, ...] = ()

    @property
    def missing(self) -> MissingTarget | None:
        """The requested target, if this machine lacks it, so that speeds are those of ONNX Runtime."""
        return next((rung.missing for rung in self.rungs if rung.missing is not None), None)

    @property
    def fastest(self) -> Rung | None:
        """The fastest rung that holds; None if none does, or no loss is allowed."""
        return max((rung for rung in self.rungs if rung.holds), key=lambda rung: rung.ratio, default=None)

    @property
    def is_missed(self) -> bool:
        """Whether no rung keeps the metric: none holds, or the fastest that holds loses too much on test rows."""
        if self.max_drop is None:
            return False
        return self.fastest is None or not keeps_metric(self.fastest.scores, self.max_drop)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def sentence(self) -> str:
        """The result of the ladder in one sentence."""
        if self.missing is None:
            return self._reached
        text = f"without {self.missing.target} ({self.missing.reason}), measured with ONNX Runtime on the CPU"
        return f"{self._reached}; {text}"

    @property
    def _reached(self) -> str:
        if not self.rungs:
            return "no rung was reached"
        first, last = self.rungs[0], self.rungs[-1]
        if self.max_drop is None:
            if len(self.rungs) == 1:
                return f"1 rung, {_times_as_fast(first)}, at {_loss(first)}"
            is_known = first.ratio and last.ratio
            speeds = f"from {first.ratio:.3g} to {_times_as_fast(last)}" if is_known else _UNKNOWN_SPEED
            return f"{len(self.rungs)} rungs, {speeds}, at {_loss(first)} to {_loss(last)}"
        what = "its largest likely loss" if self.is_judged else "the whole interval of its loss"
        bound = f"keeps {what} on the {self.deciding_split} rows within --max-drop {self.max_drop:g}"
        if self.fastest is None:
            return f"no rung {bound}"
        text = f"{self.fastest.name} is the fastest rung that {bound}"
        reached = f"{_times_as_fast(self.fastest)}, {_loss(self.fastest, names_rows=True)}"
        return f"{text}, but loses more than that: {reached}" if self.is_missed else f"{text}: {reached}"

    @property
    def deciding_split(self) -> str:
        """The split whose rows decide which rungs hold, for readers."""
        rung = self.fastest or self.rungs[-1]
        return next((score.split_name for score in deciding_scores(rung.scores)), "evaluation")

    @property
    def quoted_split(self) -> str:
        """The split whose metric is shown, for readers."""
        return next((score.split_name for rung in self.rungs for score in rung.headline), "test")

    @property
    def ending(self) -> str:
        """Why the ladder ends early; empty if all rungs are finished."""
        return "" if self.ended is None else f"the ladder ends before {self.ended}"


def rung_of(name: str, report: Report, max_drop: float | None, folder: str = "", *, is_judged: bool = False) -> Rung:
    """The rung of a finished run; `is_judged`: the run has judged that it holds."""
    deciding, counts = deciding_scores(report.scores), dict[str, tuple[float, float]]()
    holds = None
    if deciding and max_drop is not None:
        holds = is_judged or all(is_within(score.worst_loss, max_drop) for score in deciding)
    for row in report.costs:
        if row.unit == "macs":
            before, after = counts.get(row.label, (0.0, 0.0))
            counts[row.label] = before + row.before, after + row.after
    speeds = []
    for speed in report.speeds:
        sides = {name: getattr(speed, name).model_copy(update={"samples": ()}) for name in ("dense", "compressed")}
        speeds.append(speed.model_copy(update=sides))
    return Rung(
        name=name,
        folder=folder or name,
        heads=report.plan.heads_kept,
        neurons=report.plan.neurons_kept,
        macs=max((after / before for before, after in counts.values() if before), default=None),
        scores=report.scores,
        speeds=tuple(speeds),
        seconds=sum(report.seconds.values()),
        missing=report.missing,
        holds=holds,
    )


def frontier_rows(frontier: Frontier) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings and rows of the table of rungs, a row each; the first cell is its name."""
    # A rung whose engine was built again may have been measured at other sizes, or not at all.
    sizes = list(dict.fromkeys(speed.size_label for rung in frontier.rungs for speed in rung.speeds))
    scores = {_metric_heading(score): score for rung in frontier.rungs for score in rung.scores}
    has_heads = any(rung.heads for rung in frontier.rungs)
    has_macs = any(rung.macs is not None for rung in frontier.rungs)
    headings = (
        "rung",
        "heads, neurons" if has_heads else "neurons",
        *(["multiply-accumulates"] if has_macs else []),
        *scores,
        *(f"{size} (95% interval)" for size in sizes),
        "minutes",
    )
    rows = []
    for rung in frontier.rungs:
        kept = [f"{rung.heads:,}, {rung.neurons:,}" if has_heads else f"{rung.neurons:,}"]
        if has_macs:
            kept.append("" if rung.macs is None else f"{rung.macs:.1%}")
        cells = {_metric_heading(score): _metric_cell(score) for score in rung.scores}
        cells |= {speed.size_label: _speed_cell(speed) for speed in rung.speeds}
        measured = (cells.get(name, "") for name in (*scores, *sizes))
        rows.append((rung.name, *kept, *measured, f"{rung.seconds / 60:.1f}"))
    return headings, rows


def point_rows(frontier: Frontier) -> list[tuple[str, ...]]:
    """A row for each engine of another tool: number, name, metric, and its speed at each size of the rungs.

    Cells of sizes at which the engine was not measured are empty.
    """
    if not frontier.rungs or not frontier.rungs[0].scores:
        return []
    score, timed = frontier.rungs[0].headline[0], frontier.rungs[0].speeds
    speeds = [speed for rung in frontier.rungs for speed in rung.speeds]
    dense = [dense_p50([speed for speed in speeds if speed.size_label == size.size_label]) for size in timed]
    rows = []
    for number, point in enumerate(frontier.points, 1):
        numbers = (point.metric, *(point.metric_interval or ()))
        metric, *ends = (formatting.in_unit(value, score.unit) for value in numbers)
        cells = [f"{metric} ({' to '.join(ends)})" if ends else metric]
        for speed, milliseconds in zip(timed, dense, strict=True):
            ratio, low, high = point.speed_over(milliseconds)
            text = f"{ratio:.2f}×" + (f" ({formatting.range_text(low, high)})" if low < high else "")
            cells.append(text if point.is_at(speed) else "")
        rows.append((f"{number}", point.name, *cells))
    return rows


def _metric_heading(score: Score) -> str:
    return f"{score.metric}, {score.split_name} rows (95% interval)"


def _metric_cell(score: Score) -> str:
    """The metric, and its difference from dense with the interval: `89.6, −0.8 points (−2.1 to +0.3)`."""
    difference, ends = formatting.difference_and_range(score)
    return f"{formatting.in_unit(score.compressed, score.unit)}, {difference} ({ends})"


def _speed_cell(speed: Speed) -> str:
    """The speed over dense with its interval: `2.10× (2.05 to 2.16)`; `void` where both were not comparable."""
    return "void" if speed.void else f"{speed.ratio:.2f}× ({formatting.range_text(speed.low, speed.high)})"


def _times_as_fast(rung: Rung) -> str:
    return f"{rung.ratio:.3g} times as fast as dense" if rung.ratio else _UNKNOWN_SPEED


def _loss(rung: Rung, *, names_rows: bool = False) -> str:
    """The loss of the quoted metric with its interval, and with the split on request."""
    losses = [
        f"{score.metric}{f' on the {score.split_name} rows' if names_rows else ''} {formatting.difference(score)}"
        for score in rung.headline
    ]
    return "; ".join(losses) or "an unknown loss"
