"""The latency gate in pytest: a fixture, and a marker for its options.

@pytest.mark.latency_gate(server="grpc://localhost:8001", max_slowdown="5%", p99="10ms")
def test_the_small_model_is_as_fast(latency_gate):
    latency_gate("small", baseline="dense", inputs="rows.tsv", tokenizer="out")
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from compressor.latency import CheckRequest, Verdict

_FILES = ("junit", "history", "plot")
_PATHS = ("inputs", "tokenizer", "save_baseline", "kernel")
_NAMES = ("model", "baseline", "expect")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "latency_gate(**options): options of the latency_gate fixture, those of `compress check`"
    )


@pytest.fixture
def latency_gate(request: pytest.FixtureRequest) -> Callable[..., Verdict]:
    """Check a model against a baseline; the test fails where the check does.

    `latency_gate(model, baseline=..., **options)`; options of `@pytest.mark.latency_gate(...)` are its defaults, the
    nearest marker first. They are named as the flags of `compress check`: server, max_slowdown (`"5%"` or 0.05), p99
    (`"10ms"` or milliseconds), inputs, tokenizer, expect, batch, seq, seconds, ...; `junit`, `history` and `plot` name
    files to write.

    Returns:
        The verdict, of a check that passed.
    """
    # Closest first: an option of the function's own marker wins over its class's and module's.
    defaults: dict[str, Any] = {}
    for marker in request.node.iter_markers("latency_gate"):
        why = ""
        if marker.args:
            why = f"{marker.args[0]!r} has no name; the marker takes options by name"
        elif "model" in marker.kwargs:
            why = "the marker names a model; the test does, latency_gate(MODEL)"
        if why:
            pytest.fail(f"latency_gate: {why}", pytrace=False)
        defaults = {**marker.kwargs, **defaults}

    def gate(model: str, **options: Any) -> Verdict:
        from compressor.errors import CompressorError
        from graph_passes.errors import GraphPassError

        try:
            return _checked({**defaults, **options, "model": model}, request.node.add_report_section)
        except (CompressorError, GraphPassError) as error:
            why = str(error)
        pytest.fail(why, pytrace=False)  # outside, or the error itself would be told beside it

    return gate


def _checked(options: dict[str, Any], report: Callable[[str, str, str], object]) -> Verdict:
    """The verdict of a check that passed; any verdict is a section of the test's report. Raises as
    `compressor.latency.gated` does."""
    from filelock import FileLock

    from compressor.latency import CheckArtifacts, check, gated

    files = {name: path for name in _FILES if (path := options.pop(name, None)) is not None}
    title = f"{options['model']} against {options.get('baseline')}"
    # Tests that run side by side (pytest-xdist) would time each other.
    with FileLock(Path(tempfile.gettempdir()) / f"compressor-latency-gate-{os.getuid()}.lock"):
        return gated(
            CheckArtifacts(**{name: Path(path) for name, path in files.items()}),
            title,
            lambda: check(_asked(options)),
            lambda found: report("call", f"latency gate: {title}", "\n".join(found.lines())),
        )


def _asked(options: dict[str, Any]) -> CheckRequest:
    """Raises:
    UsageError: an option that is none of `compress check`, or says nothing that it knows.
    """
    from compressor.cli.check import MILLISECONDS, SHARE, scenarios
    from compressor.cli.comma_list import CommaList
    from compressor.errors import UsageError
    from compressor.latency import CheckRequest

    convert: dict[str, Callable[[Any], Any]] = {
        "max_slowdown": lambda value: SHARE.convert(value, None, None),
        "p99": lambda value: MILLISECONDS.convert(value, None, None),
        "text_columns": lambda value: CommaList().convert(value, None, None),
        "scenario": lambda value: scenarios(None, None, value if isinstance(value, str) else ",".join(value)),
        **dict.fromkeys(_PATHS, Path),
        **dict.fromkeys(_NAMES, str),
    }
    asked = {
        name: convert[name](value) if name in convert and value is not None else value
        for name, value in options.items()
    }
    if "scenario" in asked:
        asked["scenarios"] = asked.pop("scenario")
    try:
        return CheckRequest(**asked)
    except TypeError as error:
        why = str(error).removeprefix("Asked.__init__() ")
        raise UsageError(f"latency_gate: {why}; options are those of compress check") from error
