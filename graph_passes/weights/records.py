"""Fingerprints of weights, which identify the weights that a plan belongs to in a graph of any exporter."""

from __future__ import annotations

import hashlib
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_LARGEST, _SMALLEST = 1e4, 2.0**-20
"""Magnitudes between which ONNX Runtime's converter to float16 only rounds; it may clip others to a bound."""
_DIGITS = 32

_Fingerprint = Annotated[str, Field(pattern=r"^(\d+(x\d+)*)?:[0-9a-f]{32}$")]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class WeightRecord:
    """The fingerprints of one parameter of a model.

    Attributes:
        original: of its values in the model folder of the run that wrote the plan.
        fitted: of the values that the plan belongs to; equal to `original` where the run did not change them.
    """

    original: _Fingerprint
    fitted: _Fingerprint

    @property
    def is_changed(self) -> bool:
        """Whether the run changed the parameter."""
        return self.original != self.fitted


def fingerprint(tensor: np.ndarray) -> str:
    """The shape of a floating-point tensor and a hash of its values, e.g. `384x1536:` and 32 hexadecimal digits.

    Values are rounded to float16 first, so that float32 and float16 copies of a weight have one fingerprint. A matrix
    and its transpose have different ones.
    """
    rounded = np.clip(tensor.astype(np.float32, copy=False), -_LARGEST, _LARGEST).astype(np.float16)
    rounded = np.where(np.abs(rounded) < _SMALLEST, np.float16(0), rounded)
    digest = hashlib.sha256(np.ascontiguousarray(rounded).data).hexdigest()
    return f"{'x'.join(map(str, tensor.shape))}:{digest[:_DIGITS]}"


def shape_of(values: str) -> tuple[int, ...]:
    """The shape of the tensor that has this fingerprint."""
    sizes = values.partition(":")[0]
    return tuple(int(size) for size in sizes.split("x")) if sizes else ()
