"""The processes of a training, as `accelerate launch` starts them."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import PartialState

_TIMEOUT = timedelta(days=7)
"""How long processes wait for each other: the main one prunes and builds engines for hours while others wait."""


def process_state() -> PartialState:
    """The state of this process, on the CPU where CUDA is not available."""
    return PartialState(cpu=not torch.cuda.is_available(), timeout=_TIMEOUT)


def process_count() -> int:
    """Number of processes of this run."""
    return process_state().num_processes
