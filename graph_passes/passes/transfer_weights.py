"""Transfer weights: give a graph the weights that a plan belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx_ir as ir

from graph_passes.errors import GraphErrorCode, PlanError
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.weights import MatchedWeight, StoredWeight, WeightRecord, fingerprint


class TransferWeights(GraphPass[Names]):
    """Replace the original values of parameters by those that a plan belongs to.

    Cases:
        1. An initializer holds the original values of a parameter that the run changed: it gets the fitted ones, in its
           own layout and element type. They are read again when the graph is written.
        2. It holds the fitted values already: it stays.

    The report has the names of the parameters that have other values now.

    Args:
        records: name of a parameter -> its fingerprints.
        matches: name of a parameter -> its initializers, see `match_weights`.
        weights: name of a parameter -> its fitted values; None: they are not available.

    Raises (from `call`):
        PlanError: the fitted values of a parameter are missing, or differ from the plan's record.
    """

    def __init__(
        self,
        records: Mapping[str, WeightRecord],
        matches: Mapping[str, MatchedWeight],
        weights: Mapping[str, np.ndarray] | None,
    ) -> None:
        self.records = records
        self.matches = matches
        self.weights = weights

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        names = [name for name, match in self.matches.items() if match.original]
        parameters: dict[WeightRecord, str] = {}
        for name in names:
            # A tied parameter has several names, and the file may have only one of them.
            if self.weights is not None and name in self.weights:
                parameters[self.records[name]] = name
        for name in names:
            record = self.records[name]
            if self.weights is None or record not in parameters:
                raise PlanError(
                    f"{name}: the graph has its original values, but the plan belongs to refitted values; put the "
                    f"model.safetensors of the plan's run into the folder of the plan",
                    code=GraphErrorCode.WEIGHTS_MISSING,
                    parameter=name,
                )
            if fingerprint(self.weights[parameters[record]]) != record.fitted:
                raise PlanError(
                    f"{name}: the weights in the folder of the plan are from another run; put the model.safetensors of "
                    f"the plan's own run there",
                    code=GraphErrorCode.MODEL_MISMATCH,
                    parameter=name,
                )
        for name in names:
            for stored in self.matches[name].original:
                assert self.weights is not None
                _set_content(stored, self.weights, parameters[self.records[name]])
        return changed(model, names)


def _set_content(stored: StoredWeight, weights: Mapping[str, np.ndarray], name: str) -> None:
    """Case 1."""
    tensor = stored.value.const_value
    assert tensor is not None
    read = partial(_read, weights, name, stored, tensor.dtype)
    stored.value.const_value = ir.LazyTensor(read, tensor.dtype, ir.Shape(tensor.shape.numpy()), name=stored.value.name)


def _read(weights: Mapping[str, np.ndarray], name: str, stored: StoredWeight, dtype: ir.DataType) -> ir.Tensor:
    content = weights[name].T if stored.transposed else weights[name]
    content = np.ascontiguousarray(content.astype(np.float32).astype(dtype.numpy()))
    return ir.Tensor(content, dtype=dtype, name=stored.value.name)
