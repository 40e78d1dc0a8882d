"""The source of the project as syntax trees, which tests of the source share."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, which must not be changed."""
    return ast.parse(path.read_text(encoding="utf-8"))
