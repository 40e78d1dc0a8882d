"""The compiled kernel of block-sparse attention, for tests on machines with a compiler and headers."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import pytest

from compressor.errors import TargetMissingError
from compressor.targets.onnxruntime.cpu_kernel import compile_kernel

_ROOT = Path(__file__).parents[2]
_USUAL = Path(os.environ.get("ONNXRUNTIME_HEADERS", _ROOT / ".venv" / "headers" / "usr"))
HEADERS = _USUAL if _USUAL.is_dir() else None
"""Folder of ONNX Runtime's headers; None: where packages install them."""
_FOLDER = tempfile.TemporaryDirectory(prefix="kernel-")


@functools.cache
def compiled() -> Path:
    """The library, compiled once in a test process; skips the test if it cannot be compiled."""
    library = Path(_FOLDER.name) / "block_sparse.so"
    try:
        compile_kernel(library, HEADERS)
    except TargetMissingError as error:
        pytest.skip(str(error))
    return library
