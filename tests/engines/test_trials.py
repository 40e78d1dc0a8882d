"""The number of products that return to floats is searched in few attempts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from compressor.engines.trials import smallest_that_holds


@given(st.integers(0, 40), st.integers(1, 50))
def test_the_fewest_that_hold_are_searched_in_few_attempts(maximum: int, smallest: int) -> None:
    attempted: list[int] = []

    def attempt(count: int) -> int:
        attempted.append(count)
        return count

    outcome = smallest_that_holds(maximum, attempt, lambda count: count >= smallest)
    assert outcome == (smallest if smallest <= maximum else None)
    assert all(1 <= count <= maximum for count in attempted)
    assert len(attempted) <= maximum.bit_length()
