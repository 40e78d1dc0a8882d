"""Ladders of several methods: their recipes, the gates that follow multiply-accumulates, and methods that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare_methods import NAME, TABLE, compare, comparison, ladders_of, run_ladders
from compressor.cli import main
from compressor.config.methods import BUDGET_METHODS, METHODS, SEARCH_METHODS
from compressor.config.run import Recipe
from compressor.errors import BudgetError, CompressorError, DivergedError, ErrorCode, SiteRefusedError, UsageError
from compressor.report.frontier import Frontier
from graph_passes import GraphErrorCode, GraphPassError
from tests.faults import fails_with
from tests.run.ladder_runs import NAMES, Runs, fake_runs, flags_of
from tests.run.listeners import RecordingListener

GATE_METHODS = tuple(name for name, method in METHODS.items() if method.kind == "gate")
SPEEDUPS = ["speedup-2", "speedup-4", "speedup-8"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return fake_runs(tmp_path, monkeypatch)


def ladders(*methods: str, **flags: Any) -> dict[str, tuple[Recipe, ...]]:
    fields = {"data": "train.tsv", "macs": "90%,80%", "out": "out", **flags}
    return ladders_of("model", None, {name: value for name, value in fields.items() if value is not None}, methods)


def climb(runs: Runs, *methods: str, **flags: Any) -> dict[str, Frontier]:
    fields = {name: value for name, value in flags_of(runs, **flags).items() if value is not None}
    return run_ladders(ladders_of(str(runs.out.parent / "model"), None, fields, methods), RecordingListener())


def climb_by_time(runs: Runs) -> dict[str, Frontier]:
    return climb(runs, "reconstruct", "dsp", "fisher", macs=None, speedup="2,4,8")


@pytest.mark.parametrize("method", [*BUDGET_METHODS[1:], *GATE_METHODS])
def test_every_method_that_meets_the_budgets_is_compared(method: str) -> None:
    recipes = ladders("reconstruct", method)[method]
    assert [recipe.budget.macs for recipe in recipes] == [0.9, 0.8]
    assert [recipe.output.out for recipe in recipes] == [Path("out", method, f"macs-{value}") for value in (90, 80)]
    assert {recipe.selection.method for recipe in recipes} == {method}
    start = recipes[0].output.out if method in BUDGET_METHODS else None
    assert [recipe.budget.start_from for recipe in recipes] == [None, start]


@pytest.mark.parametrize("method", GATE_METHODS)
@pytest.mark.parametrize(
    "budgets", [{"macs": None, "speedup": "2,4"}, {"macs": None, "latency": "9ms,5ms"}, {"latency": "9ms"}]
)
def test_gates_have_no_budget_of_time(method: str, budgets: dict[str, Any]) -> None:
    compared = ladders("reconstruct", method, **budgets, distill=True, minutes=6, parameters="70%")
    gates = compared[method]
    assert all(recipe.learns_units and not recipe.budget.is_timed for recipe in gates)
    names = [rung.output.out.name for rung in compared["reconstruct"]]
    assert [recipe.output.out for recipe in gates] == [Path("out", method, name) for name in names]
    assert [recipe.distillation.minutes for recipe in gates] == [3, 3]
    assert [recipe.budget.parameters for recipe in gates] == [0.7, 0.7]


def test_gates_with_a_number_of_heads_meet_budgets_of_time() -> None:
    gates = ladders("dsp", "ste", macs=None, speedup="2,4", keep=4)["ste"]
    assert [recipe.budget.speedup for recipe in gates] == [2, 4]


@pytest.mark.parametrize(
    ("methods", "flags", "code"),
    [
        (("reconstruct", "dsp"), {"macs": None, "speedup": "2,4", "group_by": "query"}, ErrorCode.CONTRADICTION),
        *((("reconstruct", method), {}, ErrorCode.MISSING_VALUE) for method in SEARCH_METHODS),
        (("reconstruct", "fisher"), {"macs": "90%"}, ErrorCode.CONTRADICTION),
        (("reconstruct", "fishers"), {}, ErrorCode.UNKNOWN_NAME),
        ((), {}, ErrorCode.UNKNOWN_NAME),
    ],
)
def test_methods_that_cannot_be_compared_are_refused(
    methods: tuple[str, ...], flags: dict[str, Any], code: ErrorCode
) -> None:
    with fails_with(code, UsageError, field="methods"):
        ladders(*methods, **flags)


def test_gates_keep_the_multiply_accumulates_of_rungs_by_time(runs: Runs) -> None:
    runs.kept = {f"reconstruct/{name}": kept for name, kept in zip(SPEEDUPS, (0.5, 0.3, 0.125), strict=True)}
    frontiers = climb_by_time(runs)
    assert runs.take() == [f"{method}/{name}" for method in ("reconstruct", "dsp", "fisher") for name in SPEEDUPS]
    for rung in frontiers["reconstruct"].rungs:
        gate, fisher = (runs.recipes[f"{method}/{rung.name}"].budget for method in ("dsp", "fisher"))
        assert (gate.macs, gate.speedup, fisher.macs) == (rung.macs, None, None)
    assert climb_by_time(runs) == frontiers
    assert runs.take() == []


@pytest.mark.parametrize("counted", [0, 1, 2])
def test_gates_end_where_the_first_method_does(runs: Runs, counted: int) -> None:
    runs.kept = {f"reconstruct/{name}": 0.5 for name in SPEEDUPS[:counted]}
    runs.errors["reconstruct/speedup-8"] = BudgetError("8 > 6", code=ErrorCode.BUDGET_UNREACHABLE)
    frontiers = climb_by_time(runs)
    assert [rung.name for rung in frontiers["dsp"].rungs] == SPEEDUPS[:counted]
    assert SPEEDUPS[counted] in str(frontiers["dsp"].ended)
    assert [rung.name for rung in frontiers["fisher"].rungs] == SPEEDUPS


@pytest.mark.parametrize(
    "error",
    [
        BudgetError("1% < 2%", code=ErrorCode.BUDGET_UNREACHABLE),
        DivergedError("NaN", code=ErrorCode.NOT_FINITE),
        SiteRefusedError("Conv", code=ErrorCode.SITE_REFUSED),
        GraphPassError("Conv", code=GraphErrorCode.UNSPECIFIED),
    ],
)
@pytest.mark.parametrize("number", [0, 2])
def test_a_further_method_that_fails_ends_its_rungs_only(
    runs: Runs, error: CompressorError | GraphPassError, number: int
) -> None:
    runs.errors[f"fisher/{NAMES[number]}"] = error
    for _ in range(2):
        frontiers = climb(runs, "reconstruct", "fisher", "magnitude")
        reached = {method: [rung.name for rung in frontier.rungs] for method, frontier in frontiers.items()}
        assert reached == {"reconstruct": NAMES, "fisher": NAMES[:number], "magnitude": NAMES}
        assert all(part in str(frontiers["fisher"].ended) for part in (NAMES[number], str(error)))
        assert str(error) in comparison(frontiers)


def test_a_first_method_that_fails_is_an_error(runs: Runs) -> None:
    runs.errors[f"reconstruct/{NAMES[1]}"] = DivergedError("NaN", code=ErrorCode.NOT_FINITE)
    with pytest.raises(DivergedError):
        climb(runs, "reconstruct", "fisher")
    assert runs.take() == [f"reconstruct/{NAMES[0]}"]


def test_the_command_prints_and_writes_a_row_for_each_rung(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.losses = {f"fisher/{NAMES[2]}": 0.05}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags_of(runs, max_drop=0.02).items()]
    arguments = [str(runs.out.parent / "model"), *words, "--methods", "reconstruct,fisher"]
    with pytest.raises(SystemExit) as ended:
        main(arguments, compare, NAME)
    assert not ended.value.code
    lines = capsys.readouterr().out.strip().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in cells[2:]] == [
        f"{method}/{name}" for method in ("reconstruct", "fisher") for name in NAMES
    ]
    assert [row[-1] for row in cells[2:]] == [*["yes"] * 5, "no"]
    assert "\n".join(lines) in (runs.out / TABLE).read_text()
