"""Files of a check: a JUnit report, a history and its picture."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pydantic

from compressor.errors import InputError, MismatchError
from compressor.latency.verdict import Verdict
from compressor.silence_libraries import one_line
from graph_passes.files import beside

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 (2.2) has no place for, however they are written."""
_DRAWN, _TICKS = 100, 8
"""Checks of a picture, and times beneath it, at most."""


def write(path: Path, content: str) -> None:
    """Write a file whole or not at all."""
    with beside(path) as place:
        place.write_text(content, encoding="utf-8")


def junit(verdict: Verdict) -> str:
    """The check as a JUnit report: a case for the answers, one for the slowdown, one a scenario."""
    failed = {"slowdown": "", **{load.scenario: "" if load.holds else load.why for load in verdict.loads}}
    if verdict.slowdown is not None and not verdict.slowdown.holds:
        failed["slowdown"] = verdict.failures[0]
    names = [
        "answers",
        *(["slowdown"] if verdict.slowdown is not None else []),
        *(load.scenario for load in verdict.loads),
    ]
    suite = ElementTree.Element(
        "testsuite",
        name=verdict.title,
        tests=str(len(names) + bool(verdict.interrupted)),
        failures=str(sum(bool(failed.get(name)) for name in names)),
        errors=str(int(bool(verdict.interrupted))),
        time=f"{verdict.seconds:.3f}",
        timestamp=verdict.time.partition("+")[0],  # of UTC; JUnit's schema has no offset
    )
    for name in names:
        case = ElementTree.SubElement(suite, "testcase", classname="compressor.latency", name=name)
        if failed.get(name):
            ElementTree.SubElement(case, "failure", message=failed[name], type="SlowdownError")
        elif verdict.interrupted and name != "answers":
            ElementTree.SubElement(case, "skipped", message="broken off")
    if verdict.interrupted:
        case = ElementTree.SubElement(suite, "testcase", classname="compressor.latency", name="timing")
        ElementTree.SubElement(case, "error", message=verdict.interrupted, type="ServerError")
    ElementTree.SubElement(suite, "system-out").text = "\n".join(verdict.lines())
    return _xml(suite)


def broken(title: str, error: BaseException) -> str:
    """A check without a verdict, as a JUnit report: wrong answers are a failure of the model, all else an error."""
    failed = isinstance(error, MismatchError)
    suite = ElementTree.Element(
        "testsuite", name=title, tests="1", failures=str(int(failed)), errors=str(int(not failed))
    )
    case = ElementTree.SubElement(suite, "testcase", classname="compressor.latency", name="answers")
    kind = "failure" if failed else "error"
    ElementTree.SubElement(case, kind, message=str(error) or "broken off", type=type(error).__name__)
    return _xml(suite)


def _xml(suite: ElementTree.Element) -> str:
    text = ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
    return _FORBIDDEN.sub("", text)


def append(path: Path, verdict: Verdict) -> None:
    """Add a line to a history; it is written at once, so that checks may share the file."""
    line = verdict.model_dump_json().encode() + b"\n"
    with path.open("a+b", buffering=0) as stream:
        if stream.seek(0, os.SEEK_END):
            stream.seek(-1, os.SEEK_END)
            line = line if stream.read(1) == b"\n" else b"\n" + line  # after one that was torn
        stream.write(line)


def history(path: Path) -> list[Verdict]:
    """Every check of a history, oldest first; lines that were torn are left out.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise InputError(f"{path}: no readable history ({one_line(error)}); give another --history") from error
    found = []
    for line in lines:
        with contextlib.suppress(pydantic.ValidationError):
            found.append(Verdict.model_validate_json(line))
    if lines and not found:
        raise InputError(f"{path}: none of its lines is a check; give another --history")
    return found


def picture(checks: Sequence[Verdict], last: Verdict, path: Path) -> None:
    """Median times and slowdowns of the checks that are of the same models, sizes and place as `last`, one beneath the
    other, as SVG or PNG by the file's name."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    timed = [check for check in checks if check.slowdown is not None and check.subject == last.subject][-_DRAWN:]
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    places = range(len(timed))
    slow = [check.slowdown for check in timed if check.slowdown is not None]
    above.plot(places, [one.model_p50 for one in slow], "o-", label="model")
    above.plot(places, [one.baseline_p50 for one in slow], "o-", label="baseline", color="0.6")
    above.set_title(f"{last.title}, batch {last.batch}, {last.seq} tokens", fontsize=9)
    above.set_ylabel("p50, ms")
    above.set_ylim(0, 1.1 * max((max(one.model_p50, one.baseline_p50) for one in slow), default=1.0))
    above.legend(frameon=False)
    middle = [100 * one.slowdown for one in slow]
    spread = np.array(
        [[100 * (one.slowdown - one.low) for one in slow], [100 * (one.high - one.slowdown) for one in slow]]
    ).reshape(2, -1)
    below.errorbar(places, middle, yerr=np.maximum(spread, 0), fmt="none", ecolor="0.6", capsize=3)
    below.scatter(places, middle, c=["tab:green" if one.holds else "tab:red" for one in slow], zorder=3)
    below.step(places, [100 * one.limit for one in slow], where="mid", color="tab:red", linewidth=1, linestyle="--")
    below.axhline(0, color="0.8", linewidth=1, zorder=0)
    below.set_ylabel("slowdown, % (95%)")
    times = [check.time[:16].replace("T", "\n") for check in timed]
    below.xaxis.set_major_locator(MaxNLocator(_TICKS, integer=True))
    below.xaxis.set_major_formatter(lambda place, _: times[int(place)] if place in places else "")
    below.tick_params(axis="x", labelsize=7)
    with beside(path) as place:
        figure.savefig(place, format=path.suffix[1:].lower())
