"""Interrupts that wait until a critical section is complete."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_deferred(*numbers: signal.Signals) -> Iterator[None]:
    """Deliver signals that arrive within the context at its end.

    Blocking a signal is not enough: another thread, e.g. of a runtime, receives it then, and Python still interrupts
    the main thread. Other threads are never interrupted.

    Args:
        numbers: the signals; Ctrl-C if there are none.
    """
    received: list[int] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    deferred = (numbers or (signal.SIGINT,)) if in_main_thread else ()
    handlers = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in deferred}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for arrived in dict.fromkeys(received):
            signal.raise_signal(arrived)
