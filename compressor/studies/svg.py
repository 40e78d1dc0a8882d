"""Figures of the studies as SVG: inside a page, and in files of their own."""

from __future__ import annotations

import re

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from compressor.report.figures import STYLE, inline

_FILE_COLOURS = {"dense": "#98a1ae", "compressed": "#0b7a75", "ink": "#1a1d21", "line": "#dcdfe4", "muted": "#59616c"}
"""The page's light colours, for a figure in a separate file."""


def styled(figure: Figure) -> Markup:
    """The figure as an inline `<svg>` that takes its colours from the page."""
    with matplotlib.rc_context(STYLE):
        return inline(figure)


def file_text(svg: str) -> str:
    """An inline `<svg>` as a self-contained file, on white."""
    text = re.sub(r"var\(--(\w+)\)", lambda name: _FILE_COLOURS[name[1]], svg)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    size = f'width="{box[1]}pt" height="{box[2]}pt" ' if box else ""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}font-family="sans-serif" style="background: #ffffff" '
    return '<?xml version="1.0" encoding="utf-8"?>\n' + text.replace("<svg ", head, 1) + "\n"
