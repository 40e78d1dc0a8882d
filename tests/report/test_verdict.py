"""The sentences of the verdict."""

from __future__ import annotations

import math
from typing import Any

import pytest

from compressor.report.verdict import tone
from compressor.results import BudgetRow, DropStatus, Refusal
from tests.report import examples, reports


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        (
            "won",
            "36 of 72 heads kept, 7.8% fewer parameters (22.7M → 20.9M); 1.31× as fast as dense at batch 1, length 128",
        ),
        ("nothing learned", "Nothing was learned: the engine is the model as it is, all 72 heads and the same 22.7M"),
        ("not faster", "Not faster: 58 of 72 heads kept"),
        ("metric fell", "The metric fell too far: accuracy on the test rows 91.5 → 87.1, −4.4 points"),
        ("numbers differ", "Numbers differ: reference graph = shrunk graph fails on the compressed model with"),
        ("bare", "Speed not measured, no proof was run: 0 of 1 heads kept"),
    ],
)
def test_verdict_opens_with_the_most_important_outcome(name: str, opening: str) -> None:
    assert examples.REPORTS[name]().verdict.startswith(opening)


def test_verdict_of_a_successful_run_is_one_sentence() -> None:
    assert reports.report().verdict == (
        "36 of 72 heads kept, 7.8% fewer parameters (22.7M → 20.9M); "
        "1.31× as fast as dense at batch 1, length 128 (95% interval 1.28 to 1.34) "
        "and 1.36× at batch 8, length 128 (95% interval 1.33 to 1.39); "
        "accuracy on the test rows 91.5 → 90.9, −0.6 points (95% interval −1.6 to +0.4); all 6 proofs hold."
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"speeds": (reports.speed(1, 128, 4.0, 6.0),)}, "Slower: "),
        (
            {"speeds": (reports.speed(1, 128, 6.0, 4.0), reports.speed(8, 128, 6.0, 6.0))},
            "Faster at 1 of 2 sizes only: ",
        ),
        ({"speeds": (reports.speed(1, 128, 6.0, 4.0, void="6 fused, 3 fused"),)}, "speed void (6 fused, 3 fused)"),
        ({"speeds": ()}, "Speed not measured: "),
        ({"proofs": ()}, "No proof was run: "),
        (
            {"proofs": reports.proofs(math.nan)},
            "relative error not a number where 0.0001 is allowed (1 of 6 proofs fail)",
        ),
        (
            {"drop_status": DropStatus.FAILED, "proofs": reports.proofs(1.0), "speeds": ()},
            "Numbers differ, the metric fell too far, speed not measured: ",
        ),
        ({"drop_status": DropStatus.FAILED}, "more than --max-drop 0.02 allows"),
        ({"scores": ()}, "no metric measured"),
        ({"refused": (Refusal(what="a", why="b"),)}, "one site was refused"),
        ({"plan": reports.dense(reports.bert_plan()).model_copy(update={"method": "dsp"})}, "Nothing was dropped: "),
    ],
)
def test_verdict_names_the_outcome(fields: dict[str, Any], text: str) -> None:
    assert text in reports.report(**fields).verdict


@pytest.mark.parametrize(
    ("met", "warning"),
    [
        ((True,), None),
        ((False,), "The budget was missed: 36 of 72 heads kept"),
        ((True, False), "1 of 2 budgets missed: 36 of 72 heads kept"),
    ],
)
def test_verdict_warns_of_a_missed_budget(met: tuple[bool, ...], warning: str | None) -> None:
    budget = tuple(
        BudgetRow(label="whole model", unit="macs", requested=1.0, predicted=1.0, reached=2.0, dense=2.0, met=is_met)
        for is_met in met
    )
    report = reports.report(budget=budget)
    assert tone(report) == ("good" if warning is None else "mixed")
    assert report.verdict.startswith(warning or "36 of 72 heads kept")


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
    assert "perplexity on the test rows 18.2 → 18.9, +0.73 (95% interval +0.52 to +0.97), lower is better" in text
    assert "eval" not in reports.report().verdict
