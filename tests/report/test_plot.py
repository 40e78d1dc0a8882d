"""Plots: round ticks, and marks at the places of their points."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.report.plot import DENSE, Axis, Plot, file_text, inline, picture, round_numbers, stairs

ENDS = st.tuples(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9)).map(lambda ends: (ends[0], ends[0] + ends[1]))
SVG = "{http://www.w3.org/2000/svg}"


@given(ENDS.filter(lambda ends: ends[0] < ends[1]), st.integers(3, 9), st.booleans())
def test_ticks_are_few_round_and_within_the_axis(ends: tuple[float, float], most: int, whole: bool) -> None:
    low, high = ends
    ticks = round_numbers(low, high, most, whole=whole)
    assert len(ticks) <= most
    slack = 1e-9 * max(abs(low), abs(high))
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert not whole or all(tick == round(tick) for tick in ticks)
    if high - low > 1e-3 * abs(low) and (not whole or high - low >= most):
        assert len(ticks) >= 2
        assert f"{ticks[1] - ticks[0]:.2e}"[:4] in ("1.00", "2.00", "4.00", "5.00")


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=9), st.booleans())
def test_an_axis_holds_every_finite_value(values: list[float], whole: bool) -> None:
    axis = Axis.of(values, whole=whole)
    assert all(0 <= axis.share(value) <= 1 for value in values if math.isfinite(value))


def test_a_logarithmic_axis_has_powers_of_ten() -> None:
    axis = Axis.of((1e-4, 20.0), is_log=True)
    assert list(axis.ticks.values()) == ["0.0001", "0.001", "0.01", "0.1", "1", "10"]
    assert axis.share(1.0) - axis.share(0.1) == pytest.approx(axis.share(10.0) - axis.share(1.0))


def plot_of(*points: tuple[float, float], title: str = "") -> Plot:
    plot = Plot(Axis(0, 10, "<x>", {5: "5"}), Axis(0, 1, "", {0: "0"}), 100, title=title)
    plot.line(points, DENSE)
    plot.marks(points, DENSE, 4)
    return plot


def test_points_that_are_not_finite_are_left_out() -> None:
    svg = inline(plot_of((1, 0.5), (math.nan, 0.5), (2, math.inf), (9, 0.25)))
    (line,) = re.findall(r'points="([^"]*)" style="fill: none', svg)
    assert (len(line.split()), svg.count("<rect")) == (2, 2)
    assert "nan" not in svg
    assert "inf" not in svg


def test_a_picture_is_a_file_with_colours_of_its_own() -> None:
    text = picture([[plot_of((1, 0.5), title="a & b"), plot_of((2, 0.5))], [plot_of((3, 0.5))]])
    root = ElementTree.fromstring(text.encode())
    assert "var(" not in text
    assert len(list(root.iter(f"{SVG}rect"))) == 3
    assert {"<x>", "a & b"} <= {element.text for element in root.iter(f"{SVG}text")}
    assert root.attrib["viewBox"] == "0 0 634 200"
    assert ElementTree.fromstring(file_text(inline(plot_of()))).tag == f"{SVG}svg"


def test_the_outline_of_bars_is_closed_at_the_base() -> None:
    outline = stairs([2.0, 3.0], [0.0, 1.0, 2.0], 1.0)
    assert outline == [(0, 1), (0, 3), (1, 3), (1, 4), (2, 4), (2, 1)]
