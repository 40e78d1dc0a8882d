"""Run a check, record it in files, and raise an error unless it passed."""

from __future__ import annotations

from collections.abc import Callable

from compressor.config.check import CheckArtifacts
from compressor.errors import ErrorCode, ServerError, SlowdownError
from compressor.latency import artifacts
from compressor.latency.verdict import Outcome, Verdict
from graph_passes.files import write_text


def check_and_record(
    files: CheckArtifacts,
    title: str,
    run_check: Callable[[], Verdict],
    on_verdict: Callable[[Verdict], object] = lambda verdict: None,
) -> Verdict:
    """Run a check and return its verdict if it passed. Every check is recorded, whatever its outcome.

    Args:
        files: the files that record it.
        title: the models that are compared, for the JUnit report of a check without a verdict.
        run_check: runs the check.
        on_verdict: receives the verdict before any error is raised.

    Raises:
        SlowdownError: the model is too slow.
        ServerError: the check was interrupted.
        CompressorError, GraphPassError: any other error that ended the check.
    """
    try:
        if files.history is not None and files.history.exists():
            artifacts.read_history(files.history)  # nothing is appended to a file that is not a history
        verdict = run_check()
    except BaseException as error:
        if files.junit is not None:  # else the report of an earlier check would stand for this one
            write_text(files.junit, artifacts.junit_of_error(title, error))
        raise
    on_verdict(verdict)
    _record(files, verdict)
    if verdict.outcome is Outcome.INTERRUPTED:
        raise ServerError(
            f"{verdict.interrupted} (what was measured before is printed and recorded)",
            code=ErrorCode.CHECK_INTERRUPTED,
            phase=verdict.phase,
            verdict=verdict,
        )
    if verdict.outcome is Outcome.FAILED:
        raise SlowdownError("; ".join(verdict.failures), code=ErrorCode.TOO_SLOW, verdict=verdict)
    return verdict


def _record(files: CheckArtifacts, verdict: Verdict) -> None:
    if files.junit is not None:
        write_text(files.junit, artifacts.junit(verdict))
    if files.history is not None:
        artifacts.append_to_history(files.history, verdict)
    if files.plot is not None and files.history is not None:
        from compressor.latency.history_plot import plot_history  # matplotlib takes long to import

        plot_history(artifacts.read_history(files.history), verdict, files.plot)
