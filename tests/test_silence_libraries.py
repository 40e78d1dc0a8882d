"""Libraries are silent inside the contexts, and their settings are restored afterwards."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

from compressor.silence_libraries import one_line, quiet_tools, quiet_transformers


def test_libraries_are_silent_inside_and_restored_afterwards(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("a library")
    with quiet_tools():
        print("text")
        print("text", file=sys.stderr)
        log.error("text")
        warnings.warn("text", stacklevel=1)
    assert capsys.readouterr() == ("", "")
    assert not caplog.records
    log.error("afterwards")
    assert [record.message for record in caplog.records] == ["afterwards"]


def test_transformers_is_restored_after_an_error() -> None:
    from transformers.utils import logging as transformers

    def fail() -> None:
        with quiet_transformers():
            assert transformers.get_verbosity() == transformers.CRITICAL
            assert not transformers.is_progress_bar_enabled()
            raise KeyError

    before = transformers.get_verbosity(), transformers.is_progress_bar_enabled()
    with pytest.raises(KeyError):
        fail()
    assert (transformers.get_verbosity(), transformers.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("error", "line"), [(ValueError("a\n  b"), "a b"), (ValueError(), "ValueError"), ("x" * 9, "xxxxx...")]
)
def test_an_error_becomes_one_line(error: Exception | str, line: str) -> None:
    assert one_line(error, 5 if isinstance(error, str) else 200) == line
