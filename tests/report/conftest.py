"""Pages share their figures: equal numbers are drawn once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from markupsafe import Markup

from compressor.report import figures


@pytest.fixture(scope="session", autouse=True)
def _figures() -> Iterator[None]:
    """Figures of the page, whose drawing takes most of its time; `__wrapped__` draws again."""
    drawn: dict[str, Markup] = {}

    def once(draw: Callable[..., Markup]) -> Callable[..., Markup]:
        @functools.wraps(draw)
        def figure(*values: Any) -> Markup:
            key = f"{draw.__name__} {values!r}"
            if key not in drawn:
                drawn[key] = draw(*values)
            return drawn[key]

        return figure

    with pytest.MonkeyPatch.context() as patch:
        for name in ("ratios", "latencies", "curve"):
            patch.setattr(figures, name, once(getattr(figures, name)))
        yield
