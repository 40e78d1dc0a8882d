"""Run a check, record it in a JUnit report, a history and its plot, and raise an error unless it passed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
import pydantic

from compressor.config.check import CheckArtifacts
from compressor.errors import ErrorCode, InputError, MismatchError, ServerError, SlowdownError
from compressor.latency.verdict import Outcome, Slowdown, Verdict
from compressor.results import size_label
from compressor.silence_libraries import one_line
from graph_passes.files import atomic_replace, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 (section 2.2) excludes, even when escaped."""
_OUTPUTS, _TIMING = "outputs", "timing"
_MAX_CHECKS, _MAX_TICKS = 100, 8


def check_and_record(
    files: CheckArtifacts,
    title: str,
    run_check: Callable[[], Verdict],
    on_verdict: Callable[[Verdict], object] = lambda verdict: None,
) -> Verdict:
    """Run a check and return its verdict if it passed. Every check is recorded, with any outcome.

    Args:
        files: the files that record it.
        title: the compared models, for the JUnit report of a check that ends without a verdict.
        run_check: runs the check.
        on_verdict: receives the verdict before any error is raised.

    Raises:
        SlowdownError: the model is too slow.
        ServerError: the check was interrupted.
        CompressorError, GraphPassError: any other error that ended the check.
    """
    try:
        if files.history is not None and files.history.exists():
            read_history(files.history)  # raises for a file that is not a history, to which nothing is appended
        verdict = run_check()
    except BaseException as error:
        if files.junit is not None:  # the report of an earlier check must not remain
            write_text(files.junit, junit_of_error(title, error))
        raise
    on_verdict(verdict)
    if files.junit is not None:
        write_text(files.junit, junit(verdict))
    if files.history is not None:
        append_to_history(files.history, verdict)
        if files.plot is not None:
            plot_history(read_history(files.history), verdict, files.plot)
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


def junit(verdict: Verdict) -> str:
    """A check as a JUnit report, with a case for the outputs, for each slowdown and for each scenario."""
    cases = {_OUTPUTS: "", **verdict.cases}
    interrupted = verdict.outcome is Outcome.INTERRUPTED
    suite = ElementTree.Element(
        "testsuite",
        name=verdict.title,
        tests=str(len(cases) + interrupted),
        failures=str(len(verdict.failures)),
        errors=str(int(interrupted)),
        time=f"{verdict.seconds:.3f}",
        timestamp=verdict.time.partition("+")[0],  # JUnit's schema has no offset from UTC
    )
    for name, failure in cases.items():
        case = _add_case(suite, name)
        if failure:
            ElementTree.SubElement(case, "failure", message=failure, type="SlowdownError")
        elif interrupted and name != _OUTPUTS:
            ElementTree.SubElement(case, "skipped", message="interrupted")
    if interrupted:
        ElementTree.SubElement(_add_case(suite, _TIMING), "error", message=verdict.interrupted, type="ServerError")
    ElementTree.SubElement(suite, "system-out").text = "\n".join(verdict.lines())
    return _to_xml(suite)


def junit_of_error(title: str, error: BaseException) -> str:
    """The JUnit report of a check that ended without a verdict.

    Wrong outputs are a failure of the model; anything else is an error.
    """
    failed = isinstance(error, MismatchError)
    suite = ElementTree.Element(
        "testsuite", name=title, tests="1", failures=str(int(failed)), errors=str(int(not failed))
    )
    kind, message = "failure" if failed else "error", str(error) or "interrupted"
    ElementTree.SubElement(_add_case(suite, _OUTPUTS), kind, message=message, type=type(error).__name__)
    return _to_xml(suite)


def _add_case(suite: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname="compressor.latency", name=name)


def _to_xml(suite: ElementTree.Element) -> str:
    text = ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
    return _NOT_XML.sub("", text)


