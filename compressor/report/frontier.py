"""The frontier of a ladder of budgets: the loss and the speed of each rung."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, computed_field

from compressor.report import formatting
from compressor.report.comparison_points import ComparisonPoint, dense_p50
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


class Rung(BaseModel):
    """A rung of a ladder.

    Attributes:
        name: what it is called.
        folder: its folder, beside the page.
        heads: number of heads that are kept.
        neurons: number of neurons that are kept.
        macs: kept share of the multiply-accumulates of the whole model, the largest of all sizes; None: the report does
            not count them.
        scores: metrics of both engines, those on test rows first.
        speeds: ratios of both engines' times, per size, without the samples.
        seconds: duration of the run.
        holds: whether the whole interval of the metric's loss, on evaluation rows or, without their labels, on test
            rows, is within the loss that is allowed; None: no loss was set.
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
        ended: the rung before which the ladder ends, and why it is missing; None: all rungs are finished.
        points: engines of other tools that the page shows.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    max_drop: float | None
    rungs: tuple[Rung, ...]
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
            speeds = (
                f"from {first.ratio:.3g} to {_times_as_fast(last)}" if first.ratio and last.ratio else _UNKNOWN_SPEED
            )
            return f"{len(self.rungs)} rungs, {speeds}, at {_loss(first)} to {_loss(last)}"
        interval = f"the whole interval of its loss on the {self.deciding_split} rows"
        bound = f"stays within --max-drop {self.max_drop:g} with {interval}"
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


def rung_of(name: str, report: Report, max_drop: float | None, folder: str = "") -> Rung:
    """The rung of a finished run.

    Args:
        name: what it is called.
        report: its report.
        max_drop: the loss of the metric that is allowed; None: no bound.
        folder: its folder, beside the page; empty: that of its name.
    """
    deciding = deciding_scores(report.scores)
    return Rung(
        name=name,
        folder=folder or name,
        heads=report.plan.heads_kept,
        neurons=report.plan.neurons_kept,
        macs=_kept_macs(report),
        scores=report.scores,
        speeds=tuple(_without_samples(speed) for speed in report.speeds),
        seconds=sum(report.seconds.values()),
        missing=report.missing,
        holds=None
        if max_drop is None or not deciding
        else all(is_within(score.worst_loss, max_drop) for score in deciding),
    )


def _kept_macs(report: Report) -> float | None:
    """The kept share of multiply-accumulates; see `Rung`."""
    counts: dict[str, tuple[float, float]] = {}
    for row in report.costs:
        if row.unit == "macs":
            before, after = counts.get(row.label, (0.0, 0.0))
            counts[row.label] = before + row.before, after + row.after
    return max((after / before for before, after in counts.values() if before), default=None)


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
    rows = [
        (
            rung.name,
            f"{rung.heads:,}, {rung.neurons:,}" if has_heads else f"{rung.neurons:,}",
            *(["" if rung.macs is None else f"{rung.macs:.1%}"] if has_macs else []),
            *_cells(scores, {_metric_heading(score): _metric_cell(score) for score in rung.scores}),
            *_cells(sizes, {speed.size_label: _speed_cell(speed) for speed in rung.speeds}),
            f"{rung.seconds / 60:.1f}",
        )
        for rung in frontier.rungs
    ]
    return headings, rows


def point_rows(frontier: Frontier) -> list[tuple[str, ...]]:
    """A row for each engine of another tool: number, name, metric, and its speed at each size of the rungs.

    Cells of sizes at which the engine was not measured are empty.
    """
    if not frontier.rungs or not frontier.rungs[0].scores:
        return []
    score = frontier.rungs[0].headline[0]
    speeds = [speed for rung in frontier.rungs for speed in rung.speeds]
    sizes = {
        size.size_label: dense_p50([speed for speed in speeds if speed.size_label == size.size_label])
        for size in frontier.rungs[0].speeds
    }
    return [
        (
            f"{number}",
            point.name,
            _point_metric(point, score),
            *(
                _point_speed(point, sizes[speed.size_label]) if point.is_at(speed) else ""
                for speed in frontier.rungs[0].speeds
            ),
        )
        for number, point in enumerate(frontier.points, 1)
    ]


def _point_metric(point: ComparisonPoint, score: Score) -> str:
    """The metric with its interval, if it has one, in the unit of a score: `89.6 (88.1 to 90.7)`."""
    value, *ends = (formatting.metric_value(score, number) for number in (point.metric, *(point.metric_interval or ())))
    return f"{value} ({' to '.join(ends)})" if ends else value


def _point_speed(point: ComparisonPoint, dense: float) -> str:
    """The speed over dense with its interval, if it has one: `2.10× (2.05 to 2.16)`."""
    ratio, low, high = point.speed_over(dense)
    return f"{ratio:.2f}×" + (f" ({formatting.range_text(low, high)})" if low < high else "")


def _metric_heading(score: Score) -> str:
    return f"{score.metric}, {score.split_name} rows (95% interval)"


def _cells(headings: Iterable[str], cells: Mapping[str, str]) -> list[str]:
    """A cell under each heading; empty where a rung has none."""
    return [cells.get(heading, "") for heading in headings]


def _metric_cell(score: Score) -> str:
    """The metric, and its difference from dense with the interval: `89.6, −0.8 points (−2.1 to +0.3)`."""
    difference, ends = formatting.difference_and_range(score)
    return f"{formatting.metric_value(score, score.compressed)}, {difference} ({ends})"


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


def _without_samples(speed: Speed) -> Speed:
    sides = {name: getattr(speed, name).model_copy(update={"samples": ()}) for name in ("dense", "compressed")}
    return speed.model_copy(update=sides)
