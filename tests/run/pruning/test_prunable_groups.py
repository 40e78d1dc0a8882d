"""The groups that a budget may remove."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from compressor.errors import ErrorCode, SiteRefusedError
from compressor.run.pruning.prunable_groups import prunable_groups
from compressor.units import PrunableGroup, Site
from tests.faults import fails_with


def test_a_model_whose_rows_come_after_positions_is_refused() -> None:
    sites = (Site("a", "bidirectional", 4, 4, 8), Site("b", "bidirectional", 4, 4, 8, batch_axis=1))
    model: Any = SimpleNamespace(sites=sites, folder=SimpleNamespace(family="xlnet"))
    recipe: Any = None
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, family="xlnet"):
        prunable_groups(recipe, model, ())


@pytest.mark.parametrize(
    ("bundle", "parts", "kept", "allowed"),
    [
        (1, 1, (0, 3, 5), True),
        (4, 1, (), True),
        (4, 1, (4, 5, 6, 7), True),
        (4, 1, (0, 1), False),
        (4, 1, (0, 1, 2, 4), False),
        (1, 2, (0, 3, 5, 6), True),
        (1, 2, (0, 1, 2, 3), False),
        (1, 2, (0, 1, 5), False),
    ],
)
def test_units_are_kept_by_whole_bundles_and_equally_in_all_parts(
    bundle: int, parts: int, kept: tuple[int, ...], allowed: bool
) -> None:
    group = PrunableGroup("a", "heads", 8, 4, max(bundle, parts), "a", bundle=bundle, parts=parts)
    assert group.can_keep(kept) is allowed
