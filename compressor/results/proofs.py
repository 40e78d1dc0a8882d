"""Comparisons of the products of a run."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import model_validator

from compressor.results.rows import Row, renamed_keys


class ProofStage(StrEnum):
    """Two consecutive products of a run that must compute the same function."""

    EXPORT = "gated model = reference graph"
    SHRINK = "reference graph = shrunk graph"
    PRODUCTS = "int8 products = products of their dequantized factors"
    """Computed by the runtime in int8, and by ONNX Runtime in floats; each product by itself."""
    BUILD = "shrunk graph = engine"
    BUILD_INT8 = "quantized graph = engine"
    FIXED_SHAPE = "graph = graph at a fixed shape"
    """A graph of the output folder, read by an installed runtime itself and compiled for a batch of one row alone."""


FLOAT_STAGES = (ProofStage.EXPORT, ProofStage.SHRINK, ProofStage.BUILD)
"""The proofs of an engine in floats, in order."""


VariantName = Literal["dense", "rewritten", "compressed"]
"""`dense`: every unit kept; `compressed`: what the plan keeps; `rewritten`: every unit kept, with the rewrites that the
compressed graph has too. All take the same path to an engine."""


class Proof(Row):
    """A comparison of two products of a run on the same inputs.

    `error` is the largest relative error over all outputs and inputs; `cases` describes the inputs, e.g. `batch 2,
    length 17, padded`. `failing` names the outputs whose error exceeds the tolerance.
    """

    stage: ProofStage
    variant: VariantName
    error: float
    tolerance: float
    cases: tuple[str, ...]
    failing: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _current_keys(cls, fields: Any) -> Any:
        """Rename the key `side` of version 0.1 to `variant`."""
        return renamed_keys(fields, {"side": "variant"})

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance
