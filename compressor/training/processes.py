"""The processes of a training, as `accelerate launch` starts them."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import NoReturn

import torch
from accelerate import PartialState

from compressor.errors import CompressorError

_TIMEOUT = timedelta(days=7)
"""How long processes wait for each other: the main one prunes and builds engines for hours while others wait."""


def process_state() -> PartialState:
    """The state of this process, on the CPU where CUDA is not available."""
    return PartialState(cpu=not torch.cuda.is_available(), timeout=_TIMEOUT)


def process_count() -> int:
    """Number of processes of this run."""
    return process_state().num_processes


def refuse_processes(error: CompressorError) -> NoReturn:
    """Raise an error in the main process; the others end with its exit code, so that it is printed once."""
    if process_state().is_main_process:
        raise error
    sys.exit(error.exit_code)
