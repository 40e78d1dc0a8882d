"""The end of a run on the terminal: the result, then the error that it amounts to, if it does."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from compressor import report as reports
from compressor.cli.console import Console
from compressor.errors import GateError, TargetMissingError
from compressor.report.files import HTML_NAME
from compressor.results import Report


def finish(view: Console, report: Report | None, out: Path) -> None:
    """Print the result of a run, or of building its engine anew.

    Args:
        report: None in the helper processes of a run on many.
        out: the folder that it is in.

    Raises:
        GateError: the metric fell by more than the run allows.
        TargetMissingError: the runtime asked for is not here; everything else was done.
    """
    if report is None:
        return
    shown = Text(report.verdict) if view.quiet else reports.summary(report)
    view.result(shown, report.model_dump(mode="json"))
    view.note(f"the whole report is in {out / HTML_NAME}")
    if report.gate == "failed":
        told = ", ".join(
            f"{score.metric} on the {score.split} rows went from {score.dense:.4g} to {score.compressed:.4g}"
            for score in report.scores
        )
        raise GateError(
            f"{out}: {told or 'the metric of the run fell'}, worse than --max-drop {report.recipe['max_drop']:g}"
            f" allows; keep more heads, train longer, or allow more (the evidence is in {HTML_NAME})"
        )
    if report.missing is not None:
        raise TargetMissingError(f"{report.missing} (the proven graphs are in {out})")
