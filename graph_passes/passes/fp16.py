"""Weights and arithmetic in half precision, for runtimes on a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from graph_passes.block_sparse.function import DOMAIN, NAME, rebuild_function
from graph_passes.block_sparse.masks import BlockMask
from graph_passes.files import load, save
from graph_passes.flow.concrete_shapes import Probe


def halve(path: Path) -> None:
    """Convert a graph in place; inputs and outputs keep their types.

    Numbers beyond half precision's range, such as a mask's lowest value, become the nearest that it has.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = load(path)
    if model.functions:
        _halve_functions(model)
        save(model, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of every number that it clips
        # Its own shape inference fails on what it does not know; the graph's shapes are inferred already.
        half = convert_float_to_float16(
            onnx.load(path), keep_io_types=True, disable_shape_infer=True, max_finite_val=65504.0
        )
    converted = ir.from_proto(half)
    converted.graph.sort()  # it writes the casts of floating inputs last
    for node in converted.graph:
        given = node.inputs[0] if node.op_type == "Cast" else None
        if given is not None and str(given.name).endswith("_cast_to_fp16"):
            given.dtype = ir.DataType.FLOAT  # what it leaves in fp32 it calls half as well
    save(converted, path)


def _halve_functions(model: ir.Model) -> None:
    """Make the bodies of block-sparse attention again, whose numbers the converter would leave as they are."""
    probe = Probe(model)
    for node in model.graph:
        if (node.domain, node.op_type) != (DOMAIN, NAME):
            continue
        function, mask = model.functions[node.op_identifier()], node.inputs[3]
        query, value = (probe.shape(node.inputs[place]) for place in (0, 2))
        assert mask is not None
        assert mask.const_value is not None
        assert query is not None
        assert value is not None
        names = [given.name for given in function.inputs]
        full = probe.shape(node.inputs[names.index("full")]) if "full" in names else None
        kept = BlockMask(
            mask.const_value.numpy().astype(np.bool_),
            node.attributes.get_int("block", 0),
            node.attributes.get_int("memory", 0),
        )
        half = rebuild_function(function, kept, (query[3], value[3]), full[1] if full else 0, ir.DataType.FLOAT16)
        model.functions[half.identifier()] = half
