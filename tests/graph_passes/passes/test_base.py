"""Passes return reports, log changes, and refuse graphs whose functions are not inlined."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

import onnx.parser
import onnx_ir as ir
import pytest

from graph_passes import Plan, passes
from graph_passes.passes import CleanUp, FoldGates, InsertGates, LowerBlockSparse, RemoveDeadBranches, RemoveUnits
from graph_passes.passes.base import GraphPass, Names
from tests.graph_passes.graphs import graph
from tests.graph_passes.passes.test_normalize import CALL


def test_every_pass_is_exported_and_returns_a_report_that_cannot_change() -> None:
    files = {path.stem for path in Path(passes.__file__).parent.glob("*.py")} - {"__init__", "base"}
    exported = {name: rewrite for name, rewrite in vars(passes).items() if isinstance(rewrite, type)}
    assert {rewrite.__module__.rpartition(".")[2] for rewrite in exported.values()} == files
    for name, rewrite in exported.items():
        assert issubclass(rewrite, GraphPass)
        (base,) = vars(rewrite)["__orig_bases__"]
        (report,) = base.__args__
        is_frozen = dataclasses.is_dataclass(report) and vars(report)["__dataclass_params__"].frozen
        assert is_frozen or report in (Names, Mapping[str, int], int), name


def test_a_change_is_logged_with_its_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="graph_passes.passes.clean_up")
    model = graph('g = Mul(x, "a.head_gate")  y = Relu(g)', 'float[8] "a.head_gate"')
    CleanUp()(model)
    (record,) = [record for record in caplog.records if record.name == "graph_passes.passes.clean_up"]
    assert record.getMessage() == "('a.head_gate',)"
    caplog.clear()
    CleanUp()(model)
    assert not [record for record in caplog.records if record.name == "graph_passes.passes.clean_up"]


def test_a_result_of_one_pass_is_taken_by_the_next() -> None:
    model = graph('g = Mul(x, "a.head_gate")  y = Relu(g)', 'float[8] "a.head_gate"')
    assert not FoldGates()(CleanUp()(model)).modified


@pytest.mark.parametrize(
    "rewrite",
    [FoldGates(), RemoveUnits(), RemoveDeadBranches(), InsertGates(Plan(sites=())), LowerBlockSparse({})],
    ids=lambda rewrite: type(rewrite).__name__,
)
def test_calls_of_local_functions_are_refused(rewrite: GraphPass[object]) -> None:
    with pytest.raises(ir.passes.PreconditionError, match="local::twice"):
        rewrite(ir.from_proto(onnx.parser.parse_model(CALL)))
