"""The sizes at which budgets hold, and about how many units they leave."""

from __future__ import annotations

from typing import Any, cast

import pytest

from compressor.config.sections import MeasureConfig
from compressor.config.steps import Units
from compressor.errors import UsageError
from compressor.results import Candidate
from compressor.run.steps.units import share_left, timed_sizes


def test_engines_are_timed_at_about_the_size_that_a_budget_leaves() -> None:
    times = {"batch 1, length 128": 4.0, "batch 8, length 128": 4.0}
    fastest = Candidate(target="a", precision="fp32", speed=3.0, milliseconds=times)
    for fields, share in (
        ({"macs": 0.1}, 0.1),
        ({"macs": 0.5, "parameters": 0.25}, 0.25),
        ({"speedup": 6.0}, 0.5),
        ({"speedup": 2.0}, 1.0),
        ({"latency": "1ms"}, 0.25),
        ({"max_drop": 0.01}, 0.5),
    ):
        lossy = fastest.model_copy(update={"speed": 9.0, "holds": False})
        assert share_left(Units(**cast(Any, fields)), [fastest, lossy]) == pytest.approx(share)


@pytest.mark.parametrize("fields", [{"cache": 0.5}, {"ttft": "7ms"}, {"speedup": 2}])
def test_some_share_is_left_where_no_engine_that_was_timed_bounds_it(fields: dict[str, Any]) -> None:
    """Budgets of caches bound no call of whole texts, and none may hold that was timed."""
    assert 0 < share_left(Units(**cast(Any, fields)), []) < 1


def test_a_size_that_is_not_timed_has_no_budget() -> None:
    measure = MeasureConfig()
    with pytest.raises(UsageError) as error:
        timed_sizes(Units(speedup=2, budget_at="4x128"), measure, [128])
    assert error.value.details["field"] == "budget_at"
    assert timed_sizes(Units(speedup=2, budget_at="1x128"), measure, [128]) == [(1, 128)]
    assert timed_sizes(Units(speedup=2), measure, [128]) == [(1, 128), (8, 128)]
