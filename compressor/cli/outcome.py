"""The end of a run on the terminal: the result, then the error that it amounts to, if it does."""

from __future__ import annotations

from rich.text import Text

from compressor import report as reports
from compressor.cli.view import View
from compressor.errors import GateError
from compressor.recipe import Recipe
from compressor.report.files import HTML_NAME
from compressor.report.schema import Report


def finish(view: View, report: Report | None, recipe: Recipe) -> None:
    """Print the result of a run.

    Args:
        report: None in the helper processes of a run on many.

    Raises:
        GateError: the metric fell by more than the recipe allows.
    """
    if report is None:
        return
    shown = Text(report.verdict) if view.quiet else reports.summary(report)
    view.result(shown, report.model_dump(mode="json"))
    view.note(f"the whole report is in {recipe.out / HTML_NAME}")
    if report.gate == "failed":
        told = ", ".join(
            f"{score.metric} on the {score.split} rows went from {score.dense:.4g} to {score.compressed:.4g}"
            for score in report.scores
        )
        raise GateError(
            f"{recipe.out}: {told}, worse than --max-drop {recipe.max_drop:g} allows; keep more heads, train"
            f" longer, or allow more (the evidence is in {HTML_NAME})"
        )
