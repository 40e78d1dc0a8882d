"""The device on which units are ranked and weights refitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from compressor.training.processes import process_state

_ACTIVATION_BYTES = 4 << 30
"""GPU memory that statistics and refits of a model take besides its weights."""


@contextmanager
def on_accelerator(model: PreTrainedModel, copies: int = 2) -> Iterator[None]:
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
        model.to("cpu")  # type: ignore[arg-type]
