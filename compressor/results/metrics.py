"""The task's metric, and what is logged while learning."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

from pydantic import model_validator

from compressor.results.rows import Row


class CurvePoint(Row):
    """The values logged at one step of learning, e.g. `loss`, `temperature`, `eval_accuracy`."""

    step: int
    values: dict[str, float]


class MetricUnit(StrEnum):
    """The unit in which a metric's values are shown."""

    POINTS = "points"
    """A share of one, shown in hundredths: 0.861 as 86.1, differences in points."""
    RAW = "raw"
    """Shown as computed: a correlation, a loss, BLEU."""

    @property
    def scale(self) -> float:
        """The factor from a computed value to the one shown."""
        return 100.0 if self is MetricUnit.POINTS else 1.0


_ROUNDING = 1e-12
"""Rounding error of a difference of two metrics."""
_SHARES = frozenset({"accuracy", "balanced_accuracy", "exact-match", "f1", "macro_f1", "precision", "recall"})
"""Metrics in points in reports that do not hold the unit."""


def is_within(loss: float, allowed: float) -> bool:
    """Whether a loss of the metric is at most the allowed one, up to the rounding of floats: 0.9 - 0.89 is 0.01."""
    return loss <= allowed + _ROUNDING


def loss_of(difference: float, *, higher_is_better: bool) -> float:
    """What a metric loses by a difference, compressed minus dense; negative if it gains."""
    return -difference if higher_is_better else difference


class Score(Row):
    """The task's metric on the dense and the compressed engine, with a paired bootstrap interval of the difference.

    `difference` is compressed minus dense, as computed and not scaled to `unit`; `low` and `high` are the bounds of its
    interval at `confidence`.
    """

    metric: str
    split: Literal["eval", "test"]
    rows: int
    dense: float
    compressed: float
    difference: float
    low: float
    high: float
    confidence: float = 0.95
    higher_is_better: bool = True
    unit: MetricUnit = MetricUnit.RAW

    @property
    def split_name(self) -> str:
        """The split for readers: `evaluation` or `test`."""
        return "evaluation" if self.split == "eval" else self.split

    @property
    def loss(self) -> float:
        """What the compressed engine loses of the metric, as computed; negative if it gains."""
        return loss_of(self.difference, higher_is_better=self.higher_is_better)

    @property
    def worst_loss(self) -> float:
        """The upper end of the interval of the loss."""
        return -self.low if self.higher_is_better else self.high

    @model_validator(mode="before")
    @classmethod
    def _add_unit(cls, fields: Any) -> Any:
        """Derive the unit, which version 0.1 did not store, from the metric's name."""
        if not isinstance(fields, dict) or "unit" in fields:
            return fields
        return {**fields, "unit": MetricUnit.POINTS if fields.get("metric") in _SHARES else MetricUnit.RAW}


def headline_scores(scores: Sequence[Score]) -> list[Score]:
    """The scores to quote: those on test rows, which no choice was based on, else those on evaluation rows."""
    return _of_split(scores, "test") or list(scores)


def deciding_scores(scores: Sequence[Score]) -> list[Score]:
    """The scores that choices are based on: those on evaluation rows, else those on test rows."""
    return _of_split(scores, "eval") or list(scores)


def keeps_metric(scores: Sequence[Score], max_drop: float) -> bool:
    """Whether the metric that is quoted falls by at most `max_drop`, in its own unit."""
    return all(is_within(score.loss, max_drop) for score in headline_scores(scores))


def _of_split(scores: Sequence[Score], split: Literal["eval", "test"]) -> list[Score]:
    return [score for score in scores if score.split == split]
