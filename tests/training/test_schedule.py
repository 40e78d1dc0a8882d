"""The learning rate over the steps, and the ranges of a schedule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import ErrorCode, UsageError
from tests import language
from tests.faults import fails_with


@settings(max_examples=100, deadline=None)
@given(
    steps=st.integers(1, 300),
    warmup=st.floats(0, 1),
    scheduler=st.sampled_from(["linear", "cosine"]),
    final=st.floats(0, 1),
)
def test_the_rate_rises_to_its_peak_and_falls_to_its_end(
    steps: int, warmup: float, scheduler: Any, final: float
) -> None:
    schedule = language.schedule(
        steps=steps, warmup=warmup, scheduler=scheduler, learning_rate=2.0, final_learning_rate=2.0 * final
    )
    rise = round(warmup * steps)
    paces = [schedule.pace(step) for step in range(steps + 1)]
    assert paces[:rise] == pytest.approx([step / max(1, rise) for step in range(rise)])
    assert paces[rise:] == sorted(paces[rise:], reverse=True)
    assert paces[-1] == pytest.approx(final) or rise == steps
    assert rise == steps or paces[rise] == pytest.approx(1.0)


def test_in_the_middle_of_the_decrease_the_rate_is_the_mean_of_its_ends() -> None:
    assert language.schedule(steps=100, warmup=0.0).pace(50) == pytest.approx((1 + 0.01) / 2)
    assert language.schedule(steps=100, warmup=0.5, scheduler="linear", final_learning_rate=0.0).pace(75) == 0.5


@pytest.mark.parametrize("rate", [1.0, -1e-3])
def test_a_final_learning_rate_out_of_range_is_refused(rate: float) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field="final_learning_rate", value=rate):
        language.schedule(final_learning_rate=rate)
