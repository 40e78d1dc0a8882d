"""Facts about a graph that do not depend on a runtime: its hash, its attentions, its products with constant weights.

Some of the products are quantized, and some may be returned to floats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import onnx_ir as ir

from compressor.targets.base import Widths
from graph_passes import GraphSite, data_files, find_attention, load, save
from graph_passes.block_sparse.function import is_block_sparse
from graph_passes.passes import Normalize, ReturnToFloats

_QUANTIZATION = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"))
_CHUNK = 1 << 20
_PRODUCTS = frozenset(("Gemm", "MatMul", "FusedMatMul", "Attention"))
"""Operators that multiply by a matrix of weights; `Attention` of ONNX Runtime projects queries, keys and values."""
_THROUGH = frozenset(("Reshape", "Transpose"))
"""Operators that may stand between a dequantized tensor and its product."""
_FLOAT_WIDTHS = "float_widths"


def fusible_attentions(model: ir.Model) -> list[GraphSite]:
    """The attentions of a graph except block-sparse ones, which no runtime fuses. The graph is normalized in place."""
    Normalize()(model)
    return [site for site in find_attention(model) if not is_block_sparse(site.output.producer())]


def is_quantized(model: ir.Model) -> bool:
    """Whether a graph has quantization nodes."""
    return any(node.op_type in _QUANTIZATION for node in model.graph)


def digest(*paths: Path) -> str:
    """Hash of the contents of files, in order."""
    sha = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                sha.update(chunk)
    return f"sha256:{sha.hexdigest()}"


def graph_digest(graph: Path) -> str:
    """Hash of a graph with its external data."""
    return digest(graph, *sorted(data_files(load(graph))))


def weighted_products(model: ir.Model) -> list[ir.Node]:
    """The products of the main graph that multiply by constant float weights, quantized or not."""
    return [node for node in model.graph if node.op_type in _PRODUCTS and _weights(node) is not None]


def quantized_products(model: ir.Model) -> list[ir.Node]:
    """The products with constant weights whose factors both are outputs of `DequantizeLinear`."""
    return [
        node
        for node in weighted_products(model)
        if _dequantizer(node.inputs[0]) is not None and _dequantizer(node.inputs[1]) is not None
    ]


def float_products(model: ir.Model) -> list[ir.Node]:
    """The products with constant weights that are not quantized."""
    quantized = set(quantized_products(model))
    return [node for node in weighted_products(model) if node not in quantized]


def products_by_widths(model: ir.Model) -> dict[Widths, list[ir.Node]]:
    """The products with constant weights by their widths, see `Widths`."""
    by_activations: dict[ir.Value | None, list[ir.Node]] = {}
    for node in weighted_products(model):
        by_activations.setdefault(_activations(node.inputs[0]), []).append(node)
    by_widths: dict[Widths, list[ir.Node]] = {}
    for nodes in by_activations.values():
        shapes = [_width(node) for node in nodes]
        by_widths.setdefault((shapes[0][0], sum(outputs for _, outputs in shapes)), []).extend(nodes)
    return by_widths


def mix(model: ir.Model, float_widths: Collection[Widths]) -> ir.Model:
    """A quantized graph whose products of some widths are in floats, with the values that their integers stand for.

    Args:
        model: the graph, which is edited in place.
        float_widths: the widths; the graph names them in its metadata.
    """
    ReturnToFloats(products_of(model, float_widths))(model)
    state_float_widths(model, float_widths)
    return model


def write_mixed(graph: Path, float_widths: Collection[Widths], out: Path) -> Path:
    """Write a quantized graph whose products of some widths are in floats; see `mix`.

    Returns:
        `out`; the graph itself where none of its products is both quantized and of these widths.
    """
    model = load(graph) if float_widths else None
    if model is None or not quantized_products(model):
        return graph
    save(mix(model, float_widths), out)
    return out


def products_of(model: ir.Model, widths: Collection[Widths]) -> list[str]:
    """Names of the products of some widths, those without a name left out."""
    return [
        node.name for key, nodes in products_by_widths(model).items() if key in widths for node in nodes if node.name
    ]


def state_float_widths(model: ir.Model, widths: Iterable[Widths]) -> None:
    """Write the widths of products that are in floats because int8 is slower into the metadata of a graph."""
    model.metadata_props[_FLOAT_WIDTHS] = json.dumps(sorted(widths))


def float_widths_of(model: ir.Model) -> tuple[Widths, ...]:
    """The widths that `state_float_widths` wrote."""
    return tuple((inputs, outputs) for inputs, outputs in json.loads(model.metadata_props.get(_FLOAT_WIDTHS, "[]")))


def _activations(value: ir.Value | None) -> ir.Value | None:
    """The tensor that a factor is computed from, before it is quantized."""
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type not in (*_THROUGH, "DequantizeLinear", "QuantizeLinear"):
        return value
    return _activations(producer.inputs[0])


def _width(node: ir.Node) -> tuple[int, int]:
    """Numbers of inputs and outputs of a product."""
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


def _weights(node: ir.Node) -> ir.Value | None:
    """The constant matrix that a product multiplies by: an initializer, dequantized or not."""
    factor = node.inputs[1] if len(node.inputs) > 1 else None
    dequantizer = _dequantizer(factor)
    value = dequantizer.inputs[0] if dequantizer is not None else factor
    constant = next((upstream for upstream in _upstream(value) if upstream.is_initializer()), None)
    if constant is None or constant.shape is None or len(constant.shape) != 2:
        return None
    is_float = constant.dtype is not None and constant.dtype.is_floating_point()
    return constant if is_float or dequantizer is not None else None


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    """The `DequantizeLinear` that computes a tensor, up to its layout."""
    producers = (upstream.producer() for upstream in _upstream(value))
    return next((node for node in producers if node is not None and node.op_type == "DequantizeLinear"), None)


def _upstream(value: ir.Value | None) -> Iterator[ir.Value]:
    """A tensor, and those that it is a transposed or reshaped copy of."""
    while value is not None:
        yield value
        producer = value.producer()
        value = producer.inputs[0] if producer is not None and producer.op_type in _THROUGH else None
