"""The heads that compete, and how many of them are kept."""

from __future__ import annotations

import pytest

from compressor.errors import ErrorCode, UsageError
from compressor.selection.options import heads_to_keep, pool_of
from compressor.units import Site
from tests.faults import fails_with

SITES = [Site("a", "causal", 4, 4, 4), Site("b", "cross", 4, 4, 4)]


@pytest.mark.parametrize("pool", ["model", "kind"])
def test_all_sites_compete_in_one_pool_or_in_several(pool: str) -> None:
    assert pool_of(SITES, {"pool": pool}) == pool_of(SITES, {}) == SITES


def test_the_sites_of_a_kind_compete() -> None:
    assert pool_of(SITES, {"pool": "cross"}) == SITES[1:]


def test_a_kind_that_the_model_lacks_is_refused() -> None:
    with fails_with(
        ErrorCode.UNSUPPORTED_MODEL, UsageError, field="pool", value="bidirectional", choices=("causal", "cross")
    ):
        pool_of(SITES, {"pool": "bidirectional"})


@pytest.mark.parametrize(
    ("keep", "count"), [(0, 0), (8, 8), ("3", 3), ("50%", 4), ("0%", 0), ("100%", 8), (" 30% ", 2), ("44%", 4)]
)
def test_the_number_of_heads_is_a_count_or_a_share(keep: int | str, count: int) -> None:
    assert heads_to_keep(keep, 8) == count


@pytest.mark.parametrize(
    ("keep", "code"),
    [
        (9, ErrorCode.OUT_OF_RANGE),
        (-1, ErrorCode.OUT_OF_RANGE),
        ("150%", ErrorCode.OUT_OF_RANGE),
        ("half", ErrorCode.INVALID_VALUE),
        ("inf%", ErrorCode.INVALID_VALUE),
    ],
)
def test_an_invalid_number_of_heads_is_refused(keep: int | str, code: ErrorCode) -> None:
    with fails_with(code, UsageError, field="keep", value=keep):
        heads_to_keep(keep, 8)
