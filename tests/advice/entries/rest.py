"""Advice of the remaining modules: see `tests.advice.world`."""

from __future__ import annotations

from tests.advice.world import World, advice
