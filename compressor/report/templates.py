"""Pages that need nothing but themselves, in one frame: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import jinja2


def environment(package: str) -> jinja2.Environment:
    """Templates of `compressor.<package>`, which extend `frame.html`; what they fill in is escaped."""
    folders = [jinja2.PackageLoader("compressor", folder) for folder in dict.fromkeys((package, "report"))]
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(folders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
