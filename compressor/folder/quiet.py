"""transformers without its bars and reports: what they say and matters comes back as an error or a note."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and nothing below an error on the terminal; as it was before, afterwards."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def one_line(error: BaseException, width: int = 200) -> str:
    """An error's message on one line of readable length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= width else f"{text[:width]}..."
