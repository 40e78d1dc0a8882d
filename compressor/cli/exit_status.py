"""The end of a run on the terminal: print its result, and raise the error that its status calls for."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from compressor import report as reports
from compressor.cli.console import Console
from compressor.errors import ErrorCode, MetricDropError, TargetMissingError
from compressor.report.files import HTML_NAME
from compressor.report.frontier import FRONTIER_HTML, Frontier
from compressor.report.terminal import frontier_summary
from compressor.results import DropStatus, Report, headline_scores


def finish(console: Console, report: Report | None, out: Path) -> None:
    """Print the result of a run or of a build.

    Args:
        console: the console to print to.
        report: the result; None in the worker processes of a distributed run.
        out: folder of the report.

    Raises:
        MetricDropError: the metric fell by more than the run allows.
        TargetMissingError: this machine lacks the requested target; everything else is in the folder.
    """
    if report is None:
        return
    text = Text(report.verdict) if console.quiet else reports.summary(report)
    console.result(text, report.model_dump(mode="json"))
    console.note(f"the whole report is in {out / HTML_NAME}")
    if report.drop_status is DropStatus.FAILED:
        scores = ", ".join(
            f"{score.metric} on the {score.split_name} rows went from {score.dense:.4g} to {score.compressed:.4g}"
            for score in headline_scores(report.scores)
        )
        raise MetricDropError(
            f"{out}: {scores or 'the metric of the run fell'}, more than --max-drop {report.recipe['max_drop']:g}"
            f" allows; keep more heads, train longer, or allow more (the evidence is in {HTML_NAME})",
            code=ErrorCode.METRIC_FELL,
            path=out,
        )
    if report.missing is not None:
        missing = report.missing
        raise TargetMissingError(
            f"{missing.target}: {missing.reason}; build the engine on the machine that will run it: {missing.command}"
            f" (the proven graphs are in {out})",
            code=ErrorCode.DEVICE_MISSING,
            target=missing.target,
        )


def finish_ladder(console: Console, frontier: Frontier, out: Path) -> None:
    """Print the result of a ladder.

    Args:
        console: the console to print to.
        frontier: its finished rungs.
        out: folder of the rungs.

    Raises:
        MetricDropError: no rung keeps the metric within the loss allowed, or the fastest loses more on test rows.
        TargetMissingError: this machine lacks the requested target; everything else is in the folders.
    """
    console.result(frontier_summary(frontier), frontier.model_dump(mode="json"))
    console.note(f"the rungs are compared in {out / FRONTIER_HTML}")
    if frontier.is_missed:
        raise MetricDropError(
            f"{out}: {frontier.sentence}; add a milder rung, train longer (--distill-steps), or allow more (the"
            f" evidence is in {FRONTIER_HTML})",
            code=ErrorCode.METRIC_FELL,
            path=out,
        )
    if frontier.missing is not None:
        raise TargetMissingError(
            f"{frontier.missing.target}: {frontier.missing.reason}; build the engine of each rung on the machine that"
            f" will run it (the proven graphs are in {out})",
            code=ErrorCode.DEVICE_MISSING,
            target=frontier.missing.target,
        )
