"""The precision of matmuls: float32, or bfloat16 where the machine computes it natively."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from compressor.answers import MASK
from compressor.config.values import MixedPrecision
from compressor.environment import bfloat16_instructions
from compressor.models.forwards import forward_arguments, scored_logits_only

logger = logging.getLogger(__name__)

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


def usable_precision(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> MixedPrecision:
    """The precision in which the matmuls of a model are fastest, of those in which it runs.

    Under `torch.autocast`, which casts the inputs of matmuls alone, models fail whose code mixes types, such as DeBERTa
    and X-MOD. Weights of other types than float32 are computed in as they are.

    Args:
        inputs: inputs of the model, `[batch, ...]` each, on which it is tried.

    Raises:
        torch.OutOfMemoryError: the memory of the device does not suffice for them.
    """
    if model.dtype != torch.float32 or native_precision(model.device.type) == "no":
        return "no"
    try:
        with torch.no_grad(), autocast(model.device, "bf16"), scored_logits_only(model, inputs):
            model(**forward_arguments(model, inputs))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        logger.info("%s is computed in float32: %s", type(model).__name__, error)
        return "no"
    return "bf16"


def autocast(device: torch.device, precision: MixedPrecision) -> torch.autocast:
    """A context in which matmuls on a device have a precision.

    Weights are cast in every forward, so that they may change between forwards.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


@contextmanager
def training_autocast(device: torch.device, precision: MixedPrecision, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which forwards that gradients are computed of have matmuls of a precision.

    Args:
        batch: the inputs of the forwards, with a mask `[batch, position]` where rows have different lengths.
    """
    is_short = MASK in batch and batch[MASK].shape[-1] <= _PLAIN_POSITIONS
    is_plain = precision == "bf16" and device.type == "cpu" and is_short
    with autocast(device, precision), sdpa_kernel(SDPBackend.MATH) if is_plain else nullcontext():
        yield
