"""The processes of a training, as `accelerate launch` starts them."""

from __future__ import annotations

import torch
from accelerate import PartialState


def process_state() -> PartialState:
    """The state of this process, on the CPU where CUDA is not available."""
    return PartialState(cpu=not torch.cuda.is_available())


def process_count() -> int:
    """Number of processes of this run."""
    return process_state().num_processes
