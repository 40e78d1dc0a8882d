"""Context managers that silence libraries, whose relevant output reaches the user as errors and notes."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def quiet_tools() -> Iterator[None]:
    """Discard output, logs and warnings of exporters and graph rewriters, which are of use only to their authors.

    A graph that cannot be exported is printed whole on stderr by `torch.export`, in hundreds of lines.
    """
    disabled, discarded = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(discarded), redirect_stderr(discarded):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the logger and the progress bars of transformers, if it is loaded; both are restored on exit."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging as transformers_logging

    level, shows_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shows_bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence datasets and the client of the Hugging Face hub, retries included; both are restored on exit."""
    import datasets
    import huggingface_hub.utils as hub

    hub_level, level = hub.logging.get_verbosity(), datasets.logging.get_verbosity()
    hidden, hub_hidden = datasets.are_progress_bars_disabled(), hub.are_progress_bars_disabled()
    hub.logging.set_verbosity(logging.CRITICAL)
    datasets.logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    hub.disable_progress_bars()
    try:
        yield
    finally:
        hub.logging.set_verbosity(hub_level)
        datasets.logging.set_verbosity(level)
        if not hidden:
            datasets.enable_progress_bars()
        if not hub_hidden:
            hub.enable_progress_bars()


def one_line(error: BaseException | str, width: int = 200) -> str:
    """An error's message on one line, truncated to `width` characters; its class name if it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= width else f"{text[:width]}..."
