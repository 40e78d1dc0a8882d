"""Runs share fusions."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _exports(shared_exports: None) -> None:
    """Runs share exports."""
