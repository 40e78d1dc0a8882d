"""The engines that were tried: in the terminal, on the page, in the verdict and in the file of the report."""

from __future__ import annotations

import io
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from compressor.report import load, summary, write
from compressor.report.files import to_json
from compressor.report.html import render
from compressor.results import Candidate, DropStatus, MetricUnit, Proof, ProofStage, QuantizedProducts, Report
from tests.report import reports

HOSTILE = "</td></tr></table><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}[red]x[/red]"
PRODUCTS = QuantizedProducts(requested=38, executed=37, in_float=("classifier",), float_in_graph=("pooler",))
SIZES = ("batch 1, length 128", "batch 8, length 128")
PROOFS = tuple(
    Proof(stage=stage, variant="compressed", error=1e-7, tolerance=1e-5, cases=("batch 1",))
    for stage in (ProofStage.EXPORT, ProofStage.SHRINK, ProofStage.BUILD)
)
CANDIDATES = (
    Candidate(
        target="ort",
        precision="fp32",
        milliseconds={SIZES[0]: 4.83, SIZES[1]: 35.1},
        speed=1.314,
        metric=0.9220,
        difference=-0.0046,
        unit=MetricUnit.POINTS,
        agreement=0.99,
        file_bytes=83_000_000,
        peak_memory_bytes=190_000_000,
        proofs=PROOFS,
    ),
    Candidate(
        target="openvino",
        precision="int8",
        form="portable",
        milliseconds={SIZES[0]: 2.1},
        speed=2.961,
        metric=0.9174,
        difference=-0.0092,
        unit=MetricUnit.POINTS,
        agreement=0.9764,
        file_bytes=23_100_000,
        peak_memory_bytes=88_000_000,
        quantized=PRODUCTS,
        proofs=PROOFS[:2],
        chosen=True,
    ),
    Candidate(
        target="ort",
        precision="int8",
        form="dynamic",
        speed=3.5,
        metric=0.85,
        difference=-0.0766,
        agreement=0.9,
        file_bytes=23_000_000,
        quantized=PRODUCTS,
        holds=False,
    ),
    Candidate(target="trt", precision="fp32", holds=False, failure="this machine has no NVIDIA GPU"),
    Candidate(target="trt", precision="fp16", holds=False, failure="this machine has no NVIDIA GPU"),
)
ROWS = [
    ["ort fp32", "4.83 ms", "35.1 ms", "1.31×", "92.2 (−0.46 points)", "99.0%", "83 MB", "190 MB", "3 of 3", ""],
    [
        *("openvino int8 portable", "2.10 ms", "", "2.96×", "91.7 (−0.92 points)", "97.6%", "23.1 MB", "88 MB"),
        *("2 of 2", "chosen"),
    ],
    ["ort int8 dynamic", "", "", "3.50×", "0.850 (−0.0766)", "90.0%", "23 MB", "", "", "loses too much"],
    ["trt fp32", "", "", "", "", "", "", "", "", "this machine has no NVIDIA GPU"],
    ["trt fp16", "", "", "", "", "", "", "", "", "this machine has no NVIDIA GPU"],
]
HEADINGS = [
    "engine",
    *SIZES,
    "speed",
    "metric, evaluation rows",
    "equal answers",
    "size",
    "memory",
    "proofs",
    "outcome",
]

PLAIN: dict[str, Any] = {"speeds": (), "curves": ()}
"""A report without figures."""


def report_of(*candidates: Candidate, **fields: Any) -> Report:
    """A run that tried several engines and delivered one in int8."""
    compressed = reports.engine(20_936_834, file_bytes=23_100_000, quantized=PRODUCTS, products=PRODUCTS.by_precision)
    defaults = {"target": "openvino", "precision": "int8", "compressed": compressed}
    return reports.report(candidates=candidates or CANDIDATES, **{**defaults, **fields})


