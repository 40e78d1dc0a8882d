"""The groups that a budget may remove."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from compressor.errors import ErrorCode, SiteRefusedError
from compressor.run.pruning.budget_run import BudgetRun
from compressor.run.pruning.prunable_groups import prunable_groups
from compressor.units import Site
from tests.faults import fails_with


def test_a_model_whose_rows_come_after_positions_is_refused() -> None:
    sites = (Site("a", "bidirectional", 4, 4, 8), Site("b", "bidirectional", 4, 4, 8, batch_axis=1))
    run = SimpleNamespace(model=SimpleNamespace(sites=sites, folder=SimpleNamespace(family="xlnet")))
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, family="xlnet"):
        prunable_groups(cast(BudgetRun, run))
