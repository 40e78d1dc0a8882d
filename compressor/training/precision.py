"""The precision of matmuls: float32, or bfloat16 where the machine computes it natively."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from compressor.answers import MASK
from compressor.config.values import MixedPrecision
from compressor.environment import bfloat16_instructions

# oneDNN compiles a bfloat16 matmul for each shape and keeps 1,024 of them. The layers of a pruned model have different
# sizes, and batches different lengths, so that a training needs several thousand.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
_PLAIN_POSITIONS = 256
"""Number of positions up to which the backward of the fused attention in bfloat16 takes longer on a CPU than that of
matmuls and a softmax."""


def native_precision(device_type: str | None = None) -> MixedPrecision:
    """The precision in which a device computes matmuls fastest: bfloat16 where it does so natively.

    A V100 or T4 emulates bfloat16, more slowly than it computes in float32, and so do most processors.

    Args:
        device_type: `cpu`, `cuda` or another; None: `cuda` where it is available, else `cpu`.
    """
    if (device_type or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda":
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_native = device_type in ("cpu", None) and bool(bfloat16_instructions())
    return "bf16" if is_native else "no"


def native_autocast(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.autocast:
    """A context in which forwards compute matmuls in the precision that a device is fastest in.

    Weights are cast in every forward, so that they may change between forwards.

    Args:
        device: the device of the model.
        dtype: type of its weights; matmuls of types other than float32 are computed in this type.
    """
    is_reduced = dtype == torch.float32 and native_precision(device.type) == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=is_reduced, cache_enabled=False)


def autocast(device: torch.device, precision: MixedPrecision) -> torch.autocast:
    """A context in which matmuls on a device have a precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def training_autocast(device: torch.device, precision: MixedPrecision, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which forwards that gradients are computed of have matmuls of a precision.

    Args:
        batch: the inputs of the forwards, with a mask `[batch, position]` where rows have different lengths.
    """
    is_short = MASK in batch and batch[MASK].shape[-1] <= _PLAIN_POSITIONS
    with autocast(device, precision):
        if precision == "bf16" and device.type == "cpu" and is_short:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        else:
            yield
