"""Self-contained pages in one frame: no scripts, no fonts, no external pictures."""

from __future__ import annotations

import jinja2


def environment(package: str) -> jinja2.Environment:
    """Templates of `compressor.<package>`, which extend `frame.html`; every value is escaped."""
    folders = [jinja2.PackageLoader("compressor", folder) for folder in dict.fromkeys((package, "report"))]
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(folders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
