"""JUnit reports and histories: valid for any message of a server, and readable after a crash or an update."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from compressor.errors import ErrorCode, InputError, MismatchError, ServerError
from compressor.latency import artifacts
from compressor.latency.artifacts import comparable, plot_history
from compressor.latency.verdict import CheckPhase
from tests.latency.verdicts import scenario, slowdown, verdict


def cases(suite: ElementTree.Element) -> dict[str | None, list[str]]:
    """Name of each case -> tags of its elements."""
    return {case.get("name"): [entry.tag for entry in case] for case in suite}


def counts(suite: ElementTree.Element) -> tuple[str | None, ...]:
    return tuple(suite.get(name) for name in ("tests", "failures", "errors"))


def test_a_report_has_a_case_for_each_bound() -> None:
    suite = ElementTree.fromstring(artifacts.junit(verdict(scenarios=(scenario(),))).encode())
    assert cases(suite) == {"outputs": [], "slowdown": [], "SingleStream": [], None: []}
    assert counts(suite) == ("3", "0", "0")
    missed = scenario(holds=False, why="too slow")
    failed = verdict(slowdown=slowdown(low=0.1, high=0.3, slowdown=0.2), scenarios=(missed,))
    suite = ElementTree.fromstring(artifacts.junit(failed).encode())
    assert cases(suite) == {"outputs": [], "slowdown": ["failure"], "SingleStream": ["failure"], None: []}
    assert counts(suite) == ("3", "2", "0")


def test_a_report_of_an_interrupted_check_has_no_passed_case() -> None:
    interrupted = verdict(phase=CheckPhase.TIMING, interrupted="gone")
    suite = ElementTree.fromstring(artifacts.junit(interrupted).encode())
    assert cases(suite) == {"outputs": [], "slowdown": ["skipped"], "timing": ["error"], None: []}
    assert counts(suite) == ("3", "0", "1")


@pytest.mark.parametrize(
    ("error", "tag"), [(MismatchError("differs"), "failure"), (ServerError("gone"), "error"), (KeyError(), "error")]
)
def test_a_report_of_a_check_without_a_verdict(error: Exception, tag: str) -> None:
    suite = ElementTree.fromstring(artifacts.junit_of_error("small against dense", error).encode())
    assert cases(suite) == {"outputs": [tag]}
    assert counts(suite) == ("1", str(int(tag == "failure")), str(int(tag == "error")))


def test_a_report_is_valid_xml_for_any_message_of_a_server() -> None:
    text = "\x1b[31mgone\x00\x0b \ud800 <\ufffe> & \U0001f600 \u00fc"
    (case,) = ElementTree.fromstring(artifacts.junit_of_error("small\x08", ServerError(text)).encode())
    assert case[0].get("message") == "[31mgone  <> & \U0001f600 \u00fc"


def test_a_history_with_truncated_lines_and_later_versions_is_read(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    artifacts.append_to_history(history, verdict())
    line = history.read_text()
    history.write_text(line.replace('{"time"', '{"added_later": 1, "time"') + line[:40])
    artifacts.append_to_history(history, verdict(batch=8))
    assert [record.batch for record in artifacts.read_history(history)] == [1, 8]
    assert history.read_text().splitlines()[1] == line[:40]


@pytest.mark.parametrize("content", [b"nothing\n", "history".encode("utf-16")])
def test_a_file_without_checks_is_not_a_history(content: bytes, tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    history.write_bytes(content)
    with pytest.raises(InputError) as error:
        artifacts.read_history(history)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_UNREADABLE, history)
    history.write_bytes(b"")
    assert artifacts.read_history(history) == []


def test_a_picture_shows_only_comparable_checks(tmp_path: Path) -> None:
    last = verdict()
    checks = [verdict(batch=8), verdict(slowdown=None), verdict(time="2025-12-31T23:59:59+00:00"), last]
    assert comparable(checks, last) == checks[2:]
    for history in (checks, []):
        plot_history(history, last, tmp_path / "history.svg")
    assert ElementTree.parse(tmp_path / "history.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert [path.name for path in tmp_path.iterdir()] == ["history.svg"]
