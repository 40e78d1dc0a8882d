"""Facts about a graph that do not depend on a runtime: its hash, its attentions, and its matmuls with constant weights.

A matmul with constant weights is quantized or in floats, and a quantized one can be returned to floats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from compressor.targets.base import Widths
from graph_passes import GraphSite, data_files, find_attention, load, save
from graph_passes.block_sparse.function import is_block_sparse
from graph_passes.passes import Normalize, ReturnToFloats

_QUANTIZATION = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"))
_MATMULS = frozenset(("Gemm", "MatMul", "FusedMatMul", "Attention"))
"""Operators that multiply by a matrix of weights; `Attention` of ONNX Runtime projects queries, keys and values."""
_LAYOUT = frozenset(("Reshape", "Transpose"))
"""Operators that may be between a dequantized tensor and its matmul."""
_FLOAT_WIDTHS = "float_widths"


def fusible_attentions(model: ir.Model) -> list[GraphSite]:
    """The attentions of a graph that are not block-sparse, which no runtime fuses; the graph is normalized in place."""
    Normalize()(model)
    return [site for site in find_attention(model) if not is_block_sparse(site.output.producer())]


def is_quantized(model: ir.Model) -> bool:
    """Whether a graph has quantization nodes."""
    return any(node.op_type in _QUANTIZATION for node in model.graph)


def stored_precision(model: ir.Model) -> Literal["fp32", "fp16", "bf16"]:
    """The precision that a graph in floats computes in, which its matrices are stored in."""
    names: dict[ir.DataType | None, Literal["fp16", "bf16"]]
    names = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}
    tensors = (value.const_value for value in model.graph.initializers.values())
    stored = {tensor.dtype for tensor in tensors if tensor is not None and len(tensor.shape) > 1}
    return next((names[dtype] for dtype in names if dtype in stored), "fp32")


def digest(*paths: Path) -> str:
    """Hash of the contents of files, in order."""
    sha = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: sha)
    return f"sha256:{sha.hexdigest()}"


def graph_digest(graph: Path) -> str:
    """Hash of a graph with its external data."""
    return digest(graph, *sorted(data_files(load(graph))))


def weight_matmuls(model: ir.Model) -> list[ir.Node]:
    """The matmuls of the main graph whose second factor is constant, quantized or not."""
    return [node for node in model.graph if node.op_type in _MATMULS and _has_weights(node)]


def quantized_matmuls(model: ir.Model) -> list[ir.Node]:
    """The matmuls with constant weights both of whose factors are outputs of `DequantizeLinear`."""
    return [node for node in weight_matmuls(model) if all(map(_dequantizer, node.inputs[:2]))]


def float_matmuls(model: ir.Model) -> list[ir.Node]:
    """The matmuls with constant weights that are not quantized."""
    quantized = set(quantized_matmuls(model))
    return [node for node in weight_matmuls(model) if node not in quantized]


def matmul_names(model: ir.Model) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the matmuls with constant weights that are quantized, and of those that are not."""
    return names_of(quantized_matmuls(model)), names_of(float_matmuls(model))


def names_of(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    """The names of nodes; empty for a node without a name."""
    return tuple(node.name or "" for node in nodes)


def matmuls_by_widths(model: ir.Model) -> dict[Widths, list[ir.Node]]:
    """The matmuls with constant weights by their widths; see `Widths`."""
    by_activations: dict[ir.Value | None, list[ir.Node]] = {}
    for node in weight_matmuls(model):
        by_activations.setdefault(_activations(node.inputs[0]), []).append(node)
    by_widths: dict[Widths, list[ir.Node]] = {}
    for nodes in by_activations.values():
        inputs, outputs = zip(*map(_inputs_and_outputs, nodes), strict=True)
        by_widths.setdefault((inputs[0], sum(outputs)), []).extend(nodes)
    return by_widths


def mix(model: ir.Model, float_widths: Collection[Widths]) -> ir.Model:
    """Return the matmuls of some widths to floats in a quantized graph, with their dequantized weights.

    Args:
        model: the graph, which is edited in place.
        float_widths: the widths, which are stored in the metadata of the graph.
    """
    ReturnToFloats(names_of_widths(model, float_widths))(model)
    write_float_widths(model, float_widths)
    return model


def write_mixed(graph: Path, float_widths: Collection[Widths], out: Path) -> Path:
    """Write a quantized graph with the matmuls of some widths in floats; see `mix`.

    Returns:
        `out`; or `graph`, where there are no widths or it has no quantized matmul.
    """
    model = load(graph) if float_widths else None
    if model is None or not quantized_matmuls(model):
        return graph
    save(mix(model, float_widths), out)
    return out


def names_of_widths(model: ir.Model, widths: Collection[Widths]) -> list[str]:
    """Names of the matmuls of some widths, except those without a name."""
    by_widths = matmuls_by_widths(model).items()
    return [node.name for key, nodes in by_widths if key in widths for node in nodes if node.name]


def write_float_widths(model: ir.Model, widths: Iterable[Widths]) -> None:
    """Store the widths of the matmuls that are in floats because they are slower in int8 in a graph's metadata."""
    model.metadata_props[_FLOAT_WIDTHS] = json.dumps(sorted(widths))


def read_float_widths(model: ir.Model) -> tuple[Widths, ...]:
    """The widths that `write_float_widths` wrote."""
    return tuple((inputs, outputs) for inputs, outputs in json.loads(model.metadata_props.get(_FLOAT_WIDTHS, "[]")))


def _activations(value: ir.Value | None) -> ir.Value | None:
    """The tensor that a factor is computed from, before it is quantized."""
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type not in (*_LAYOUT, "DequantizeLinear", "QuantizeLinear"):
        return value
    return _activations(producer.inputs[0])


def _inputs_and_outputs(node: ir.Node) -> tuple[int, int]:
    transposed = "transB" in node.attributes and node.attributes["transB"].as_int() == 1
    value = node.inputs[1]
    while value is not None and not value.is_initializer():
        producer = value.producer()
        assert producer is not None
        transposed ^= producer.op_type == "Transpose"
        value = producer.inputs[0]
    assert value is not None
    assert value.shape is not None
    rows, columns = (int(size) for size in value.shape.numpy())
    return (columns, rows) if transposed else (rows, columns)


def _has_weights(node: ir.Node) -> bool:
    """Whether the second factor is a constant matrix, in floats or dequantized."""
    factor = node.inputs[1] if len(node.inputs) > 1 else None
    dequantizer = _dequantizer(factor)
    value = dequantizer.inputs[0] if dequantizer is not None else factor
    constant = next((upstream for upstream in _upstream(value) if upstream.is_initializer()), None)
    if constant is None or constant.shape is None or len(constant.shape) != 2:
        return False
    return dequantizer is not None or (constant.dtype is not None and constant.dtype.is_floating_point())


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    """The `DequantizeLinear` that computes a tensor, possibly behind operators that change its layout."""
    producers = (upstream.producer() for upstream in _upstream(value))
    return next((node for node in producers if node is not None and node.op_type == "DequantizeLinear"), None)


def _upstream(value: ir.Value | None) -> Iterator[ir.Value]:
    """A tensor, and those that it is a transposed or reshaped copy of."""
    while value is not None:
        yield value
        producer = value.producer()
        value = producer.inputs[0] if producer is not None and producer.op_type in _LAYOUT else None
