"""The processes of a training, as `accelerate launch` starts them, and the device of each.

A run without a launcher is one process, which needs neither PyTorch nor accelerate.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from compressor.errors import CompressorError
from compressor.store import Processes
from graph_passes import GraphPassError

if TYPE_CHECKING:
    import torch
    from torch import nn

T = TypeVar("T")

_TIMEOUT = timedelta(days=7)
"""How long processes wait for each other: the main one prunes and builds engines for hours while others wait."""
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables by which launchers tell a process how many there are, as accelerate reads them."""
_ACTIVATION_BYTES = 4 << 30
"""GPU memory that statistics and refits of a model take besides its weights."""


class RunProcesses(Processes, Protocol):
    """The processes of a run, with their number and that of this process."""

    @property
    def num_processes(self) -> int: ...

    @property
    def process_index(self) -> int: ...

    def main_process_first(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class SingleProcess:
    """A run in one process."""

    is_main_process: bool = True
    num_processes: int = 1
    process_index: int = 0

    def wait_for_everyone(self) -> None:
        """Wait for nobody."""

    def main_process_first(self) -> AbstractContextManager[None]:
        """Nobody waits for this process."""
        return nullcontext()


def process_state() -> RunProcesses:
    """The state of this process among those of a launcher."""
    if max(int(os.environ.get(name, 1)) for name in _SIZES) > 1:
        return _accelerate_state()
    return SingleProcess()


def _accelerate_state() -> Any:
    """The state that accelerate has of this process, on the CPU where CUDA is not available."""
    import torch
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available(), timeout=_TIMEOUT)


def training_device() -> torch.device:
    """The device on which this process trains."""
    device: torch.device = _accelerate_state().device
    return device


def process_count() -> int:
    """Number of processes of this run."""
    return process_state().num_processes


def by_main(state: Processes, compute: Callable[[], T]) -> T:
    """What the main process computes while the others wait, in every process; the others end if it fails.

    Args:
        state: the processes, all of which call this.
        compute: returns a small result. If it raises a CompressorError or a GraphPassError, the main process does.
    """
    if process_count() == 1:
        return compute()
    from accelerate.utils import broadcast_object_list

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
    import torch

    try:
        if torch.cuda.is_available():
            needed = copies * sum(parameter.nbytes for parameter in model.parameters()) + _ACTIVATION_BYTES
            device = training_device()
            if torch.cuda.mem_get_info(device)[0] >= needed:
                model.to(device)
        yield
    finally:
        model.to("cpu")
