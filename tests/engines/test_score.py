"""Engines are scored in comparison with the dense engine, which runs once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from compressor.engines.build import Variant
from compressor.engines.score import EvaluationScorer, score
from compressor.errors import DivergedError, ErrorCode
from compressor.model_folder import load
from compressor.progress import NullListener, RunLog
from compressor.tasks import open_data
from tests import folders
from tests.faults import fails_with
from tests.tasks.rows import tsv

LABELS = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1]


class ListEngine:
    """Gives each row, whose text is its number, the answer of a list."""

    def __init__(self, answers: list[int]) -> None:
        self._answers, self.rows = np.eye(2, dtype=np.float32)[answers], 0

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        start, self.rows = self.rows, self.rows + len(feeds["input_ids"])
        return {"logits": self._answers[start : self.rows]}

    def generator(self, model: Any) -> None:
        """None: it generates nothing."""


def variant(answers: list[int]) -> Variant:
    return cast(Variant, SimpleNamespace(name="any", engine=ListEngine(answers), graph=SimpleNamespace(path=Path())))


@pytest.mark.parametrize(("max_drop", "holds"), [(0.05, False), (0.3, True)])
def test_the_dense_engine_is_scored_once(max_drop: float, *, holds: bool, tmp_path: Path) -> None:
    folder = load(folders.save(folders.bert(), tmp_path / "model"))
    file = tsv(tmp_path / "rows.tsv", *(f"{label}\tword" for label in LABELS))  # of equal lengths: the order is kept
    data = open_data(folders.rows_config(file, file, file), folder)
    dense, wrong_once = variant(LABELS), [1 - LABELS[0], *LABELS[1:]]
    scorer = EvaluationScorer(dense, data, RunLog(NullListener()), seed=0, batch_size=1, max_drop=max_drop)
    measured = [scorer.measure(variant(wrong_once), label) for label in ("first", "second")]
    facts: list[dict[str, Any]] = [scorer.compare(scored) for scored in measured]
    assert cast(ListEngine, dense.engine).rows == len(LABELS)
    assert facts[0] == facts[1]
    assert (facts[0]["metric"], facts[0]["agreement"]) == (pytest.approx(0.9), pytest.approx(0.9))
    assert (facts[0]["difference"], facts[0]["holds"]) == (pytest.approx(-0.1), holds)
    (scored,) = scorer.scores(variant(wrong_once), measured[0])
    assert (scored.split, scored.rows) == ("eval", len(LABELS))
    assert (scored.compressed, scored.loss) == (pytest.approx(0.9), pytest.approx(0.1))
    assert scored.low <= scored.difference <= scored.high


def test_the_interval_is_that_of_more_rows_than_engines_are_compared_on(tmp_path: Path) -> None:
    folder, count = load(folders.save(folders.bert(), tmp_path / "model")), 2_001
    rows = (f"{number % 2}\tword" for number in range(count))
    eval_file, file = tsv(tmp_path / "eval.tsv", *rows), tsv(tmp_path / "rows.tsv", "0\tword", "1\tword")
    data = open_data(folders.rows_config(file, eval_file, file), folder)
    dense, engine = (variant([number % 2] * 2 * count) for number in range(2))
    scorer = EvaluationScorer(dense, data, RunLog(NullListener()), seed=0, batch_size=1, max_drop=0.1)
    measured = scorer.measure(engine, "first")
    assert measured is not None
    (scored,) = scorer.scores(engine, measured)
    assert (len(measured.sums), scored.rows) == (2_000, count)
    assert (scored.dense, scored.compressed) == (pytest.approx(1001 / count), pytest.approx(1000 / count))


@pytest.mark.parametrize("has_labels", [True, False])
def test_rows_without_labels_have_no_score(tmp_path: Path, *, has_labels: bool) -> None:
    folder, file = load(folders.save(folders.bert(), tmp_path / "model")), tsv(tmp_path / "rows.tsv", "0\ta", "1\tb")
    data = replace(open_data(folders.rows_config(file, file, file), folder), scores_eval=has_labels)
    dense, engine = variant([0, 1]), variant([0, 1])
    scorer = EvaluationScorer(dense, data, RunLog(NullListener()), seed=0, batch_size=1, max_drop=0.1)
    assert len(scorer.scores(engine)) == has_labels
    assert cast(ListEngine, engine.engine).rows == (2 if has_labels else 0)


@pytest.mark.parametrize("compares", [True, False])
def test_rows_without_labels_have_equal_answers(tmp_path: Path, *, compares: bool) -> None:
    fields: dict[str, Any] = {} if compares else {"num_labels": 1}
    folder = load(folders.save(folders.bert(**fields), tmp_path / "model"))
    file = tsv(tmp_path / "rows.tsv", *(f"{label}\tword" for label in LABELS))
    data = replace(open_data(folders.rows_config(file, file, file), folder), scores_eval=False)
    engine = variant([1 - LABELS[0], 1 - LABELS[1], *LABELS[2:]])
    scorer = EvaluationScorer(variant(LABELS), data, RunLog(NullListener()), seed=0, batch_size=1)
    facts: dict[str, Any] = scorer.compare(scorer.measure(engine, "first"))
    assert facts == ({"agreement": pytest.approx(0.8)} if compares else {})
    assert cast(ListEngine, engine.engine).rows == (len(LABELS) if compares else 0), "nothing runs in vain"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_is_refused(value: float) -> None:
    task: Any = SimpleNamespace(metric="f1", score=lambda sums: value if sums.sum() else 0.5)
    with fails_with(ErrorCode.NOT_FINITE, DivergedError, quantity="f1"):
        score(np.zeros((4, 1)), np.ones((4, 1)), task, "test", rows=4, seed=0)
