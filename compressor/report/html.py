"""The report as one self-contained HTML page, without scripts, fonts or external images."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import jinja2
from markupsafe import Markup

from compressor.report import figures, formatting
from compressor.report.budgets import budget_table, cost_tables
from compressor.report.verdict import tone, unit_counts, unit_names, valid_rows
from compressor.results import Report, Speed, headline_scores
from graph_passes import Kind, Plan, SitePlan

_KINDS: dict[Kind, str] = {
    "bidirectional": "Bidirectional self-attention",
    "causal": "Causal self-attention",
    "cross": "Cross-attention",
}
Figure = tuple[str, str, Markup | None]
"""A figure: its title, a description in words, and the picture; None where nothing can be drawn."""


def render(report: Report) -> str:
    """The HTML page. All values of the report are escaped, except the figures, which contain only numbers."""
    page = environment().get_template("page.html")
    return page.render(
        report=report,
        tone=tone(report),
        tiles=_tiles(report),
        counts=unit_counts(report.plan),
        unit_names=unit_names(report.plan),
        maps=head_maps(report.plan),
        neurons=neuron_map(report.plan),
        curves=_curves(report),
        ratios=figures.ratios(report.speeds) if report.speeds else None,
        labelled_speeds=[(speed.size_label, speed) for speed in report.speeds],
        latencies=[_latencies(speed) for speed in report.speeds],
        cases=list(dict.fromkeys(case for proof in report.proofs for case in proof.cases)),
        shares=_shares(report.seconds),
        budgets=budget_table(report.budget),
        costs=cost_tables(report.costs),
    )


@functools.cache
def environment() -> jinja2.Environment:
    """The templates of the pages, which extend `frame.html`; every value is escaped."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("compressor", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals["formatting"] = formatting
    templates.globals["facts_of"] = _facts_of
    templates.filters["data"] = functools.partial(json.dumps, ensure_ascii=False, default=str, indent=1)
    return templates


def head_maps(plan: Plan) -> list[dict[str, Any]]:
    """A map of heads for each kind of attention, in the order of the first call.

    A map has a row for each site: its label, the site, and a cell for each column. A cell has the state of the head
    (`kept`, `dropped`, or `absent` where the site has no head of this number), its tooltip, and whether a gap is drawn
    before it, because it is the first query head of a shared key/value head.
    """
    maps = []
    for kind in dict.fromkeys(site.kind for site in plan.sites):
        sites = [site for site in plan.sites if site.kind == kind]
        labels, pattern = formatting.common_labels([site.name for site in sites])
        columns = range(max(site.heads for site in sites))
        rows = [
            (label, site, [_cell(site, head) for head in columns]) for label, site in zip(labels, sites, strict=True)
        ]
        numbers = {"kept": sum(len(site.kept) for site in sites), "heads": sum(site.heads for site in sites)}
        maps.append({"title": _KINDS[kind], "pattern": pattern, **numbers, "columns": columns, "rows": rows})
    return maps


def _cell(site: SitePlan, head: int) -> tuple[str, str, bool]:
    if head >= site.heads:
        return "absent", "", False
    served, is_kept = site.heads // site.kv_heads, head in site.kept
    tooltip = f"{site.name}, head {head}: " + (f"kept, scale {site.gate[head]:.4g}" if is_kept else "dropped")
    tooltip += f"; key/value head {head // served}" if served > 1 else ""
    return "kept" if is_kept else "dropped", tooltip, served > 1 and head > 0 and head % served == 0


def neuron_map(plan: Plan) -> dict[str, Any] | None:
    """The feed-forwards of a plan with their labels, and the common part of their names; None where it lists none."""
    if not plan.feed_forwards:
        return None
    labels, pattern = formatting.common_labels([group.name for group in plan.feed_forwards])
    rows = list(zip(labels, plan.feed_forwards, strict=True))
    return {"pattern": pattern, "kept": plan.neurons_kept, "neurons": plan.neurons, "rows": rows}


