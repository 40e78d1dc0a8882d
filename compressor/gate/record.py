"""Files of a check: a baseline for later ones, a history and its picture, a JUnit report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pydantic

from compressor.errors import InputError
from compressor.gate.verdict import Verdict
from compressor.machine import machine
from graph_passes.files import beside

_FORMAT = "compressor latency baseline 1"
_SAME = ("processor", "cores", "memory")
"""Of the machine: what has to be alike for two times to be compared."""


class Baseline(pydantic.BaseModel):
    """What was measured of a model, for checks that cannot drive it at the same time.

    Attributes:
        model, host, inputs: whose times, where, on what.
        batch, seq: size of its batches.
        times: milliseconds of every call, by block.
        answers: the outputs of every batch.
        machine: that it was measured on.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    format: str = _FORMAT
    model: str
    host: str
    inputs: str
    batch: int
    seq: int
    times: tuple[tuple[float, ...], ...]
    answers: tuple[dict[str, Any], ...]
    machine: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Raises:
        InputError: no such file, or not what `save` writes.
        """
        try:
            found = cls.model_validate_json(path.read_bytes())
        except (OSError, pydantic.ValidationError) as error:
            raise InputError(f"{path}: no baseline; write one by compress check ... --save-baseline {path}") from error
        if not found.times or len({len(block) for block in found.times} | {0}) != 2:
            raise InputError(f"{path}: a baseline without times, or with blocks of different lengths; measure it again")
        if found.format != _FORMAT:
            raise InputError(f"{path}: {found.format!r}, this version reads {_FORMAT!r}; measure it again")
        return found

    def save(self, path: Path) -> None:
        write(path, self.model_dump_json())

    def elsewhere(self, host: str) -> str:
        """What is another machine's or server's than `host`, in words; empty where all is the same."""
        here = {**machine(), "host": host}
        then = {**self.machine, "host": self.host}
        return ", ".join(
            f"{name} {then.get(name)} there, {here.get(name)} here"
            for name in (*_SAME, "host")
            if then.get(name) != here.get(name)
        )


def packed(outputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Arrays as JSON can hold them."""
    return {name: {"dtype": str(array.dtype), "values": array.tolist()} for name, array in outputs.items()}


def unpacked(outputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """What `packed` took."""
    return {name: np.array(entry["values"], entry["dtype"]) for name, entry in outputs.items()}


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
        name=f"{verdict.model} against {verdict.baseline}",
        tests=str(len(names) + bool(verdict.interrupted)),
        failures=str(sum(bool(failed.get(name)) for name in names)),
        errors=str(int(bool(verdict.interrupted))),
        time=f"{verdict.seconds:.3f}",
        timestamp=verdict.time,
    )
    for name in names:
        case = ElementTree.SubElement(suite, "testcase", classname="compressor.gate", name=name)
        if failed.get(name):
            ElementTree.SubElement(case, "failure", message=failed[name])
    if verdict.interrupted:
        case = ElementTree.SubElement(suite, "testcase", classname="compressor.gate", name="timing")
        ElementTree.SubElement(case, "error", message=verdict.interrupted)
    ElementTree.SubElement(suite, "system-out").text = "\n".join(verdict.lines())
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def broken(name: str, error: Exception) -> str:
    """A check that ended before there was anything to time, as a JUnit report."""
    suite = ElementTree.Element("testsuite", name=name, tests="1", failures="1", errors="0")
    case = ElementTree.SubElement(suite, "testcase", classname="compressor.gate", name="answers")
    ElementTree.SubElement(case, "failure", message=str(error), type=type(error).__name__)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def append(path: Path, verdict: Verdict) -> None:
    """Add a line to a history; a line is written at once, so that checks may share the file."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(verdict.model_dump_json() + "\n")


def history(path: Path) -> list[Verdict]:
    """Every check of a history, oldest first.

    Raises:
        InputError: a line is none; the message says which.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(Verdict.model_validate_json(line))
        except (pydantic.ValidationError, json.JSONDecodeError) as error:
            raise InputError(f"{path}, line {number}: no check; give another --history, or remove the line") from error
    return found


def picture(checks: Sequence[Verdict], path: Path) -> None:
    """Median times and slowdowns of a history, one beneath the other, as SVG or PNG by the file's name."""
    from matplotlib.figure import Figure

    timed = [check for check in checks if check.slowdown is not None]
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    places = range(len(timed))
    slow = [check.slowdown for check in timed if check.slowdown is not None]
    above.plot(places, [one.model_p50 for one in slow], "o-", label="model")
    above.plot(places, [one.baseline_p50 for one in slow], "o-", label="baseline", color="0.6")
    above.set_ylabel("p50, ms")
    above.set_ylim(bottom=0)
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
    below.set_xticks(list(places), [check.time[:16].replace("T", "\n") for check in timed], fontsize=7)
    with beside(path) as place:
        figure.savefig(place, format=path.suffix[1:].lower())
