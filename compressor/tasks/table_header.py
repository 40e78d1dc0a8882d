"""Whether the first line of a table names its columns, or is a row itself."""

from __future__ import annotations

import math

import pyarrow as pa

_ROWS = 1000
"""Rows whose cells are compared with the names of their columns."""


def header_evidence(table: pa.Table) -> str | None:
    """Why the names of a table's columns are cells of a row, in a few words; None: they may be names.

    A name is a cell if it is among the cells of its own column, or a number; columns may be numbered from 0 or 1.
    """
    names = [str(name) for name in table.column_names]
    if any(names == [str(first + number) for number in range(len(names))] for first in (0, 1)):
        return None
    for name in names:
        if name in table.column(name)[:_ROWS].to_pylist():
            return f"{name!r:.40} is also a value of its column"
    number = next((name for name in names if _is_number(name)), None)
    return None if number is None else f"{number!r} is a number"


def proposed_names(table: pa.Table) -> list[str]:
    """Names for the columns of a table without names: `text` for most words, `label` for the fewest values."""
    columns = {name: [name, *table.column(name)[:_ROWS].to_pylist()] for name in table.column_names}
    longest = max(columns, key=lambda name: sum(len(cell.split()) for cell in columns[name]))
    others = [name for name in columns if name != longest]
    label = min(others, key=lambda name: len(set(columns[name])), default=None)
    usual = {longest: "text", label: "label"}
    return [usual.get(name, f"column {number}") for number, name in enumerate(table.column_names, 1)]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text.replace(",", ".")))
    except ValueError:
        return False