def _facts_of(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values for a list of facts: texts unchanged, anything else as JSON."""
    as_json = functools.partial(json.dumps, ensure_ascii=False, default=str)
    pairs = ((name.replace("_", " "), value) for name, value in values.items())
    return [(name, value if isinstance(value, str) else as_json(value)) for name, value in pairs]


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each stage's time as a percentage of the longest."""
    longest = max((duration for duration in seconds.values() if math.isfinite(duration)), default=0.0)
    return {
        stage: 100 * duration / longest if longest > 0 and 0 <= duration <= longest else 0.0
        for stage, duration in seconds.items()
    }


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """The main numbers of the report: name, number, and the numbers behind it."""
    plan, dense, compressed = report.plan, report.dense, report.compressed
    layers = {"heads": ("attention layer", len(plan.sites)), "neurons": ("feed-forward", len(plan.feed_forwards))}
    tiles = []
    for count in unit_counts(plan):
        name, number = layers[count.type]
        kept, where = f"{count.kept:,} of {count.units:,}", f"in {number} {name}{'s' if number != 1 else ''}"
        if count.type == "heads":
            tiles.append(("heads kept", kept, where))
        else:
            tiles.append(("neurons kept", f"{count.kept / count.units:.1%}", f"{kept}, {where}"))
    counts = f"{formatting.count(dense.parameters)} → {formatting.count(compressed.parameters)}"
    tiles.append(("parameters", formatting.change(dense.parameters, compressed.parameters), counts))
    if compressed.reduced_products:
        sizes = f"{formatting.size(dense.file_bytes)} → {formatting.size(compressed.file_bytes)}"
        products = {name: number for name, number in compressed.reduced_products.items() if name != "fp32"}
        tiles = [
            (f"products in {name}", number, "of the matrix products with weights") for name, number in products.items()
        ]
        tiles.append(("file", formatting.change(dense.file_bytes, compressed.file_bytes), sizes))
    rows = sorted(valid_rows(report.speeds), key=lambda row: row.ratio)
    for row in (rows[:1] + rows[-1:])[: len(rows)]:
        basis = f"{formatting.range_text(row.low, row.high)} ({100 * row.confidence:g}%)"
        tiles.append((f"speed, {row.size_label}", f"{row.ratio:.2f}×", basis))
    for score in headline_scores(report.scores)[:2]:
        difference, ends = formatting.difference_and_range(score)
        name = f"{formatting.metric_name(score)}, {score.split_name} rows"
        tiles.append((name, difference, f"{ends} ({100 * score.confidence:g}%)"))
    return tiles


def _curves(report: Report) -> list[Figure]:
    """A figure for each logged quantity: loss first, then temperature, evaluations, and all others by name."""
    names = {name for point in report.curves for name in point.values}

    def rank(name: str) -> tuple[int, str]:
        order = (name == "loss", name == "temperature", name.startswith("eval_"))
        return (order.index(True) if any(order) else len(order), name)

    curves: list[Figure] = []
    for name in sorted(names, key=rank):
        logged = [(point.step, point.values[name]) for point in report.curves if name in point.values]
        points = [(step, value) for step, value in logged if math.isfinite(value)]
        text = f"not drawn: none of its {len(logged)} points is a finite number"
        if points:
            (first, start), (last, end) = points[0], points[-1]
            text = f"{start:.3g} at step {first}" + (f", {end:.3g} at step {last}" if len(points) > 1 else "")
        if 0 < len(points) < len(logged):
            text += f"; {len(logged) - len(points)} of {len(logged)} points are not finite numbers and are not drawn"
        curves.append((name.replace("_", " "), text, figures.curve(*zip(*points, strict=True)) if points else None))
    return curves


def _latencies(speed: Speed) -> Figure:
    end = figures.axis_end(speed)
    dense, compressed = speed.dense.samples, speed.compressed.samples
    description = f"{len(dense)} dense and {len(compressed)} compressed calls, in turn"
    beyond = [sample for sample in (*dense, *compressed) if sample > end]
    if beyond:
        description += f"; {len(beyond)} beyond the axis, the slowest {formatting.ms(max(beyond))}"
    return speed.size_label, description, figures.latencies(speed)
