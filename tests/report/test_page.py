"""The page in headless Chromium: it renders, requests nothing over the network and logs nothing to the console."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from compressor.report import write
from compressor.results import Report
from tests.report import examples
from tests.report.test_candidates import report_of

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --v=0"
).split()
_NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND"
_PROBE = '<!doctype html><img src="http://elsewhere.invalid/x.png"><script>console.log("seen")</script>'
_PHONE = """<!doctype html><iframe width="400" height="800"></iframe><output></output><script>
const frame = document.querySelector("iframe"), scrolls = (node, root) =>
  node !== root && (getComputedStyle(node).overflowX === "auto" || scrolls(node.parentElement, root));
frame.onload = () => {
  const root = frame.contentDocument.documentElement;
  for (const details of root.querySelectorAll("details")) details.open = true;
  const cut = [...root.querySelectorAll("body *")].filter(node =>
    node.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(node.parentElement, root));
  document.querySelector("output").textContent = JSON.stringify(
    { cut: cut.map(node => node.outerHTML.slice(0, 80)), sideways: root.scrollWidth - root.clientWidth });
};
frame.src = "report.html";
</script>"""
"""A page that opens the report in a frame as wide as a phone, and writes what does not fit into it."""


@pytest.fixture(scope="module")
def chromium() -> str:
    """Path of the browser. If `COMPRESSOR_REQUIRE_CHROMIUM` is 1, a missing browser is a failure and not a skip."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None and os.environ.get("COMPRESSOR_REQUIRE_CHROMIUM") == "1":
        pytest.fail("chromium is required here and is not installed; apt-get install chromium")
    if path is None:
        pytest.skip("chromium is not installed")
    return path


def _open(chromium: str, page: Path, folder: Path) -> tuple[str, list[str], list[str]]:
    """The elements of a loaded page, its lines on the console, and the addresses that it requested."""
    log = folder / "net.json"
    arguments = [
        _NO_NETWORK,
        "--allow-file-access-from-files",
        f"--user-data-dir={folder / 'profile'}",
        f"--log-net-log={log}",
        "--dump-dom",
        page.as_uri(),
    ]
    process = subprocess.run([chromium, *_FLAGS, *arguments], capture_output=True, text=True, timeout=60, check=True)
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # The browser itself looks for updates. Requests of a page have an origin, which is "null" for a file.
    requested = [event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"]
    return process.stdout, [line for line in process.stderr.splitlines() if "CONSOLE" in line], requested


@pytest.mark.parametrize("name", ["won", pytest.param("not faster", marks=pytest.mark.zoo)])
def test_chromium_shows_the_verdict(name: str, chromium: str, tmp_path: Path) -> None:
    report = examples.REPORTS[name]()
    dom, console, requested = _open(chromium, write(report, tmp_path), tmp_path)

    verdict = re.search(r'<p id="verdict">(.*?)</p>', dom, re.DOTALL)
    assert verdict is not None
    assert html.unescape(verdict[1]) == report.verdict
    assert dom.count("<svg") == 6
    assert console == []
    assert requested == []


LONG_STAGE = {"timing_the_cost_of_units_" * 4: 1.0}


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(examples.wide(), id="many heads", marks=pytest.mark.zoo),
        pytest.param(report_of(seconds=LONG_STAGE), id="many engines"),
    ],
)
def test_a_phone_cuts_nothing(report: Report, chromium: str, tmp_path: Path) -> None:
    write(report, tmp_path)
    (tmp_path / "phone.html").write_text(_PHONE)
    dom, _, _ = _open(chromium, tmp_path / "phone.html", tmp_path)
    measured = re.search(r"<output>(.+?)</output>", dom, re.DOTALL)
    assert measured is not None
    assert json.loads(html.unescape(measured[1])) == {"cut": [], "sideways": 0}


def test_requests_and_console_output_are_detected(chromium: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(_PROBE)
    _, console, requested = _open(chromium, page, tmp_path)
    assert "seen" in console[0]
    assert requested == ["http://elsewhere.invalid/x.png"]
