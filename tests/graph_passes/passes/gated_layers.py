"""Layers of `tests.graph_passes.layers` whose gates hold given values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.attention.gate_initializers import find_gates
from graph_passes.passes import Normalize
from tests.graph_passes.layers import LAYERS


def gated_layer(name: str, gates: Sequence[float]) -> ir.Model:
    """A layer in the form that passes read, whose heads are multiplied by `gates`."""
    model = LAYERS[name].graph()
    Normalize()(model)
    set_gate(model, gates)
    return model


def set_gate(model: ir.Model, gates: Sequence[float], site: str = "a") -> None:
    """Write one value a head into the gate of a site, which may repeat it over the head's width."""
    value = find_gates(model.graph)[site]
    assert value.const_value is not None
    shape = value.const_value.numpy().shape
    content = np.repeat(np.array(gates, np.float32), int(np.prod(shape)) // len(gates)).reshape(shape)
    value.const_value = ir.Tensor(content, name=value.name)


def gate(model: ir.Model, site: str = "a") -> list[float]:
    """The elements of a gate."""
    tensor = find_gates(model.graph)[site].const_value
    assert tensor is not None
    elements: list[float] = tensor.numpy().reshape(-1).tolist()
    return elements
