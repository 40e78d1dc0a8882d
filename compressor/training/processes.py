"""The processes of a training, as `accelerate launch` starts them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from compressor.errors import CompressorError
from graph_passes import GraphPassError

T = TypeVar("T")

_TIMEOUT = timedelta(days=7)
"""How long processes wait for each other: the main one prunes and builds engines for hours while others wait."""


def process_state() -> PartialState:
    """The state of this process, on the CPU where CUDA is not available."""
    return PartialState(cpu=not torch.cuda.is_available(), timeout=_TIMEOUT)


def process_count() -> int:
    """Number of processes of this run."""
    return process_state().num_processes


def by_main(state: PartialState, compute: Callable[[], T]) -> T:
    """What the main process computes while the others wait, in every process; the others end if it fails.

    Args:
        state: the processes, all of which call this.
        compute: returns a small result. If it raises a CompressorError or a GraphPassError, the main process does.
    """
    results, error = list[T](), None
    if state.is_main_process:
        try:
            results.append(compute())
        except (CompressorError, GraphPassError) as raised:
            error = raised
    (shared,) = broadcast_object_list([results])
    if error is not None:
        raise error
    if not shared:
        sys.exit(0)  # the exit code of the command is that of the main process
    result: T = shared[0]
    return result


def refuse_processes(error: CompressorError) -> NoReturn:
    """Raise an error in the main process; the others end with its exit code, so that it is printed once."""
    if process_state().is_main_process:
        raise error
    sys.exit(error.exit_code)
