"""The page of the families: counts of the outcomes, and one line for each family."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import transformers

from benchmarks.families_law import Outcome, Row
from benchmarks.families_tiny import Form

_INTRODUCTION = """# Families

What `compress` does to every model type of transformers {version}. Each is built tiny with random weights, exported,
and cut by a plan that keeps a random half of its heads and neurons. The exported graph is compared with the gated
PyTorch model, a fresh copy for each input, and the shrunk graph with the exported one, on ONNX Runtime, and on
OpenVINO; a relative error of at most 1e-4 holds. Rows have 4 to 90 tokens, and up to twice the length at which a family
computes attention in another way (a window, sparse blocks, longer factors of rotary positions), with padding on the
right and on the left; in some inputs there are as many rows and positions as heads. Images have one size.

A family is swept in each form that it has: with its **usual** head, **bare**, with a head that is **pooled** (a
classifier of texts, images or sounds), and with a head for each position (**tokens**: labels of tokens, answers to
questions).
`make families` runs the sweep and writes this page ([benchmarks/families.py](../benchmarks/families.py)).

Where a tiny model cannot be made by general rules, or needs inputs that cannot be made up, the family was not judged:
give `compress` a real folder, and inputs by `--example-inputs FILE.npz`.
"""

_MEANINGS = {
    Outcome.HOLDS: "every group of heads and neurons was cut, and the numbers are equal",
    Outcome.IN_PART: "some groups were cut, others are refused by name, and the numbers are equal",
    Outcome.REFUSED: "nothing was cut; an error says why",
    Outcome.NOT_EXPORTABLE: "the exporter of transformers fails, or its graph runs nowhere or computes something else",
    Outcome.OFF_INTERFACE: "no heads were found, and no neurons",
    Outcome.NO_ATTENTION: "the model has no attention, and no neurons were found",
    Outcome.NOT_BUILT: "no tiny model or inputs could be made",
    Outcome.FAILED: "a traceback, an abort, a wrong number that a run misses, or a shrunk graph that does not run",
}


def page_of(rows: Sequence[Row], models: int) -> str:
    """The text of the page.

    Args:
        rows: the rows.
        models: number of families, each in all of its forms; some may have no row yet.
    """
    counts = collections.Counter(row.outcome for row in rows)
    lines = [
        _INTRODUCTION.format(version=transformers.__version__),
        "| outcome | models | meaning |",
        "|" + " --- |" * 3,
    ]
    lines += [f"| {outcome} | {counts[outcome]} | {meaning} |" for outcome, meaning in _MEANINGS.items()]
    if len(rows) < models:
        lines.append(f"| not swept yet | {models - len(rows)} | the sweep was interrupted |")
    lines += ["", f"| form | {' | '.join(_MEANINGS)} |", "|" + " --- |" * (1 + len(_MEANINGS))]
    for form in Form:
        of_form = collections.Counter(row.outcome for row in rows if row.form == form)
        lines.append(_line(form, *(of_form[outcome] for outcome in _MEANINGS)))
    for outcome in _MEANINGS:
        of_outcome = [row for row in rows if row.outcome == outcome]
        if of_outcome:
            lines += ["", f"## {outcome[0].upper()}{outcome[1:]}", "", *_section(outcome, of_outcome)]
    return "\n".join(lines) + "\n"


def _section(outcome: Outcome, rows: Sequence[Row]) -> Iterator[str]:
    """The rows of an outcome: numbers where something was cut, else reasons, else names."""
    if outcome in (Outcome.HOLDS, Outcome.IN_PART):
        yield "| family | model | sites | feed-forwards | parameters left | ONNX Runtime | OpenVINO | refused |"
        yield "|" + " --- |" * 8
        for row in rows:
            left = f"{row.parameters[1] / row.parameters[0]:.0%}" if row.parameters[0] else ""
            errors = (_number(row.error), _number(row.openvino))
            yield _line(row.family, row.model, row.heads, row.neurons, left, *errors, row.reason)
    elif any(row.reason for row in rows):
        yield "| family | model | reason |"
        yield "|" + " --- |" * 3
        for row in rows:
            yield _line(row.family, row.model, row.reason)
    else:
        yield ", ".join(f"`{name}`" for name in dict.fromkeys(row.family for row in rows))


def _line(*cells: object) -> str:
    escaped = (str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _number(value: float | str | None) -> str:
    return f"{value:.0e}" if isinstance(value, float) else value or ""
