"""Expecting an error by its code and details."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from compressor.errors import CompressorError, ErrorCode, InputError


@contextmanager
def fails_with(
    code: ErrorCode, error: type[CompressorError] = InputError, **details: Any
) -> Iterator[pytest.ExceptionInfo[CompressorError]]:
    """Expect an error of this code with these details, whose message is one line that ends in a remedy."""
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code is code
    assert {name: caught.value.details.get(name) for name in details} == details
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message, "no remedy"
