"""Engines are scored in comparison with the dense engine, which runs once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from compressor.config.run import Recipe
from compressor.model_folder import load
from compressor.progress import NullListener
from compressor.run.engine_choice.evaluation_scorer import EvaluationScorer
from compressor.run.products import Variant
from compressor.run.run_log import RunLog
from compressor.tasks import open_data
from tests import folders
from tests.tasks.rows import tsv

LABELS = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1]


class ListEngine:
    """Gives each row, whose text is its number, the answer of a list."""

    def __init__(self, answers: list[int]) -> None:
        self._answers, self.rows = np.eye(2, dtype=np.float32)[answers], 0

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        start, self.rows = self.rows, self.rows + len(feeds["input_ids"])
        return {"logits": self._answers[start : self.rows]}


def variant(answers: list[int]) -> Variant:
    return cast(Variant, SimpleNamespace(name="any", engine=ListEngine(answers), graph=SimpleNamespace(path=Path())))


@pytest.mark.parametrize(("max_drop", "holds"), [(0.05, False), (0.3, True)])
def test_the_dense_engine_is_scored_once(max_drop: float, *, holds: bool, tmp_path: Path) -> None:
    folder = load(folders.save(folders.bert(), tmp_path / "model"))
    file = tsv(tmp_path / "rows.tsv", *(f"{label}\tword" for label in LABELS))  # of equal lengths: the order is kept
    data = open_data(folders.rows_config(file, file, file), folder)
    dense, wrong_once = variant(LABELS), [1 - LABELS[0], *LABELS[1:]]
    recipe = Recipe(data=file, model=tmp_path / "model", out=tmp_path / "out", max_drop=max_drop)
    scorer = EvaluationScorer(dense, data, recipe, RunLog(NullListener()))
    measured = [scorer.measure(variant(wrong_once), label) for label in ("first", "second")]
    facts: list[dict[str, Any]] = [scorer.compare(scored) for scored in measured]
    assert cast(ListEngine, dense.engine).rows == len(LABELS)
    assert facts[0] == facts[1]
    assert (facts[0]["metric"], facts[0]["agreement"]) == (pytest.approx(0.9), pytest.approx(0.9))
    assert (facts[0]["difference"], facts[0]["holds"]) == (pytest.approx(-0.1), holds)
    (score,) = scorer.scores(variant(wrong_once), measured[0])
    assert (score.split, score.rows) == ("eval", len(LABELS))
    assert (score.compressed, score.loss) == (pytest.approx(0.9), pytest.approx(0.1))
    assert score.low <= score.difference <= score.high
