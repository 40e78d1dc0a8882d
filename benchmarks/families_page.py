"""The page of the families: counts of the outcomes, and one line for each family."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

import transformers

from benchmarks.families_law import Outcome, Row
from benchmarks.families_tiny import Form

_INTRODUCTION = """# Families

This page lists what `compress` does to every model type of transformers {version}. A tiny model of each, with random
weights, is exported and cut by a plan that keeps a random half of its heads and neurons. The exported graph is compared
with the gated PyTorch model, and the shrunk graph with the exported one, on ONNX Runtime and OpenVINO; the relative
error has to be at most 1e-4. Images have one size. `make families` runs the sweep and writes this page
([benchmarks/families.py](../benchmarks/families.py)).

A family is tested in each of its forms: with its **usual** head, **bare** (without a head), **pooled** (a classifier of
texts, images or sounds), **tokens** (a head for each position: labels of tokens, answers to questions), and
**generates** (text, with key/value caches). For **generates** the gated model reads a text at once and the graphs read
it in steps, and a search has to find the same tokens with both; the line says so if the model itself finds other tokens
with its own cache. A line holds for its form alone, on the day and the inputs in the second table; nothing is claimed
about a family and form without a line.

A family is not judged if general rules cannot build a tiny model or its inputs: give `compress` a real folder, and
inputs by `--inputs FILE.npz`. With padding on the left, a token that sees no other has no defined output in PyTorch:
SDPA and eager attention, which graphs have, differ there. A classifier that reads the first token (ModernBERT) should
get rows with padding on the right.
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


def page_of(rows: Sequence[Row], models: Mapping[Form, int]) -> str:
    """The text of the page.

    Args:
        rows: the rows.
        models: form -> number of families that have it; some may have no row yet.
    """
    counts = collections.Counter(row.outcome for row in rows)
    lines = [
        _INTRODUCTION.format(version=transformers.__version__),
        "| outcome | models | meaning |",
        "|" + " --- |" * 3,
    ]
    lines += [f"| {outcome} | {counts[outcome]} | {meaning} |" for outcome, meaning in _MEANINGS.items()]
    lines += ["", *_runs(rows, models)]
    for outcome in _MEANINGS:
        of_outcome = [row for row in rows if row.outcome == outcome]
        if of_outcome:
            lines += ["", f"## {outcome[0].upper()}{outcome[1:]}", "", *_section(outcome, of_outcome)]
    return "\n".join(lines) + "\n"


def _runs(rows: Sequence[Row], models: Mapping[Form, int]) -> Iterator[str]:
    """The outcomes of each form and day, with what was compared, and how many families of a form have no row."""
    yield f"| form | swept | {' | '.join(_MEANINGS)} | compared on |"
    yield "|" + " --- |" * (3 + len(_MEANINGS))
    for form in Form:
        of_form = [row for row in rows if row.form == form]
        for day, compared in sorted({(row.swept, row.compared) for row in of_form}):
            run = collections.Counter(row.outcome for row in of_form if (row.swept, row.compared) == (day, compared))
            yield _line(form, day, *(run[outcome] for outcome in _MEANINGS), compared)
        if missing := models[form] - len(of_form):
            yield _line(form, f"not yet: {missing}", *("" for _ in _MEANINGS), "")


def _section(outcome: Outcome, rows: Sequence[Row]) -> Iterator[str]:
    """The rows of an outcome: numbers where something was cut, else reasons, else names."""
    if outcome in (Outcome.HOLDS, Outcome.IN_PART):
        yield "| family | form | model | sites | feed-forwards | parameters left | ONNX Runtime | OpenVINO | refused |"
        yield "|" + " --- |" * 9
        for row in rows:
            left = f"{row.parameters[1] / row.parameters[0]:.0%}" if row.parameters[0] else ""
            errors = (_number(row.error), _number(row.openvino))
            yield _line(row.family, row.form, row.model, row.heads, row.neurons, left, *errors, row.reason)
    elif any(row.reason for row in rows):
        yield "| family | form | model | reason |"
        yield "|" + " --- |" * 4
        for row in rows:
            yield _line(row.family, row.form, row.model, row.reason)
    else:
        yield ", ".join(f"`{row.family}` ({row.form})" for row in rows)


def _line(*cells: object) -> str:
    escaped = (str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _number(value: float | str | None) -> str:
    return f"{value:.0e}" if isinstance(value, float) else value or ""
