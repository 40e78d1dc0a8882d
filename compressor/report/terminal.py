"""The report in the terminal: the verdict and one compact table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    for speed in report.speeds:
        rows.append((f"p50, {speed.size_label}", *_speed_cells(speed)))
    rows += _shares_of_limit(report)
    for speed in valid_rows(report.speeds_over_rewritten):
        rows.append((f"p50, {speed.size_label}, dense rewritten", *_speed_cells(speed)))
    rows += _throughputs(report)
    rows += generation_rows(report)
    for score in headline_scores(report.scores):
        levels = formatting.metric_value(score, score.dense), formatting.metric_value(score, score.compressed)
        rows.append((f"{formatting.metric_name(score)}, {score.split_name}", *levels, formatting.difference(score)))
    return rows


def _speed_cells(speed: Speed) -> tuple[str, str, str]:
    ratio = formatting.ratio(speed) if speed.void is None else f"void: {speed.void}"
    return formatting.ms(speed.dense.p50), formatting.ms(speed.compressed.p50), ratio


def _shares_of_limit(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """The shares of the machine's limit that both engines reach, at each size."""
    for speed in report.speeds:
        before = report.dense.share_of_limit(speed.batch, speed.seq, speed.dense.p50)
        after = report.compressed.share_of_limit(speed.batch, speed.seq, speed.compressed.p50)
        if before is not None and after is not None:
            yield f"share of the machine's limit, {speed.size_label}", f"{before:.0%}", f"{after:.0%}", ""


def generation_rows(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """Times of a prompt and of a token of a model that generates, and the bytes that a token adds to its caches."""
    if report.generation is None:
        return
    for row in report.generation.speeds:
        yield (f"p50, {row.label}", *_speed_cells(row.speed))
    if report.generation.precision != "fp32":
        yield "weights of the decoder", "fp32", report.generation.precision, ""
    cache = report.generation.dense_cache, report.generation.compressed_cache
    yield _row("cache, bytes a token", *cache, formatting.count)


def _throughputs(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """Rows per second with one caller and with several, at each size."""
    for row in report.throughputs:
        label, dense, compressed = row.size_label, row.dense, row.compressed
        number = formatting.significant
        yield _row(f"rows/s, {label}, one caller", dense.one_caller, compressed.one_caller, number)
        yield _row(f"rows/s, {label}, {row.callers} callers", dense.all_callers, compressed.all_callers, number)


def _row(
    name: str, dense: float | None, compressed: float | None, format_number: Callable[[Any], str]
) -> tuple[str, str, str, str]:
    return name, format_number(dense), format_number(compressed), formatting.change(dense, compressed)
