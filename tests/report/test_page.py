"""The page in a real browser: headless Chromium reads it, asks nothing of the network and has no complaint."""

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
from tests.report import reports

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --v=0"
).split()
_NOWHERE = "--host-resolver-rules=MAP * ~NOTFOUND"
_PROBE = '<!doctype html><img src="http://elsewhere.invalid/x.png"><script>console.log("seen")</script>'


@pytest.fixture(scope="module")
def chromium() -> str:
    """Path of the browser. Where one is required, its absence is a failure and not a skip."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None and os.environ.get("COMPRESSOR_REQUIRE_CHROMIUM") == "1":
        pytest.fail("chromium is required here and is not installed; apt-get install chromium")
    if found is None:
        pytest.skip("chromium is not installed")
    return found


def _open(chromium: str, page: Path, scratch: Path) -> tuple[str, list[str], list[str]]:
    """The page's elements after loading, its lines on the console, and the addresses that it asked for."""
    log = scratch / "net.json"
    arguments = [
        _NOWHERE,
        f"--user-data-dir={scratch / 'profile'}",
        f"--log-net-log={log}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run([chromium, *_FLAGS, *arguments], capture_output=True, text=True, timeout=60, check=True)
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # The browser itself looks for its updates; what a page asks for has an origin, and a file's is "null".
    asked = [event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line], asked


@pytest.mark.parametrize("name", ["won", "not faster"])
def test_chromium_reads_the_verdict(name: str, chromium: str, tmp_path: Path) -> None:
    report = reports.AWKWARD[name]()
    dom, console, asked = _open(chromium, write(report, tmp_path), tmp_path)

    verdict = re.search(r'<p id="verdict">(.*?)</p>', dom, re.DOTALL)
    assert verdict is not None
    assert html.unescape(verdict[1]) == report.verdict
    assert dom.count("<svg") == 6
    assert console == []
    assert asked == []


def test_the_checks_see_what_they_look_for(chromium: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(_PROBE)
    _, console, asked = _open(chromium, page, tmp_path)
    assert "seen" in console[0]
    assert asked == ["http://elsewhere.invalid/x.png"]
