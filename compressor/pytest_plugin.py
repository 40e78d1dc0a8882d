"""The latency check in pytest: the fixture `latency_gate`, and a marker for its options.

@pytest.mark.latency_gate(server="grpc://localhost:8001", max_slowdown="5%", p99="10ms")
def test_the_small_model_is_as_fast(latency_gate):
    latency_gate("small", baseline="dense", inputs="rows.tsv", tokenizer="out")
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from compressor.latency import CheckArtifacts, CheckRequest, Verdict

LOCK_FILE = Path(tempfile.gettempdir()) / f"compressor-latency-check-{os.getuid()}.lock"
"""Held during a check: tests that run in parallel (pytest-xdist) would time each other."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "latency_gate(**options): options of the latency_gate fixture, those of `compress check`"
    )


@pytest.fixture
def latency_gate(request: pytest.FixtureRequest) -> Callable[..., Verdict]:
    """Check a model against a baseline; the test fails if the check fails.

    `latency_gate(model, baseline=..., **options)`. Options of `@pytest.mark.latency_gate(...)` are defaults; those of
    the closest marker have priority. Options have the names of the flags of `compress check`: server, max_slowdown
    (`"5%"` or 0.05), p99 (`"10ms"` or milliseconds), inputs, tokenizer, expect, batch, seq, seconds, ...; `junit`,
    `history` and `plot` name files to write.

    Returns:
        A function that runs a check and returns its verdict if it passed.
    """
    defaults: dict[str, Any] = {}
    for marker in request.node.iter_markers("latency_gate"):  # the closest first
        if marker.args:
            pytest.fail(f"latency_gate: {marker.args[0]!r} has no name; the marker takes named options", pytrace=False)
        if "model" in marker.kwargs:
            pytest.fail("latency_gate: the test names the model, latency_gate(MODEL), not the marker", pytrace=False)
        defaults = {**marker.kwargs, **defaults}

    def run(model: str, **options: Any) -> Verdict:
        from compressor.errors import CompressorError
        from graph_passes.errors import GraphPassError

        try:
            return run_check({**defaults, **options, "model": model}, request.node.add_report_section)
        except (CompressorError, GraphPassError) as error:
            reason = str(error)
        # Outside of the handler, since pytest would show the error as the cause of the failure.
        pytest.fail(reason, pytrace=False)

    return run


def run_check(
    options: Mapping[str, Any],
    add_section: Callable[[str, str, str], object],
    lock: AbstractContextManager[Any] | None = None,
) -> Verdict:
    """Run a check and add its verdict to the test's report as a section.

    Args:
        options: options of `compress check` by name, `model` and `baseline` among them.
        add_section: receives phase, title and text of the section.
        lock: held during the check; None: `LOCK_FILE`.

    Returns:
        The verdict, if the check passed.

    Raises:
        CompressorError, GraphPassError: as `compressor.latency.check_and_record`.
        UsageError: an unknown option.
    """
    from filelock import FileLock

    from compressor.latency import check, check_and_record

    title = f"{options['model']} against {options.get('baseline')}"
    request, files = split_options(options)
    with lock if lock is not None else FileLock(LOCK_FILE):
        return check_and_record(
            files,
            title,
            lambda: check(request()),
            lambda verdict: add_section("call", f"latency check: {title}", "\n".join(verdict.lines())),
        )


def split_options(options: Mapping[str, Any]) -> tuple[Callable[[], CheckRequest], CheckArtifacts]:
    """Divide options into a function that constructs the request, and the files to write.

    The request is constructed on demand, so that an error in it is recorded too.

    Raises:
        UsageError: an option that `compress check` does not have, or a file that cannot be written.
    """
    from compressor.errors import ErrorCode, UsageError, suggestion
    from compressor.latency import CheckArtifacts, CheckRequest

    names = (*CheckRequest.model_fields, *CheckArtifacts.model_fields)
    for name in options:
        if name not in names:
            raise UsageError(
                f"latency_gate: unknown option {name}; {suggestion(name, names)} (as for compress check)",
                code=ErrorCode.UNKNOWN_NAME,
                field=name,
            )
    files = CheckArtifacts(**{name: options[name] for name in CheckArtifacts.model_fields if name in options})
    values = {name: value for name, value in options.items() if name in CheckRequest.model_fields}
    return lambda: CheckRequest(**values), files
