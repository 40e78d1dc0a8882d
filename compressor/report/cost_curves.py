"""Cost tables as curves: the time of a group of units against the number that it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.measure.costs import CostTable, GroupCosts
from compressor.report import formatting
from compressor.report.unit_maps import common_pattern

_BAR, _EIGHTHS = 24, " ▏▎▍▌▋▊▉█"  # characters of the longest bar, and one that is filled to each eighth
_TYPES = {"heads": ("attention", "attentions"), "neurons": ("feed-forward", "feed-forwards")}


@dataclass(frozen=True)
class CostPoint:
    """One number of units that was timed.

    Attributes:
        units: number of units that the group keeps.
        ms: what the group adds to the time of a call, against none of its units.
        share: share of the time of the whole model that all groups of the curve take.
        faster: the next larger number of units, which takes less time, where this one is a cliff; else None.
    """

    units: int
    ms: float
    share: float
    faster: int | None = None


@dataclass(frozen=True)
class CostCurve:
    """Groups that cost the same.

    Attributes:
        title: their number and type: `5 attentions`.
        unit: the type of their units.
        pattern: their names, with `*` for the part that differs.
        points: numbers of units, ascending; the last one is all.
    """

    title: str
    unit: str
    pattern: str
    points: tuple[CostPoint, ...]


def curves_of(table: CostTable) -> list[CostCurve]:
    """One curve for each class of equal groups, as fitted to what was measured: cliffs and noise are not smoothed."""
    return [_curve(row, table.whole) for row in table.rows]


def _curve(row: GroupCosts, whole: float) -> CostCurve:
    most = row.savings[0]
    larger = dict(zip(row.counts, row.counts[1:], strict=False))
    points = tuple(
        CostPoint(
            units=count,
            ms=most - saving,
            share=len(row.groups) * (most - saving) / whole,
            faster=larger[count] if count in row.cliffs else None,
        )
        for count, saving in zip(row.counts, row.savings, strict=True)
    )
    singular, plural = _TYPES[row.type]
    number = len(row.groups)
    return CostCurve(f"{number} {singular if number == 1 else plural}", row.type, common_pattern(row.groups), points)


def curve_rows(curve: CostCurve) -> tuple[tuple[str, ...], ...]:
    """A row for each number of units: units kept, time of one group, share of the model, and cliff."""
    return tuple(
        (
            f"{point.units:,}",
            formatting.ms(point.ms),
            f"{point.share:.1%}".replace("-", "−"),
            "" if point.faster is None else f"cliff: slower than {point.faster:,}",
        )
        for point in curve.points
    )


def curve_bars(curve: CostCurve) -> tuple[str, ...]:
    """A bar for each number of units, as long as the time of one group, relative to the longest time of the curve."""
    most = max(point.ms for point in curve.points)
    eighths = [round(8 * _BAR * max(point.ms, 0.0) / most) if most > 0 else 0 for point in curve.points]
    return tuple(f"{_EIGHTHS[8] * (part // 8)}{_EIGHTHS[part % 8]}".rstrip() for part in eighths)


def headline(table: CostTable) -> str:
    """What a call takes, what of it can be removed, and the limit of a speed-up by removing units."""
    types = {row.type: _TYPES[row.type][0] for row in table.rows}
    parts = " and ".join(f"{name} {table.share_of(unit):.0%}" for unit, name in sorted(types.items()))
    whole, least, dense = map(formatting.ms, (table.whole, table.least, table.dense))
    text = f"{table.size_label}, {table.engine}: {whole}, of which {parts}"
    limit = table.dense / table.least
    return f"{text}; dense takes {dense}, and {least} remain without any unit: at most {limit:.3g}× as fast as dense"
