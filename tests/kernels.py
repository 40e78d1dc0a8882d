"""The compiled kernel of block-sparse attention, made once a process where a compiler and headers are at hand."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import pytest

from compressor.errors import TargetMissingError
from compressor.targets.onnxruntime.cpu_kernel import compile_kernel

HEADERS = Path(os.environ.get("ONNXRUNTIME_HEADERS", Path(__file__).parent.parent / ".venv" / "headers" / "usr"))
_FOLDER = tempfile.TemporaryDirectory(prefix="kernel-")


@functools.cache
def compiled() -> Path:
    """The library. Skips the test where it cannot be made."""
    library = Path(_FOLDER.name) / "block_sparse.so"
    try:
        compile_kernel(library, HEADERS if HEADERS.is_dir() else None)
    except TargetMissingError as error:
        pytest.skip(str(error))
    return library
