"""Indices are sets of positions in which None stands for all of them."""

from __future__ import annotations

import hypothesis
import numpy as np
from hypothesis import strategies as st

from graph_passes.flow.indices import Index, all_indices, is_partial, positions_of, same_index, simplify, union

SIZE = 5


def index_of(positions: set[int] | None) -> Index:
    return None if positions is None else np.array(sorted(positions), np.int64)


INDICES = st.none() | st.sets(st.integers(0, SIZE - 1))


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(first=INDICES, second=INDICES)
def test_indices_behave_like_sets_of_positions(first: set[int] | None, second: set[int] | None) -> None:
    sets = [set(range(SIZE)) if positions is None else positions for positions in (first, second)]
    indices = [index_of(positions) for positions in (first, second)]
    assert [set(positions_of(index, SIZE).tolist()) for index in indices] == sets
    assert set(positions_of(union(*indices), SIZE).tolist()) == sets[0] | sets[1]
    simplified = [simplify(index, SIZE) for index in indices]
    assert [index is None for index in simplified] == [positions == set(range(SIZE)) for positions in sets]
    assert same_index(*simplified) == (sets[0] == sets[1])


def test_an_order_other_than_ascending_is_not_the_whole_axis() -> None:
    assert simplify(np.arange(SIZE)[::-1], SIZE) is not None


def test_a_need_is_partial_if_one_axis_is() -> None:
    assert all_indices(2) == (None, None)
    assert not is_partial(all_indices(2))
    assert not is_partial(None)
    assert is_partial((None, np.array([0])))
