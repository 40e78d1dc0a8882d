"""Rows per second in the terminal and on the page."""

from __future__ import annotations

import io

from rich.console import Console

from compressor.report import summary
from compressor.report.html import render
from compressor.results import size_label
from tests.report import reports

ROWS = (
    reports.throughput(1, 128, (207.0, 260.0), (476.0, 612.0)),
    reports.throughput(8, 128, (228.0, 250.0), (801.0, 790.0)),
)


def test_the_terminal_shows_both_ways_at_each_size() -> None:
    buffer = io.StringIO()
    Console(width=200, file=buffer).print(summary(reports.report(throughputs=ROWS)))
    lines = [" ".join(line.split()) for line in buffer.getvalue().splitlines() if line.startswith("rows/s")]
    assert lines == [
        "rows/s, batch 1, length 128, one caller 207 476 +130.0%",
        "rows/s, batch 1, length 128, 2 callers 260 612 +135.4%",
        "rows/s, batch 8, length 128, one caller 228 801 +251.3%",
        "rows/s, batch 8, length 128, 2 callers 250 790 +216.0%",
    ]


def test_the_page_shows_a_table_where_it_was_measured() -> None:
    page = render(reports.report(throughputs=ROWS))
    assert page.count('id="throughput"') == 1
    for rate in ("207", "260", "476", "612", "228", "250", "801", "790"):
        assert f'<td class="n">{rate}</td>' in page
    assert 'id="throughput"' not in render(reports.report())


def test_a_size_has_one_label() -> None:
    assert (size_label(8, 128), size_label(8, None)) == ("batch 8, length 128", "batch 8")
    assert {row.size_label for row in ROWS} == {"batch 1, length 128", "batch 8, length 128"}
