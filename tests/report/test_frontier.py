"""The frontier of a ladder: which rung is the fastest that holds, and what the page and the terminal state of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from compressor.report.frontier import Frontier, Rung, frontier_rows, rung_of
from compressor.report.frontier_page import all_series, render
from compressor.report.html import render as render_report
from compressor.report.terminal import frontier_summary, summary
from tests.report import reports


def rung(
    name: str, loss: float, milliseconds: float, max_drop: float | None = 0.02, eval_loss: float | None = None
) -> Rung:
    """A rung that loses `loss` on test rows, within a point, where the dense engine takes 40 ms.

    With `eval_loss` it loses that on evaluation rows, within a point too.
    """
    scores = [reports.accuracy(0.9, 0.9 - loss)]
    if eval_loss is not None:
        scores.append(reports.accuracy(0.8, 0.8 - eval_loss, split="eval"))
    report = reports.report(scores=tuple(scores), speeds=(reports.speed(1, 128, 40.0, milliseconds),))
    return rung_of(name, report, max_drop)


def frontier(*rungs: Rung, max_drop: float | None = 0.02) -> Frontier:
    return Frontier(model="minilm", max_drop=max_drop, rungs=rungs)


MILD, MIDDLE, STRICT = rung("macs-50", 0.0, 20.0), rung("macs-33", 0.005, 10.0), rung("macs-25", 0.015, 5.0)


def test_rungs_link_to_the_reports_in_their_folders() -> None:
    above = MIDDLE.model_copy(update={"folder": ".."})
    page = render(frontier(MILD, above))
    assert 'href="macs-50/report.html">macs-50</a>' in page
    assert 'href="../report.html">macs-33</a>' in page


def test_a_rung_holds_with_its_whole_interval_or_not_at_all() -> None:
    assert [rung.holds for rung in (MILD, MIDDLE, STRICT)] == [True, True, False]
    assert rung("macs-25", 0.015, 5.0, max_drop=None).holds is None


@pytest.mark.parametrize(
    ("rungs", "expected"),
    [((MILD, MIDDLE, STRICT), MIDDLE), ((STRICT, MIDDLE, MILD), MIDDLE), ((MILD, STRICT), MILD), ((STRICT,), None)],
)
def test_the_fastest_rung_that_holds_is_chosen(rungs: tuple[Rung, ...], expected: Rung | None) -> None:
    result = frontier(*rungs)
    assert result.fastest == expected
    named = [rung.name for rung in rungs if rung.name in result.sentence]
    assert named == ([] if expected is None else [expected.name])


@pytest.mark.parametrize(
    ("loss", "eval_loss", "holds", "is_missed"),
    [
        (0.0, 0.0, True, False),
        (0.015, 0.0, True, False),  # its interval on test rows does not decide
        (0.03, 0.0, True, True),
        (0.0, 0.015, False, True),
    ],
)
def test_evaluation_rows_choose_the_rung_and_test_rows_can_refuse_it(
    loss: float, eval_loss: float, *, holds: bool, is_missed: bool
) -> None:
    chosen = rung("macs-25", loss, 5.0, eval_loss=eval_loss)
    result = frontier(chosen)
    assert (chosen.holds, result.fastest is chosen, result.is_missed) == (holds, holds, is_missed)
    (score,) = chosen.headline
    assert (score.split, score.loss) == ("test", pytest.approx(loss))
    headings, rows = frontier_rows(result)
    assert sum(heading.startswith("accuracy") for heading in headings) == 2
    assert all(rows[0])
    page = render(result)
    assert ('class="bad"' in page, "evaluation rows" in page) == (is_missed, True)


def test_test_rows_choose_the_rung_where_evaluation_rows_have_no_labels() -> None:
    assert "evaluation rows" not in frontier(MILD).sentence
    assert "evaluation rows" in frontier(rung("macs-25", 0.0, 5.0, eval_loss=0.0)).sentence
    assert not frontier(MILD).is_missed
    assert frontier(STRICT).is_missed
    assert not frontier(rung("macs-25", 0.5, 5.0, None), max_drop=None).is_missed


def test_the_page_names_the_rows_that_are_quoted() -> None:
    report = reports.report(scores=(reports.accuracy(split="eval"),), speeds=(reports.speed(1, 128, 40.0, 20.0),))
    for rungs, split in (((MILD,), "test"), ((rung_of("a", report, 0.02),), "evaluation")):
        result = frontier(*rungs)
        assert (result.quoted_split, result.deciding_split) == (split, split)
        assert f"of that engine on the {split} rows" in render(result)
    both = frontier(rung("macs-25", 0.0, 5.0, eval_loss=0.0))
    assert (both.quoted_split, both.deciding_split) == ("test", "evaluation")


def test_void_speeds_are_not_shown_as_speeds() -> None:
    void = reports.speed(1, 128, 40.0, 20.0).model_copy(update={"void": "other settings"})
    report = reports.report(speeds=(void,), speeds_over_rewritten=(void,), scores=(reports.accuracy(0.9, 0.9),))
    result = frontier(rung_of("a", report, None), max_drop=None)
    assert "void" in frontier_rows(result)[1][0]
    buffer = io.StringIO()
    Console(width=200, file=buffer).print(summary(report))
    for text in (buffer.getvalue(), render(result), render_report(report), result.sentence):
        assert "2.00×" not in text
        assert "0×" not in text
        assert "0 times" not in text


def test_rungs_that_were_measured_at_other_sizes_or_not_at_all_have_empty_cells() -> None:
    """compress build measures a rung again, with other sizes or without rows."""
    remeasured = rung_of("b", reports.report(speeds=(reports.speed(1, 64, 40.0, 20.0),), scores=()), None)
    unmeasured = rung_of("c", reports.report(speeds=(), scores=()), None)
    result = frontier(MILD, remeasured, unmeasured, max_drop=None)
    headings, rows = frontier_rows(result)
    cells = [dict(zip(headings, row, strict=True)) for row in rows]
    (metric,) = (heading for heading in headings if heading.startswith("accuracy"))
    assert [bool(row[metric]) for row in cells] == [True, False, False]
    for length, measured in ((128, [True, False, False]), (64, [False, True, False])):
        (speed,) = (heading for heading in headings if f"length {length} " in heading)
        assert [bool(row[speed]) for row in cells] == measured
    assert "<svg" not in render(result)
    assert "<svg" in render(frontier(MILD, STRICT))


def test_without_a_bound_no_rung_is_chosen() -> None:
    result = frontier(*(rung(name, 0.0, 10.0, None) for name in ("macs-50", "macs-25")), max_drop=None)
    assert result.fastest is None
    assert "macs" not in result.sentence


def test_a_frontier_is_read_as_it_was_written() -> None:
    result = frontier(MILD, STRICT).model_copy(update={"ended": "macs-1: 1%"})
    assert Frontier.model_validate_json(result.model_dump_json()) == result
    assert result.model_dump()["sentence"] == result.sentence


def test_rungs_are_drawn_with_intervals_and_with_whether_they_hold() -> None:
    (series,) = all_series(frontier(MILD, STRICT), 0)
    assert [mark.fills for mark in series.marks] == [True, False]
    for mark, drawn in zip(series.marks, (MILD, STRICT), strict=True):
        speed, value = drawn.speeds[0], 100 * drawn.scores[0].compressed
        assert mark.speed == (speed.ratio, speed.low, speed.high)
        assert mark.metric == pytest.approx((value, value - 1, value + 1))


def test_the_table_has_the_multiply_accumulates_that_are_counted() -> None:
    headings, _ = frontier_rows(frontier(MILD))
    counted = MILD.model_copy(update={"macs": 0.5})
    more, rows = frontier_rows(frontier(counted, STRICT))
    (column,) = [index for index, heading in enumerate(more) if heading not in headings]
    assert [bool(row[column]) for row in rows] == [True, False]


def test_a_frontier_without_rungs_has_a_page() -> None:
    assert 'id="ends"' in render(frontier().model_copy(update={"ended": "macs-50: NaN"}))


def test_rungs_that_are_missing_are_stated_with_the_reason() -> None:
    result = frontier(MILD, MIDDLE).model_copy(update={"ended": "macs-1: too <strict>"})
    printed = io.StringIO()
    Console(file=printed, width=400).print(frontier_summary(result))
    page, text = render(result), printed.getvalue()
    assert "macs-1: too <strict>" in text
    assert "macs-1: too &lt;strict&gt;" in page
    assert 'id="ends"' in page
    assert 'id="ends"' not in render(frontier(MILD, MIDDLE))
