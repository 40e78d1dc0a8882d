"""Run a check, record it in a JUnit report, a history and its plot, and raise an error unless it passed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pydantic

from compressor.config.check import CheckArtifacts
from compressor.errors import ErrorCode, InputError, MismatchError, ServerError, SlowdownError
from compressor.latency.verdict import Outcome, Slowdown, Verdict
from compressor.report import plot
from compressor.report.plot import Axis, Plot
from compressor.results import size_label
from compressor.silence_libraries import one_line
from graph_passes.files import write_text

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 (section 2.2) excludes, even when escaped."""
_OUTPUTS, _TIMING = "outputs", "timing"
_MAX_CHECKS, _MAX_TICKS = 100, 6
_WIDTH, _HEIGHT = 576, 180  # pixels of each of the two plots of a history


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
        text = f"{verdict.interrupted} (what was measured before is printed and recorded)"
        raise ServerError(text, code=ErrorCode.CHECK_INTERRUPTED, phase=verdict.phase, verdict=verdict)
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
        path: `.svg` file to write.
    """
    timed = comparable(checks, last)[-_MAX_CHECKS:]
    slowdowns = [check.slowdown for check in timed if check.slowdown is not None]
    end = max(len(timed), 1) - 0.5
    ticks = [tick for tick in plot.round_numbers(0, end, _MAX_TICKS, whole=True) if tick < len(timed)]
    x = Axis(-0.5, end, "", {tick: timed[int(tick)].time[:16].replace("T", " ") for tick in ticks})
    title = _NOT_XML.sub("", f"{last.title}, {size_label(last.batch, last.seq)}")
    write_text(path, plot.picture([[_medians(x, slowdowns, title)], [_slowdowns(x, slowdowns)]]))


def _medians(x: Axis, slowdowns: Sequence[Slowdown], title: str) -> Plot:
    lines = {
        "model": ([row.model_p50 for row in slowdowns], plot.COMPRESSED),
        "baseline": ([row.baseline_p50 for row in slowdowns], plot.DENSE),
    }
    y = Axis.of((0.0, *(value for values, _ in lines.values() for value in values)), "p50, ms", has_grid=True)
    panel = Plot(x, y, _HEIGHT, width=_WIDTH, title=title)
    for row, (name, (values, colour)) in enumerate(lines.items()):
        panel.line(enumerate(values), colour)
        panel.marks(enumerate(values), colour, 6)
        panel.text((x.low, y.low), name, colour, (6, -18 + 11 * row))
    return panel


def _slowdowns(x: Axis, slowdowns: Sequence[Slowdown]) -> Plot:
    ends = [100 * end for row in slowdowns for end in (row.slowdown, row.low, row.high, row.limit)]
    panel = Plot(x, Axis.of((0.0, *ends), "slowdown, % (95%)", has_grid=True), _HEIGHT, width=_WIDTH)
    panel.line(((x.low, 0.0), (x.high, 0.0)), plot.MUTED, 1)
    panel.line(
        [(number + side, 100 * row.limit) for number, row in enumerate(slowdowns) for side in (-0.5, 0.5)],
        plot.BAD,
        1,
        dashes="4 2",
    )
    for number, row in enumerate(slowdowns):
        panel.line(((number, 100 * row.low), (number, 100 * row.high)), plot.DENSE)
        panel.marks([(number, 100 * row.slowdown)], plot.COMPRESSED if row.holds else plot.BAD, 6)
    return panel
