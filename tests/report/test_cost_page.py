"""Cost tables as curves, as rows of text, as a page and as a picture."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from compressor.measure.costs import CostTable, GroupCosts
from compressor.report.cost_page import (
    CostCurve,
    CostPoint,
    curve_bars,
    curve_rows,
    curves_of,
    headline,
    picture,
    render,
)

LAYERS = tuple(f"encoder.layer.{layer}.output.dense" for layer in range(3))
TABLE = CostTable(
    unit="ms",
    engine="ort fp32",
    batch=1,
    seq=128,
    dense=12.0,
    whole=10.0,
    rows=(
        GroupCosts(groups=LAYERS, type="neurons", counts=(0, 8, 16, 32), savings=(2.0, 0.5, 1.0, 0.0)),
        GroupCosts(groups=("pooler.attention",), type="heads", counts=(0, 2), savings=(1.0, 0.0)),
    ),
)


def test_a_curve_is_the_time_of_one_group() -> None:
    neurons, heads = curves_of(TABLE)
    assert (neurons.title, neurons.unit, neurons.pattern) == (
        "3 feed-forwards",
        "neurons",
        "encoder.layer.*.output.dense",
    )
    assert neurons.points == (
        CostPoint(0, 0.0, 0.0),
        CostPoint(8, 1.5, 0.45, faster=16),
        CostPoint(16, 1.0, 0.3),
        CostPoint(32, 2.0, 0.6),
    )
    assert (heads.title, heads.pattern) == ("1 attention", "pooler.attention")


def test_rows_name_cliffs() -> None:
    rows = curve_rows(curves_of(TABLE)[0])
    assert rows[0] == ("0", "0 ms", "0.0%", "")
    assert [row[0] for row in rows if row[3]] == ["8"]


@given(st.lists(st.floats(-1.0, 1e3), min_size=1, max_size=9))
def test_bars_are_as_long_as_times(times: list[float]) -> None:
    curve = CostCurve("", "neurons", "", tuple(CostPoint(units, ms, 0.0) for units, ms in enumerate(times)))
    bars = curve_bars(curve)
    longest, most = max(map(len, bars)), max(times)
    for bar, ms in zip(bars, times, strict=True):
        assert abs(len(bar) - longest * max(ms, 0.0) / most) <= 1 if most > 0 else bar == ""


def test_the_headline_gives_the_limit_of_a_speedup() -> None:
    assert "4× as fast as dense" in headline(TABLE.model_copy(update={"rows": TABLE.rows[:1], "whole": 9.0}))


def test_the_page_has_a_figure_for_each_curve_and_size() -> None:
    larger = TABLE.model_copy(update={"batch": 8})
    page = render("<model>", "ort fp32", [TABLE, larger])
    assert page.count("<svg") == 4
    assert "&lt;model&gt;" in page
    assert "<model>" not in page
    assert "http:" not in page
    assert "https:" not in page
    assert render("<model>", "ort fp32", [TABLE, larger]) == page


def test_the_picture_marks_cliffs() -> None:
    def hollow_marks(savings: tuple[float, ...]) -> int:
        table = TABLE.model_copy(update={"rows": (TABLE.rows[0].with_savings(savings),)})
        marks = ElementTree.fromstring(picture([table]).encode()).iter("{http://www.w3.org/2000/svg}rect")
        return sum("fill: none" in mark.attrib["style"] for mark in marks)

    assert hollow_marks(TABLE.rows[0].savings) == 1
    assert hollow_marks((2.0, 1.5, 1.0, 0.0)) == 0
