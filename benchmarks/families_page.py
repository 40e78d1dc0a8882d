"""The page of the families: counts of the outcomes, and one line for each family."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from pathlib import Path

import transformers

from benchmarks.families_law import Outcome, Row

PAGE = Path(__file__).parents[1] / "docs" / "families.md"

_INTRODUCTION = """# Families

Every model type of transformers {version}, built tiny with random weights, exported, cut to half of its heads and neurons by
a random plan, and compared with the gated PyTorch model at two batch sizes and lengths (relative error at most 1e-4) on ONNX
Runtime, and on OpenVINO. `make families` writes this page.
"""


def write_page(rows: Sequence[Row]) -> None:
    """Write the page of all rows."""
    counts = collections.Counter(row.outcome for row in rows)
    lines = [_INTRODUCTION.format(version=transformers.__version__), "| outcome | families |", "| --- | --- |"]
    lines += [f"| {outcome} | {counts[outcome]} |" for outcome in Outcome]
    for outcome in Outcome:
        lines += ["", f"## {outcome.capitalize()}", "", *_table(row for row in rows if row.outcome == outcome)]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(rows: Iterable[Row]) -> list[str]:
    lines = ["| family | model | sites | neurons | parameters left | ONNX Runtime | OpenVINO | reason |", "|" + " --- |" * 8]
    for row in rows:
        before, after = row.parameters
        left = f"{after / before:.0%}" if before else ""
        cells = (row.family, row.model, row.heads, row.neurons, left, _error(row.error), _error(row.openvino), row.reason)
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return lines


def _error(value: float | str | None) -> str:
    return f"{value:.0e}" if isinstance(value, float) else value or ""
