"""The report as one self-contained HTML page, without scripts, fonts or external images."""

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
from compressor.report.budgets import budget_table, cost_tables
from compressor.report.templates import environment
from compressor.report.unit_maps import head_maps, neuron_map
from compressor.report.verdict import UnitCount, tone, unit_counts, unit_names, valid_rows
from compressor.results import Report, Speed, headline_scores


@dataclass(frozen=True)
class Figure:
    """A figure with its title and a description in words; `svg` is None where nothing can be drawn."""

    title: str
    description: str
    svg: Markup | None


def render(report: Report) -> str:
    """The HTML page. Every value of the report is escaped; only the figures, which contain only numbers, are not."""
    return (
        _templates()
        .get_template("page.html")
        .render(
            report=report,
            tone=tone(report),
            tiles=_tiles(report),
            counts=unit_counts(report.plan),
            unit_names=unit_names(report.plan),
            maps=head_maps(report.plan),
            neurons=neuron_map(report.plan),
            curves=_curves(report),
            ratios=figures.ratios(report.speeds) if report.speeds else None,
            latencies=[_latencies(speed) for speed in report.speeds],
            cases=list(dict.fromkeys(case for proof in report.proofs for case in proof.cases)),
            shares=_shares(report.seconds),
            budgets=budget_table(report.budget),
            costs=cost_tables(report.costs),
        )
    )


@functools.cache
def _templates() -> jinja2.Environment:
    templates = environment()
    templates.globals["formatting"] = formatting
    templates.globals["facts_of"] = _facts_of
    templates.filters["data"] = _data
    return templates


def _facts_of(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values for a list of facts: texts as they are, anything else as JSON."""
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
    longest = max((duration for duration in seconds.values() if math.isfinite(duration)), default=0.0)
    return {
        stage: 100 * duration / longest if longest > 0 and 0 <= duration <= longest else 0.0
        for stage, duration in seconds.items()
    }


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """The main numbers of the report: name, number, and what it is based on."""
    plan, dense, compressed = report.plan, report.dense, report.compressed
    layers = {"heads": ("attention layer", len(plan.sites)), "neurons": ("feed-forward", len(plan.feed_forwards))}
    tiles = [
        *(_unit_tile(count, _plural(*layers[count.type])) for count in unit_counts(plan)),
        (
            "parameters",
            formatting.change(dense.parameters, compressed.parameters),
            f"{formatting.count(dense.parameters)} → {formatting.count(compressed.parameters)}",
        ),
    ]
    if compressed.reduced_products:
        sizes = f"{formatting.size(dense.file_bytes)} → {formatting.size(compressed.file_bytes)}"
        tiles = [
            *(
                (f"products in {name}", count, "of the matrix products with weights")
                for name, count in compressed.reduced_products.items()
                if name != "fp32"
            ),
            ("file", formatting.change(dense.file_bytes, compressed.file_bytes), sizes),
        ]
    rows = sorted(valid_rows(report.speeds), key=lambda row: row.ratio)
    for row in (rows[:1] + rows[-1:])[: len(rows)]:
        basis = f"{formatting.range_text(row.low, row.high)} ({100 * row.confidence:g}%)"
        tiles.append((f"speed, {row.size_label}", f"{row.ratio:.2f}×", basis))
    for score in headline_scores(report.scores)[:2]:
        difference, ends = formatting.difference_and_range(score)
        tiles.append(
            (
                f"{formatting.metric_name(score)}, {score.split_name} rows",
                difference,
                f"{ends} ({100 * score.confidence:g}%)",
            )
        )
    return tiles


def _unit_tile(count: UnitCount, layers: str) -> tuple[str, str, str]:
    kept = f"{count.kept:,} of {count.units:,}"
    if count.type == "heads":
        return "heads kept", kept, f"in {layers}"
    return "neurons kept", f"{count.kept / count.units:.1%}", f"{kept}, in {layers}"


def _plural(name: str, count: int) -> str:
    return f"{count} {name}{'s' if count != 1 else ''}"


def _curves(report: Report) -> list[Figure]:
    """One figure per logged quantity: loss first, then temperature, evaluations, and the others by name."""
    names = {name for point in report.curves for name in point.values}

    def rank(name: str) -> tuple[int, str]:
        order = (name == "loss", name == "temperature", name.startswith("eval_"))
        return (order.index(True) if any(order) else len(order), name)

    return [_curve(report, name) for name in sorted(names, key=rank)]


def _curve(report: Report, name: str) -> Figure:
    logged = [(point.step, point.values[name]) for point in report.curves if name in point.values]
    points = [(step, value) for step, value in logged if math.isfinite(value)]
    description = f"not drawn: none of its {len(logged)} points is a finite number"
    if points:
        (first, start), (last, end) = points[0], points[-1]
        description = f"{start:.3g} at step {first}"
        description += f", {end:.3g} at step {last}" if len(points) > 1 else ""
    if 0 < len(points) < len(logged):
        description += f"; {len(logged) - len(points)} of {len(logged)} points are not finite numbers and are not drawn"
    svg = figures.curve(*zip(*points, strict=True)) if points else None
    return Figure(name.replace("_", " "), description, svg)


def _latencies(speed: Speed) -> Figure:
    end = figures.axis_end(speed)
    counts = {variant: len(engine.samples) for variant, engine in _engines(speed).items()}
    description = f"{counts['dense']} dense and {counts['compressed']} compressed calls, in turn"
    beyond = [sample for engine in _engines(speed).values() for sample in engine.samples if sample > end]
    if beyond:
        description += f"; {len(beyond)} beyond the axis, the slowest {formatting.ms(max(beyond))}"
    return Figure(speed.size_label, description, figures.latencies(speed))


def _engines(speed: Speed) -> dict[str, Any]:
    return {"dense": speed.dense, "compressed": speed.compressed}
