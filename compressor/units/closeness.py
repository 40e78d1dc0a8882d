"""Equality of tensors up to a tolerance."""

from __future__ import annotations

from torch import Tensor


def is_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether tensors have one shape and differ by at most a share of the largest magnitude that is expected."""
    if actual.shape != expected.shape:
        return False
    return not expected.numel() or bool((actual - expected).abs().max() <= tolerance * expected.abs().max())