def append_to_history(path: Path, verdict: Verdict) -> None:
    """Append a line to a history in a single write, so that concurrent checks may share the file."""
    line = verdict.model_dump_json().encode() + b"\n"
    with path.open("a+b", buffering=0) as stream:
        if stream.seek(0, os.SEEK_END):
            stream.seek(-1, os.SEEK_END)
            line = line if stream.read(1) == b"\n" else b"\n" + line  # the last line may be incomplete
        stream.write(line)


def read_history(path: Path) -> list[Verdict]:
    """The checks of a history, oldest first; incomplete lines are skipped.

    Raises:
        InputError: the file cannot be read, or contains no check.
    """
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        text = f"the history cannot be read ({one_line(error)}); give another --history"
        raise InputError.of_file(path, text, ErrorCode.FILE_UNREADABLE) from error
    verdicts = []
    for line in lines:
        with contextlib.suppress(pydantic.ValidationError):
            verdicts.append(Verdict.model_validate_json(line))
    if lines and not verdicts:
        text = "the file contains no check records; give another --history"
        raise InputError.of_file(path, text, ErrorCode.FILE_UNREADABLE)
    return verdicts


def comparable(checks: Sequence[Verdict], last: Verdict) -> list[Verdict]:
    """The timed checks of the same models, at the same sizes and on the same host and machine as `last`."""
    return [check for check in checks if check.slowdown is not None and check.comparison == last.comparison]


def plot_history(checks: Sequence[Verdict], last: Verdict, path: Path) -> None:
    """Plot the median times and the slowdowns of the checks that are comparable with `last`.

    Args:
        path: `.svg` or `.png` file to write.
    """
    from matplotlib.figure import Figure  # matplotlib takes long to import
    from matplotlib.ticker import MaxNLocator

    timed = comparable(checks, last)[-_MAX_CHECKS:]
    slowdowns = [check.slowdown for check in timed if check.slowdown is not None]
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.set_title(f"{last.title}, {size_label(last.batch, last.seq)}", fontsize=9, parse_math=False)
    _plot_medians(upper, slowdowns)
    _plot_slowdowns(lower, slowdowns)
    labels = [check.time[:16].replace("T", "\n") for check in timed]
    lower.xaxis.set_major_locator(MaxNLocator(_MAX_TICKS, integer=True))
    lower.xaxis.set_major_formatter(lambda x, _: labels[int(x)] if x in range(len(labels)) else "")
    lower.tick_params(axis="x", labelsize=7)
    with atomic_replace(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower())


def _plot_medians(axes: Axes, slowdowns: Sequence[Slowdown]) -> None:
    x = range(len(slowdowns))
    axes.plot(x, [slowdown.model_p50 for slowdown in slowdowns], "o-", label="model")
    axes.plot(x, [slowdown.baseline_p50 for slowdown in slowdowns], "o-", label="baseline", color="0.6")
    axes.set_ylabel("p50, ms")
    axes.set_ylim(0, 1.1 * max((max(slowdown.model_p50, slowdown.baseline_p50) for slowdown in slowdowns), default=1.0))
    axes.legend(frameon=False)


def _plot_slowdowns(axes: Axes, slowdowns: Sequence[Slowdown]) -> None:
    x = range(len(slowdowns))
    percent = 100 * np.array([(row.slowdown, row.low, row.high, row.limit) for row in slowdowns]).reshape(-1, 4)
    middle, low, high, limit = percent.T
    axes.errorbar(x, middle, yerr=np.maximum([middle - low, high - middle], 0), fmt="none", ecolor="0.6", capsize=3)
    axes.scatter(x, middle, c=["tab:green" if row.holds else "tab:red" for row in slowdowns], zorder=3)
    axes.step(x, limit, where="mid", color="tab:red", linewidth=1, linestyle="--")
    axes.axhline(0, color="0.8", linewidth=1, zorder=0)
    axes.set_ylabel("slowdown, % (95%)")
