"""The processes of a training, as `accelerate launch` starts them, and the device of each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import nn

from compressor.errors import CompressorError
from graph_passes import GraphPassError

T = TypeVar("T")

_TIMEOUT = timedelta(days=7)
"""How long processes wait for each other: the main one prunes and builds engines for hours while others wait."""


_ACTIVATION_BYTES = 4 << 30
"""GPU memory that statistics and refits of a model take besides its weights."""


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


@contextmanager
def on_accelerator(model: nn.Module, copies: int = 2) -> Iterator[None]:
    """Move a model to the GPU of this process, where there is one that has room for it; back to the CPU on exit.

    Room is needed for copies of the weights and for activations. A model that does not fit stays on the CPU.

    Args:
        model: the model, on the CPU.
        copies: how many times its weights have to fit, itself included: twice for a refit, which reads the activations
            of the model before the refit.
    """
    try:
        if torch.cuda.is_available():
            needed = copies * sum(parameter.nbytes for parameter in model.parameters()) + _ACTIVATION_BYTES
            device = process_state().device
            if torch.cuda.mem_get_info(device)[0] >= needed:
                model.to(device)
        yield
    finally:
        model.to("cpu")
