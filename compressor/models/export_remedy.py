"""The remedy for an export that failed: the other form of attention, where that can be exported."""

from __future__ import annotations

from collections.abc import Callable

from compressor.errors import CompressorError, InputError
from compressor.units.hook import Attention


def with_other_form(error: InputError, trace: Callable[[Attention], object], attention: Attention) -> InputError:
    """The error of an export with its remedy, which was tried.

    Args:
        error: the error.
        trace: exports the model in a form of attention, or raises an error.
        attention: the form that failed.
    """
    other: Attention = "sdpa" if attention == "eager" else "eager"
    form: Attention | None = other
    remedy = f"the other form of attention can be exported (--attention {other})"
    try:
        trace(other)
    except CompressorError:
        form, remedy = None, "nor can the other form of attention; the exporter of transformers lacks this family"
    return InputError(f"{error}; {remedy}", code=error.code, remedy=form, **error.details)
