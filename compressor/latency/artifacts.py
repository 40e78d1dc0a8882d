"""Files that record checks: a JUnit report of one check, and a history of many."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pydantic

from compressor.errors import ErrorCode, InputError, MismatchError
from compressor.latency.verdict import Outcome, Verdict
from compressor.silence_libraries import one_line

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 (section 2.2) excludes, even when escaped."""
_CLASS_NAME = "compressor.latency"
_OUTPUTS, _SLOWDOWN, _TIMING = "outputs", "slowdown", "timing"


def junit(verdict: Verdict) -> str:
    """A check as a JUnit report: one case for the outputs, one for the slowdown, one per scenario."""
    failures = {result.scenario: result.why for result in verdict.scenarios if not result.holds}
    names = [_OUTPUTS, *(result.scenario for result in verdict.scenarios)]
    if verdict.slowdown is not None:
        names.insert(1, _SLOWDOWN)
        if not verdict.slowdown.holds:
            failures[_SLOWDOWN] = verdict.failures[0]
    interrupted = verdict.outcome is Outcome.INTERRUPTED
    suite = ElementTree.Element(
        "testsuite",
        name=verdict.title,
        tests=str(len(names) + interrupted),
        failures=str(len(failures)),
        errors=str(int(interrupted)),
        time=f"{verdict.seconds:.3f}",
        timestamp=verdict.time.partition("+")[0],  # JUnit's schema has no offset from UTC
    )
    for name in names:
        case = ElementTree.SubElement(suite, "testcase", classname=_CLASS_NAME, name=name)
        if name in failures:
            ElementTree.SubElement(case, "failure", message=failures[name], type="SlowdownError")
        elif interrupted and name != _OUTPUTS:
            ElementTree.SubElement(case, "skipped", message="interrupted")
    if interrupted:
        case = ElementTree.SubElement(suite, "testcase", classname=_CLASS_NAME, name=_TIMING)
        ElementTree.SubElement(case, "error", message=verdict.interrupted, type="ServerError")
    ElementTree.SubElement(suite, "system-out").text = "\n".join(verdict.lines())
    return _to_xml(suite)


def junit_of_error(title: str, error: BaseException) -> str:
    """A check that ended without a verdict as a JUnit report.

    Wrong outputs are a failure of the model; anything else is an error.

    Args:
        title: what was compared.
        error: what ended the check.
    """
    failed = isinstance(error, MismatchError)
    suite = ElementTree.Element(
        "testsuite", name=title, tests="1", failures=str(int(failed)), errors=str(int(not failed))
    )
    case = ElementTree.SubElement(suite, "testcase", classname=_CLASS_NAME, name=_OUTPUTS)
    ElementTree.SubElement(
        case, "failure" if failed else "error", message=str(error) or "interrupted", type=type(error).__name__
    )
    return _to_xml(suite)


def _to_xml(suite: ElementTree.Element) -> str:
    text = ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
    return _NOT_XML.sub("", text)


def append_to_history(path: Path, verdict: Verdict) -> None:
    """Append a line to a history in one write, so that concurrent checks may share the file."""
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
        raise InputError(
            f"{path}: the history cannot be read ({one_line(error)}); give another --history",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
        ) from error
    verdicts = []
    for line in lines:
        with contextlib.suppress(pydantic.ValidationError):
            verdicts.append(Verdict.model_validate_json(line))
    if lines and not verdicts:
        raise InputError(
            f"{path}: the file contains no check records; give another --history",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
        )
    return verdicts
