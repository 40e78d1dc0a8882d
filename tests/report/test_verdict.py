"""The verdict: its warnings by code, the worst first, its tone, and the numbers that it quotes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from compressor.report.verdict import Tone, VerdictWarning, tone, warnings_of
from compressor.results import BudgetRow, DropStatus, MissingTarget, Refusal, Report
from tests.report import examples, reports

W = VerdictWarning


def codes(report: Report) -> list[VerdictWarning]:
    return list(warnings_of(report))


@pytest.mark.parametrize(
    ("name", "expected", "expected_tone"),
    [
        ("won", [], "good"),
        ("nothing learned", [W.NOTHING_LEARNED], "mixed"),
        ("not faster", [W.NOT_FASTER], "mixed"),
        ("metric fell", [W.METRIC_FELL], "bad"),
        ("numbers differ", [W.NUMBERS_DIFFER], "bad"),
        ("bare", [W.NOT_TIMED, W.NOT_PROVEN], "mixed"),
    ],
)
def test_the_outcome_of_a_run_is_a_list_of_warnings_and_a_tone(
    name: str, expected: list[VerdictWarning], expected_tone: Tone
) -> None:
    report = examples.REPORTS[name]()
    assert codes(report) == expected
    assert tone(report) == expected_tone


@pytest.mark.parametrize("name", examples.REPORTS)
def test_a_verdict_is_one_sentence_that_begins_with_the_warnings(name: str) -> None:
    report = examples.REPORTS[name]()
    text = ", ".join(warnings_of(report).values())
    assert report.verdict.lower().startswith(f"{text.lower()}: " if text else "")
    assert report.verdict[0] == report.verdict[0].upper()
    assert report.verdict.endswith(".")
    assert ". " not in report.verdict


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"speeds": (reports.speed(1, 128, 4.0, 6.0),)}, [W.SLOWER]),
        (
            {"speeds": (reports.speed(1, 128, 6.0, 4.0), reports.speed(8, 128, 6.0, 6.0))},
            [W.FASTER_AT_SOME_SIZES],
        ),
        ({"speeds": (reports.speed(1, 128, 6.0, 4.0, void="6 fused, 3 fused"),)}, [W.SPEED_VOID]),
        ({"speeds": ()}, [W.NOT_TIMED]),
        ({"proofs": ()}, [W.NOT_PROVEN]),
        ({"proofs": reports.proofs(math.nan)}, [W.NUMBERS_DIFFER]),
        (
            {"drop_status": DropStatus.FAILED, "proofs": reports.proofs(1.0), "speeds": ()},
            [W.NUMBERS_DIFFER, W.METRIC_FELL, W.NOT_TIMED],
        ),
        ({"drop_status": DropStatus.FAILED}, [W.METRIC_FELL]),
        ({"scores": ()}, []),
        ({"refused": (Refusal(what="a", why="b"),)}, []),
        ({"plan": reports.dense(reports.bert_plan()).model_copy(update={"method": "dsp"})}, [W.NOTHING_DROPPED]),
        ({"missing": MissingTarget(target="trt", reason="no GPU")}, [W.TARGET_MISSING]),
    ],
)
def test_warnings_follow_from_the_fields_of_the_report(fields: dict[str, Any], expected: list[VerdictWarning]) -> None:
    report = reports.report(**fields)
    assert codes(report) == expected
    assert tone(report) in (("mixed", "bad") if expected or report.refused else ("good",))


@pytest.mark.parametrize(
    ("fields", "quoted"),
    [
        ({"speeds": (reports.speed(1, 128, 6.0, 4.0, void="6 fused, 3 fused"),)}, ["6 fused, 3 fused"]),
        ({"speeds": (reports.speed(1, 128, 6.0, 4.0), reports.speed(8, 128, 6.0, 6.0))}, ["1 of 2"]),
        ({"proofs": reports.proofs(math.nan)}, ["0.0001", "1 of 6"]),
        ({"drop_status": DropStatus.FAILED}, ["--max-drop 0.02"]),
    ],
)
def test_a_verdict_quotes_what_went_wrong(fields: dict[str, Any], quoted: list[str]) -> None:
    assert all(text in reports.report(**fields).verdict for text in quoted)


def test_a_verdict_quotes_units_parameters_speeds_metrics_and_proofs() -> None:
    heads, parameters = ("36 of 72 heads",), ("7.8%", "22.7M", "20.9M")
    speeds = ("1.31×", "1.28 to 1.34", "1.36×", "1.33 to 1.39", "batch 1, length 128", "batch 8, length 128")
    metric, proofs = ("91.5", "90.9", "−0.6 points", "−1.6 to +0.4"), ("all 6 proofs",)
    text = reports.report().verdict
    assert [number for number in (*heads, *parameters, *speeds, *metric, *proofs) if number not in text] == []


@pytest.mark.parametrize(
    ("met", "expected"), [((True,), []), ((False,), [W.BUDGET_MISSED]), ((True, False), [W.BUDGET_MISSED])]
)
def test_verdict_warns_of_a_missed_budget(met: tuple[bool, ...], expected: list[VerdictWarning]) -> None:
    budget = tuple(
        BudgetRow(label="whole model", unit="macs", requested=1.0, predicted=1.0, reached=2.0, dense=2.0, met=is_met)
        for is_met in met
    )
    report = reports.report(budget=budget)
    assert codes(report) == expected
    assert tone(report) == ("mixed" if expected else "good")
    assert ("1 of 2" in warnings_of(report).get(W.BUDGET_MISSED, "")) is (len(met) == 2)


@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({"speeds": ()}, "speed"),
        ({"proofs": ()}, "proof"),
        ({"speeds": (), "plan": reports.dense(reports.bert_plan())}, "speed"),
    ],
)
def test_verdict_says_once_what_was_not_measured(fields: dict[str, Any], subject: str) -> None:
    assert reports.report(**fields).verdict.lower().count(subject) == 1


def test_verdict_quotes_the_test_rows_and_says_when_lower_is_better() -> None:
    text = examples.encoder_decoder().verdict
    assert all(number in text for number in ("18.2", "18.9", "+0.73", "+0.52 to +0.97", "lower is better"))
    assert "eval" not in reports.report().verdict
