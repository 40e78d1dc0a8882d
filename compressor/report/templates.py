"""The jinja environment of self-contained HTML pages, which share one frame."""

from __future__ import annotations

import jinja2


def environment() -> jinja2.Environment:
    """The templates of the pages, which extend `frame.html`; every value is escaped."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("compressor", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
