"""A plan that does not read says what is wrong with it, in one plain line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graph_passes import Plan, PlanError
from tests.graph_passes.graphs import plan

MEND = "mend the plan or learn it again"
BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no sites": (lambda made: made.pop("sites"), "sites is missing"),
    "no heads": (lambda made: made["sites"][0].pop("heads"), "sites[0].heads is missing"),
    "another version": (lambda made: made.update(version=2), "version 2 is not read, only version 1"),
    "a strange key": (lambda made: made.update(kept=3), "kept is no key of a plan"),
    "a strange key of a site": (lambda made: made["sites"][0].update(keep=3), "sites[0].keep is no key of a plan"),
    "a head out of range": (
        lambda made: made["sites"][0].update(kept=[0, 4], scale=[]),
        "a: head 4 is out of range, the site has heads 0 to 3",
    ),
    "a head below zero": (
        lambda made: made["sites"][0].update(kept=[-1, 2]),
        "sites[0].kept[0] is -1 and should be greater than or equal to 0",
    ),
    "not ascending": (
        lambda made: made["sites"][0].update(kept=[2, 0]),
        "a: kept heads [2, 0] must be ascending and without repeats",
    ),
    "words for heads": (
        lambda made: made["sites"][0].update(heads="many"),
        "sites[0].heads is 'many' and should be a valid integer, unable to parse string as an integer",
    ),
}


def said(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(caught.value).count(str(path)) == 1
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("name", BAD)
def test_a_fault_is_one_plain_line(name: str, tmp_path: Path) -> None:
    spoil, message = BAD[name]
    made = plan([0, 2]).model_dump(mode="json")
    spoil(made)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(made))
    assert said(path) == f"{message}; {MEND}"


def test_not_json(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{")
    assert said(path) == f"is not JSON (EOF while parsing an object at line 1 column 1); {MEND}"
    path.write_text("[]")
    assert said(path) == f"the plan is [] and should be an object; {MEND}"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert said(tmp_path / "none.json") == "there is no such plan; give the path of a plan.json"
    assert said(tmp_path) == "cannot be read as a plan (Is a directory); give the path of a plan.json"
    (tmp_path / "plan.json").write_bytes(b"\xff")
    assert said(tmp_path / "plan.json") == "cannot be read as a plan (it is not UTF-8); give the path of a plan.json"


def test_a_plan_that_was_saved_is_read(tmp_path: Path) -> None:
    plan([0, 2]).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan([0, 2])