class _Tables(HTMLParser):
    """The cells of the rows of every table of a page, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self._cell: list[str] | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags += [tag, *(name for name, _ in attrs)]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            self.rows[-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)


def printed(report: Report, width: int = 200) -> list[str]:
    """The lines of the summary in a terminal of this width."""
    buffer = io.StringIO()
    Console(width=width, file=buffer).print(summary(report))
    return buffer.getvalue().splitlines()


def test_the_terminal_shows_a_row_for_each_engine() -> None:
    lines = printed(report_of())
    (start,) = (number for number, line in enumerate(lines) if line.startswith("engines tried"))
    shown = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[start + 1 : start + 5]]
    expected = [[cell for cell in (*row[:5], row[-1]) if cell] for row in ROWS]
    assert shown == [*expected[:3], ["trt fp32, trt fp16", "not delivered"]], "failures are too long for a terminal"


def test_the_terminal_shows_no_table_of_one_engine() -> None:
    report = report_of().model_copy(update={"candidates": ()})
    assert not any("engines tried" in line for line in printed(report))


@pytest.mark.parametrize("width", [80, 60])
def test_the_table_fits_a_terminal(width: int) -> None:
    report = report_of(*CANDIDATES, CANDIDATES[1].model_copy(update={"form": "portable, 12 products in floats"}))
    lines = printed(report, width)
    assert all(len(line) <= width for line in lines)
    assert " ".join(" ".join(lines).split()).startswith(report.verdict)
    assert not any("…" in line for line in lines), "cells are folded, not cut"


def test_the_terminal_prints_brackets_unchanged() -> None:
    hostile = Candidate(target="[red]x[/red]", precision="[/]", speed=2.0)
    assert any("[red]x[/red] [/]" in line for line in printed(report_of(hostile)))


def test_the_page_shows_a_row_for_each_engine() -> None:
    page = render(report_of())
    assert page.count('id="candidates"') == 1
    rows = _Tables(page).rows
    start = rows.index(HEADINGS)
    assert rows[start + 1 : start + 1 + len(ROWS)] == ROWS


def test_the_page_has_no_section_without_engines_to_compare() -> None:
    page = render(report_of().model_copy(update={"candidates": ()}))
    assert "Engines tried" not in page
    assert 'id="candidates"' not in page


@pytest.mark.parametrize("field", ["failure", "target", "precision", "form"])
def test_hostile_text_remains_text_on_the_page(field: str) -> None:
    failed = [CANDIDATES[3].model_copy(update={field: text}) for text in (HOSTILE, "a")]
    pages = [_Tables(render(report_of(CANDIDATES[1], candidate, **PLAIN))) for candidate in failed]
    assert pages[0].tags == pages[1].tags
    assert "script" not in pages[0].tags
    assert "onerror" not in pages[0].tags
    assert any(HOSTILE in cell for row in pages[0].rows for cell in row)


@settings(max_examples=15, deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from("<>&\"'/={}%#\\`$-! \n"), st.characters(codec="utf-8")), min_size=1))
def test_no_failure_changes_the_tags_of_the_page(text: str) -> None:
    failed = [CANDIDATES[3].model_copy(update={"failure": failure}) for failure in (text, "a")]
    tags = [_Tables(render(report_of(CANDIDATES[1], candidate, **PLAIN))).tags for candidate in failed]
    assert tags[0] == tags[1]


def test_the_verdict_names_the_products_in_int8() -> None:
    assert report_of().verdict.startswith(
        "37 of 39 matrix products in int8, 2 in fp32, 36 of 72 heads and 7.8% fewer parameters"
    )
    whole = report_of(plan=reports.dense(reports.bert_plan()), dense=reports.engine(20_936_834))
    assert whole.verdict.startswith(
        "37 of 39 matrix products in int8, 2 in fp32, all 72 heads and the same 20.9M parameters"
    )


def test_an_int8_engine_that_keeps_every_head_is_a_result() -> None:
    plan = reports.dense(reports.bert_plan())
    verdict = report_of(plan=plan).verdict
    assert "othing was" not in verdict
    assert "no unit was removed" not in verdict
    slow = report_of(plan=plan, speeds=(reports.speed(1, 128, 4.0, 6.0),)).verdict
    assert slow.startswith("Slower: 37 of 39 matrix products in int8")
    lost = report_of(plan=plan, drop_status=DropStatus.FAILED, scores=(reports.accuracy(0.915, 0.871),)).verdict
    assert lost.startswith("The metric fell too far: ")


def test_the_summary_counts_the_products_in_int8() -> None:
    assert any(line.split() == "products in int8 0 37 of 39".split() for line in printed(report_of()))


def test_a_report_is_read_back_with_its_candidates(tmp_path: Path) -> None:
    report = report_of()
    write(report, tmp_path)
    loaded = load(tmp_path)
    assert loaded.candidates == report.candidates
    assert loaded.compressed.quantized == PRODUCTS
    assert to_json(loaded) == to_json(report)
    assert [candidate.label for candidate in loaded.candidates] == [row[0] for row in ROWS]


@pytest.mark.parametrize("metric", [math.inf, -math.inf, math.nan])
def test_metrics_that_are_not_finite_are_stored_and_shown(metric: float, tmp_path: Path) -> None:
    report = report_of(CANDIDATES[0].model_copy(update={"metric": metric, "difference": metric}))
    write(report, tmp_path)
    (candidate,) = load(tmp_path).candidates
    assert repr(candidate.metric) == repr(metric)
    assert printed(report)


def test_reports_of_a_version_without_candidates_have_none() -> None:
    fields = report_of().model_dump(mode="json")
    del fields["candidates"]
    assert Report.model_validate(fields).candidates == ()


def test_engines_of_the_whole_model_are_named_as_such() -> None:
    """Where units are removed for the fastest engine, the rows are not of the engine that is delivered."""
    whole = report_of(*(row.model_copy(update={"has_all_units": True}) for row in CANDIDATES), **PLAIN)
    for report, is_whole in ((whole, True), (report_of(**PLAIN), False)):
        assert ("Each engine of the whole model" in render(report)) is is_whole
        assert any("engines tried with every unit" in line for line in printed(report)) is is_whole
