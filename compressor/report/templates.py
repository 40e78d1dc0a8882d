"""The jinja environment of self-contained HTML pages, which share one frame."""

from __future__ import annotations

import jinja2


def environment(package: str) -> jinja2.Environment:
    """The templates of `compressor.<package>`, which extend `frame.html`; every value is escaped."""
    folders = [jinja2.PackageLoader("compressor", folder) for folder in dict.fromkeys((package, "report"))]
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(folders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
