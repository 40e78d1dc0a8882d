"""The score of a run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compressor.errors import DivergedError, ErrorCode
from compressor.run.evaluate import score
from tests.faults import fails_with


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_is_refused(value: float) -> None:
    task: Any = SimpleNamespace(metric="f1", score=lambda statistics: value if statistics.sum() else 0.5)
    with fails_with(ErrorCode.NOT_FINITE, DivergedError, quantity="f1"):
        score(np.zeros((4, 1)), np.ones((4, 1)), task, "test", rows=4, seed=0)
