"""The report in the terminal: the verdict and one compact table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from compressor.report import formatting
from compressor.report.budgets import budget_lines, cost_lines
from compressor.report.frontier import Frontier, frontier_rows
from compressor.report.verdict import tone, unit_counts, valid_rows
from compressor.results import Candidate, Report, Speed, headline_scores, labels_by_failure

_STYLES = {"good": "bold green", "mixed": "bold yellow", "bad": "bold red"}


def summary(report: Report) -> RenderableType:
    """The verdict, then a table of dense against compressed; brackets in names are not read as markup."""
    table = _table(("", "dense", "compressed", "change"), _rows(report))
    style = _STYLES[tone(report)]
    lines: list[RenderableType] = [Text(report.verdict, style=style), Text(), table]
    if report.candidates:
        heading = "engines tried with every unit" if report.candidates[0].has_all_units else "engines tried"
        lines += [Text(), _candidates(report.candidates, heading)]
    if report.generation is not None and report.generation.candidates:
        lines += [Text(), _candidates(report.generation.candidates, "engines with caches tried")]
    lines += [Text(line) for line in (*budget_lines(report.budget), *cost_lines(report.costs))]
    for form in dict.fromkeys(site.form for site in report.blocks):
        sites = [site for site in report.blocks if site.form == form]
        reason = sites[0].why if len({site.why for site in sites}) == 1 else f"e.g. {sites[0].site}: {sites[0].why}"
        lines.append(Text(f"{form}: {len(sites)} of {len(report.blocks)} attention layers ({reason})"))
    lines += [Text(f"refused: {refusal.what}: {refusal.why}", style="yellow") for refusal in report.refused]
    return Group(*lines)


def frontier_summary(frontier: Frontier) -> RenderableType:
    """The sentence of a ladder, then a table of its rungs."""
    headings, rows = frontier_rows(frontier)
    table = _table(headings, rows)
    sentence = "; ".join(filter(None, (frontier.sentence, frontier.ending)))
    return Group(Text(sentence, style=_STYLES["bad" if frontier.is_missed else "good"]), Text(), table)


def _candidates(candidates: Sequence[Candidate], heading: str) -> Table:
    """The engines that were tried, with a mark at the delivered engine, and those columns of the page that fit.

    Engines that cannot be delivered for the same reason share a row.
    """
    headings, rows = formatting.candidate_table([row for row in candidates if not row.failure])
    shown = slice(1, headings.index("equal answers"))
    cells = [(row[0], *row[shown], row[-1]) for row in rows]
    empty = [""] * len(headings[shown])
    cells += [(", ".join(labels), *empty, "not delivered") for labels in labels_by_failure(candidates).values()]
    return _table((heading, *headings[shown], ""), cells)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of names and numbers; a narrow terminal folds its cells and cuts none."""
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _rows(report: Report) -> list[tuple[str, str, str, str]]:
    dense, compressed, plan = report.dense, report.compressed, report.plan
    rows = [
        *(
            (count.type, f"{count.units:,}", f"{count.kept:,}", formatting.change(count.units, count.kept))
            for count in unit_counts(plan)
        ),
        _row("parameters", dense.parameters, compressed.parameters, formatting.count),
        _row("file", dense.file_bytes, compressed.file_bytes, formatting.size),
    ]
    rows += [
        (f"products in {name}", "all" if name == "fp32" else "0", count, "")
        for name, count in compressed.reduced_products.items()
    ]
    if dense.macs is not None or compressed.macs is not None:
        rows.append(_row("multiply-accumulates", dense.macs, compressed.macs, formatting.count))
    if dense.peak_memory_bytes is not None or compressed.peak_memory_bytes is not None:
        rows.append(_row("peak memory", dense.peak_memory_bytes, compressed.peak_memory_bytes, formatting.size))
    if dense.built is not None and compressed.built is not None:
        rows.append(_row("engine", dense.built.engine_bytes, compressed.built.engine_bytes, formatting.size))
        if dense.attentions:
            before, after = (f"{engine.fused} of {engine.attentions}" for engine in (dense, compressed))
            rows.append(("attentions fused", before, after, ""))
    rows += [_speed_row(f"p50, {speed.size_label}", speed) for speed in report.speeds]
    for speed in report.speeds:
        limits = [
            engine.share_of_limit(speed.batch, speed.seq, times.p50)
            for engine, times in ((dense, speed.dense), (compressed, speed.compressed))
        ]
        if None not in limits:
            shares = [f"{share:.0%}" for share in limits]
            rows.append((f"share of the machine's limit, {speed.size_label}", shares[0], shares[1], ""))
    rewritten = valid_rows(report.speeds_over_rewritten)
    rows += [_speed_row(f"p50, {speed.size_label}, dense rewritten", speed) for speed in rewritten]
    for rates in report.throughputs:
        for way, callers in (("one_caller", "one caller"), ("all_callers", f"{rates.callers} callers")):
            both = getattr(rates.dense, way), getattr(rates.compressed, way)
            rows.append(_row(f"rows/s, {rates.size_label}, {callers}", *both, formatting.significant))
    if report.generation is not None:
        rows += [_speed_row(f"p50, {row.label}", row.speed) for row in report.generation.speeds]
        cache = report.generation.dense_cache, report.generation.compressed_cache
        rows.append(_row("cache, bytes a token", *cache, formatting.count))
    for score in headline_scores(report.scores):
        levels = formatting.in_unit(score.dense, score.unit), formatting.in_unit(score.compressed, score.unit)
        rows.append((f"{formatting.metric_name(score)}, {score.split_name}", *levels, formatting.difference(score)))
    return rows


def _speed_row(name: str, speed: Speed) -> tuple[str, str, str, str]:
    ratio = formatting.ratio(speed) if speed.void is None else f"void: {speed.void}"
    return name, formatting.ms(speed.dense.p50), formatting.ms(speed.compressed.p50), ratio


def _row(
    name: str, dense: float | None, compressed: float | None, format_number: Callable[[Any], str]
) -> tuple[str, str, str, str]:
    return name, format_number(dense), format_number(compressed), formatting.change(dense, compressed)
