"""The compiled kernel has every property of the function that it replaces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph_passes.block_sparse.cases import (
    check_causality,
    check_longer_inputs_are_refused,
    check_masked_attention,
    check_rows_without_a_key,
    check_whole_heads,
)
from tests.targets.kernels import compiled


@pytest.fixture(scope="module")
def library() -> Path:
    return compiled()


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_equals_masked_attention(library: Path, data: st.DataObject) -> None:
    check_masked_attention(library, data)


def test_rows_without_a_key_are_zero(library: Path) -> None:
    check_rows_without_a_key(library)


def test_later_keys_never_reach_earlier_queries(library: Path) -> None:
    check_causality(library)


def test_inputs_longer_than_the_mask_are_refused(library: Path) -> None:
    check_longer_inputs_are_refused(library)


@pytest.mark.parametrize("causal", [False, True])
def test_a_head_that_keeps_every_block_is_dense(library: Path, causal: bool) -> None:
    check_whole_heads(library, causal=causal)
