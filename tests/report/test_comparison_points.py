"""Engines of other tools on the page of a ladder: the file is checked field by field, and each is drawn at its size."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import ErrorCode, InputError
from compressor.report.frontier import ComparisonPoint, Frontier, point_rows, read_points, rung_of
from compressor.report.frontier_page import all_series, render
from tests.faults import fails_with
from tests.report import reports

FAST = {"name": "static int8", "metric": 0.9, "speed": 2.5}


def written(path: Path, content: Any) -> Path:
    file = path / "rivals.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def frontier(*points: dict[str, Any]) -> Frontier:
    """Two rungs at two sizes; dense takes 40 ms at batch 1 and 300 ms at batch 8."""
    rungs = [
        rung_of(
            name,
            reports.report(
                scores=(reports.accuracy(0.9, 0.9 - loss),),
                speeds=(reports.speed(1, 128, 40.0, 40.0 / ratio), reports.speed(8, 128, 300.0, 300.0 / ratio)),
            ),
            0.02,
        )
        for name, loss, ratio in (("macs-50", 0.0, 2.0), ("macs-25", 0.03, 4.0))
    ]
    return Frontier(
        model="minilm", max_drop=0.02, rungs=tuple(rungs), points=tuple(map(ComparisonPoint.model_validate, points))
    )


def test_points_are_read_with_all_fields(tmp_path: Path) -> None:
    slow = {"name": "eager", "metric": 0.9, "metric_interval": [0.88, 0.92], "p50": 60, "p50_interval": [55.5, 70]}
    points = read_points(written(tmp_path, [FAST, {**slow, "batch": 1, "seq": 128}]))
    assert [point.name for point in points] == ["static int8", "eager"]
    assert (points[1].p50, points[1].metric_interval, points[1].seq) == (60, (0.88, 0.92), 128)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "name"),
        ({"metric": "0.9"}, "metric"),
        ({"metric": None}, "metric"),
        ({"metric_interval": [0.95, 0.85]}, "metric_interval"),
        ({"metric_interval": [0.95, 0.96]}, "metric_interval"),
        ({"metric_interval": [0.85]}, "metric_interval"),
        ({"metric_interval": 0.9}, "metric_interval"),
        ({"metric_interval": [0.85, 0.9, 0.95]}, "metric_interval"),
        ({"name": 3}, "name"),
        ({"speed": 0}, "speed"),
        ({"speed": None}, "speed"),
        ({"p50": 3.0}, "speed"),
        ({"p50_interval": [2.0, 3.0]}, "p50_interval"),
        ({"speed_interval": [-1, 3]}, "speed_interval"),
        ({"batch": 1.5}, "batch"),
        ({"seq": 0}, "seq"),
        ({"latency": 3.0}, "latency"),
    ],
)
def test_a_bad_field_is_named_in_one_line(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    path = written(tmp_path, [FAST, {**FAST, **changes}])
    with fails_with(ErrorCode.FILE_UNREADABLE, InputError, path=path, point=2, field=field) as caught:
        read_points(path)
    assert not {"\n", "should", "tuple", "string"} & set(re.findall(r"\n|\w+", str(caught.value))), "pydantic's words"


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, [{"name": "x", "speed": 2.0}])
    with fails_with(ErrorCode.FILE_UNREADABLE, InputError, path=path, point=1, field="metric"):
        read_points(path)


@pytest.mark.parametrize("content", ["", "{", {"name": "x"}, 3])
def test_a_file_that_is_no_list_is_refused(tmp_path: Path, content: Any) -> None:
    path = written(tmp_path, content)
    with fails_with(ErrorCode.FILE_UNREADABLE, InputError, path=path, point=None, field=None):
        read_points(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with fails_with(ErrorCode.FILE_MISSING, InputError, path=tmp_path / "none.json"):
        read_points(tmp_path / "none.json")


def test_points_are_drawn_at_their_size() -> None:
    result = frontier({**FAST, "batch": 8}, FAST, {**FAST, "seq": 64})
    labels = [[series.label for series in all_series(result, size) if series.label] for size in range(2)]
    assert labels == [["2"], ["1", "2"]]
    assert [[bool(cell) for cell in row[3:]] for row in point_rows(result)] == [[False, True], [True] * 2, [False] * 2]


def test_milliseconds_are_compared_with_those_of_dense() -> None:
    result = frontier(
        {"name": "eager", "metric": 0.88, "metric_interval": [0.87, 0.89], "p50": 20.0, "p50_interval": [16, 25]}
    )
    dense = result.rungs[0].speeds[0].dense.p50
    mark = next(all_series(result, 0)).marks[0]
    assert mark.speed == pytest.approx((dense / 20, dense / 25, dense / 16))
    assert mark.metric == pytest.approx((88, 87, 89))


def test_the_page_has_a_table_of_points() -> None:
    page = render(frontier({**FAST, "name": "<b>$x$"}))
    assert 'id="points"' in page
    assert "&lt;b&gt;$x$" in page
    assert "<b>$x$" not in page
    assert 'id="points"' not in render(frontier())
    result = frontier(FAST)
    assert Frontier.model_validate(json.loads(result.model_dump_json())) == result


def test_every_speed_of_a_point_has_a_heading_where_rungs_have_other_sizes() -> None:
    whole = frontier(FAST)
    page = render(
        whole.model_copy(update={"rungs": (whole.rungs[0], whole.rungs[1].model_copy(update={"speeds": ()}))})
    )
    table = page[page.index('<h2 id="points">') :]
    first, row = (
        re.search(pattern, table, re.DOTALL) for pattern in (r"<thead>.*?</thead>", r"<tbody>\s*<tr>.*?</tr>")
    )
    assert first is not None
    assert row is not None
    assert first[0].count("<th ") == row[0].count("<td")
