"""The precision of matmuls: float32, or bfloat16 where the machine computes it natively."""

from __future__ import annotations

import torch

from compressor.config.values import MixedPrecision
from compressor.environment import bfloat16_instructions


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
