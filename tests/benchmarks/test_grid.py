"""The table of the grid of methods, from the stored cells of a study."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.grid import table
from benchmarks.studies.cell_store import read_results


def test_the_table_has_a_row_for_each_method_and_number_of_heads(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    for method, heads, answers in (("dense", 72, [[1, 1], [0, 0]]), ("dsp", 36, [[1, 1], [1, 0]])):
        settings = {"method": method, "seed": 1}
        test = sum(predicted == label for predicted, label in answers) / 2
        cell = {"settings": settings, "heads": heads, "eval": 0.5, "test": test, "answers": answers}
        (tmp_path / "cells" / f"{method}.json").write_text(json.dumps(cell))
    lines = table(read_results(tmp_path)).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| dense | 72 | 1 | 50.00 | 100.00 | 100.0 |")
    assert lines[3].startswith("| dsp | 36 | 1 | 50.00 | 50.00 | 50.0 | -50.00 (")
