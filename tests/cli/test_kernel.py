"""`compress kernel` compiles a library once, and replaces it only with `--force`."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.errors import ErrorCode
from tests.command import compress
from tests.targets.kernels import HEADERS, compiled


def test_a_library_is_compiled_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compiled()
    include = () if HEADERS is None else ("--include", HEADERS)
    out = tmp_path / "kernel.so"
    result = compress(capfd, "kernel", "-o", out, *include, "--json", "--quiet")
    assert result.code == 0, result.err
    assert result.json["error"] < 1e-5
    library = out.read_bytes()
    repeated = compress(capfd, "kernel", "-o", out, *include)
    assert (repeated.code, repeated.error_code) == (2, ErrorCode.OUTPUT_EXISTS)
    assert out.read_bytes() == library
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.so"]
