"""The report as one page that needs nothing but itself: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
from markupsafe import Markup

from compressor.report import figures, formatting
from compressor.report.headmap import head_maps
from compressor.report.templates import environment
from compressor.report.verdict import headline_scores, readable, tone
from compressor.results import Report, Speed


@dataclass(frozen=True)
class Figure:
    """A picture and the words that stand for it."""

    title: str
    told: str
    svg: Markup | None


def render(report: Report) -> str:
    """The page. Everything that comes out of the report is escaped; only the pictures, made of numbers, are not."""
    return (
        _templates()
        .get_template("page.html")
        .render(
            report=report,
            tone=tone(report.plan, report.speeds, report.proofs, report.drop_status, report.refused, report.missing),
            tiles=_tiles(report),
            maps=head_maps(report.plan),
            curves=_curves(report),
            ratios=figures.ratios(report.speeds) if report.speeds else None,
            latencies=[_latencies(speed) for speed in report.speeds],
            cases=list(dict.fromkeys(case for proof in report.proofs for case in proof.cases)),
            shares=_shares(report.seconds),
        )
    )


@functools.cache
def _templates() -> jinja2.Environment:
    templates = environment("report")
    templates.globals["words"] = formatting
    templates.globals["named"] = _named
    templates.filters["data"] = _data
    return templates


def _named(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values for a list of facts: text bare, anything else as JSON."""
    return [
        (
            name.replace("_", " "),
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str),
        )
        for name, value in values.items()
    ]


def _data(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str, indent=1)


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each stage's time as a percentage of the longest."""
    longest = max((taken for taken in seconds.values() if math.isfinite(taken)), default=0.0)
    return {
        stage: 100 * taken / longest if longest > 0 and 0 <= taken <= longest else 0.0
        for stage, taken in seconds.items()
    }


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """The few numbers that everyone looks for: name, number, what it stands on."""
    plan, dense, compressed = report.plan, report.dense, report.compressed
    layers = f"{len(plan.sites)} attention layer{'s' if len(plan.sites) != 1 else ''}"
    tiles = [
        ("heads kept", f"{plan.heads_kept} of {plan.heads}", f"in {layers}"),
        (
            "parameters",
            formatting.change(dense.parameters, compressed.parameters),
            f"{formatting.count(dense.parameters)} → {formatting.count(compressed.parameters)}",
        ),
    ]
    rows = sorted(readable(report.speeds), key=lambda row: row.ratio)
    for row in (rows[:1] + rows[-1:])[: len(rows)]:
        ground = f"{formatting.ends(row.low, row.high)} ({100 * row.confidence:g}%)"
        tiles.append((f"speed, batch {row.batch}" + (f" × {row.seq}" if row.seq else ""), f"{row.ratio:.2f}×", ground))
    for score in headline_scores(report.scores)[:2]:
        moved, ends = formatting.moved(score)
        tiles.append(
            (f"{formatting.metric(score)}, {score.split} rows", moved, f"{ends} ({100 * score.confidence:g}%)")
        )
    return tiles


def _curves(report: Report) -> list[Figure]:
    """One picture a logged quantity: loss first, then temperature, evaluations, the rest by name."""
    names = {name for point in report.curves for name in point.values}

    def rank(name: str) -> tuple[int, str]:
        order = (name == "loss", name == "temperature", name.startswith("eval_"))
        return (order.index(True) if any(order) else len(order), name)

    return [_curve(report, name) for name in sorted(names, key=rank)]


def _curve(report: Report, name: str) -> Figure:
    logged = [(point.step, point.values[name]) for point in report.curves if name in point.values]
    points = [(step, value) for step, value in logged if math.isfinite(value)]
    told = f"not drawn: none of its {len(logged)} points is a finite number"
    if points:
        (first, start), (last, end) = points[0], points[-1]
        told = f"{start:.3g} at step {first}"
        told += f", {end:.3g} at step {last}" if len(points) > 1 else ""
    if 0 < len(points) < len(logged):
        told += f"; {len(logged) - len(points)} of {len(logged)} points are no finite number and are not drawn"
    svg = figures.curve(*zip(*points, strict=True)) if points else None
    return Figure(name.replace("_", " "), told, svg)


def _latencies(speed: Speed) -> Figure:
    end = figures.axis_end(speed)
    counts = {side: len(engine.samples) for side, engine in _engines(speed).items()}
    told = f"{counts['dense']} dense and {counts['compressed']} compressed calls, in turn"
    beyond = [sample for engine in _engines(speed).values() for sample in engine.samples if sample > end]
    if beyond:
        told += f"; {len(beyond)} beyond the axis, the slowest {formatting.ms(max(beyond))}"
    return Figure(formatting.where(speed), told, figures.latencies(speed))


def _engines(speed: Speed) -> dict[str, Any]:
    return {"dense": speed.dense, "compressed": speed.compressed}
