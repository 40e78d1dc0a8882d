"""Dynamic quantization for ONNX Runtime: weights in int8, activations quantized by the range of each call."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line, quiet_tools
from compressor.targets.quantized_graph import weighted_products
from graph_passes import load, save
from graph_passes.passes import FoldWeights

INT8_KERNELS = frozenset(
    ("DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QAttention", "QGemm", "QLinearMatMul")
)
"""Operator types of ONNX Runtime that compute a matrix product in int8."""
_BIAS = 5
"""Input of `Attention` and of `MultiHeadAttention` that is added to the scores."""
_SHARED_ATTRIBUTES = frozenset(("num_heads", "unidirectional", "scale", "mask_filter_value"))
"""Attributes that both of these operators have."""
_SUFFIXES = ("projections", "sizes", "queries", "keys", "values")


def quantize_dynamically(fused: Path, out: Path, *, reduce_range: bool = False) -> tuple[str, ...]:
    """Quantize the products of a fused graph; scales are per output channel for weights, per tensor for activations.

    Fused attention stays fused. Without a mask its projections are quantized with it, as `QAttention`. That operator
    has no input for a bias of the scores, which onnxruntime's quantizer would leave out: with a mask, the projections
    become a product of their own, and the attention stays in floats.

    Args:
        fused: the graph, fused for ONNX Runtime.
        out: the file to write; it may be `fused`.
        reduce_range: whether weights use 7 of 8 bits, for processors whose sums of int8 products saturate.

    Returns:
        Names of the products that were to be quantized.

    Raises:
        InputError: onnxruntime's quantizer cannot quantize the graph.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = load(fused)
    # Weights are quantized only where they are initializers of the product.
    FoldWeights()(model)
    for node in list(model.graph):
        if node.op_type == "Attention":
            if _has_bias(node):
                _separate_projections(node)
            else:
                _omit_equal_sizes(node)
        elif node.op_type == "FusedMatMul":
            _transpose_weights(node)
    FoldWeights()(model)
    products = tuple(node.name or "" for node in weighted_products(model))
    with tempfile.TemporaryDirectory() as folder, quiet_tools():
        plain, quantized = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        save(model, plain)
        _forget_shapes(plain)
        try:
            quantize_dynamic(
                plain,
                quantized,
                per_channel=True,
                reduce_range=reduce_range,
                weight_type=QuantType.QInt8,
                # The fused operators have no shape inference, so that the types of their outputs are unknown.
                extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
                use_external_data_format=True,
            )
        except Exception as error:  # the quantizer raises any exception on graphs that it does not expect
            raise InputError(
                f"{fused}: onnxruntime cannot quantize it ({one_line(error)}); use --precision fp32",
                code=ErrorCode.RUNTIME_FAILED,
                path=fused,
            ) from error
        result = load(quantized)
        if lost := lost_dependencies(load(plain), result):
            raise InputError(
                f"{fused}: onnxruntime's quantizer drops inputs of nodes ({', '.join(lost[:3])}), and the graph would"
                " compute something else; use --precision fp32, or another target",
                code=ErrorCode.RUNTIME_FAILED,
                path=fused,
            )
        save(result, out)
    return products


def lost_dependencies(before: ir.Model, after: ir.Model) -> list[str]:
    """What nodes read in one graph, and the values of the same names do not depend on in another.

    Args:
        before: the graph, with all nodes on its top level.
        after: a graph in which some nodes are replaced; the names of the values that remain are the same.

    Returns:
        Each as `input -> output`, names of values. Constants are not counted.
    """
    names = {value.name for node in before.graph for value in node.outputs} | {v.name for v in before.graph.inputs}
    values = {value.name: value for node in after.graph for value in node.outputs}
    lost = []
    for node in before.graph:
        for output in (value for value in node.outputs if value.name in values):
            sources = _nearest(values[output.name], names)
            lost += [
                f"{value.name} -> {output.name}"
                for value in node.inputs
                if value is not None and value.name not in sources and not _is_constant(value)
            ]
    return lost


def _nearest(value: ir.Value, names: Collection[str | None]) -> set[str | None]:
    """Those of some named values that a value is computed from, without others in between."""
    reached: set[str | None] = set()
    waiting = [value]
    while waiting:
        producer = waiting.pop().producer()
        for source in () if producer is None else filter(None, producer.inputs):
            if source.name in names:
                reached.add(source.name)
            else:
                waiting.append(source)
    return reached


def _is_constant(value: ir.Value) -> bool:
    producer = value.producer()
    return value.is_initializer() or (producer is not None and producer.op_type == "Constant")


def _transpose_weights(node: ir.Node) -> None:
    """Replace a product by transposed weights by `MatMul`, which the quantizer knows."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    is_plain = attributes.pop("transB", 0) == 1 and attributes.pop("alpha", 1.0) == 1.0 and not any(attributes.values())
    weights, graph = node.inputs[1], node.graph
    if not is_plain or weights is None or not weights.is_initializer() or graph is None:
        return
    transposed = ir.node("Transpose", [weights], {"perm": (1, 0)}, name=f"{node.name}.weights")
    product = ir.node("MatMul", [node.inputs[0], transposed.outputs[0]], name=node.name)
    graph.insert_before(node, [transposed, product])
    output, value = node.outputs[0], product.outputs[0]
    transposed.outputs[0].name = f"{weights.name}.transposed"
    value.type, value.shape = output.type, output.shape
    name, output.name = output.name, None
    value.name = name
    ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _has_bias(node: ir.Node) -> bool:
    """Whether something is added to the scores of a fused attention, e.g. what masks the padding."""
    return len(node.inputs) > _BIAS and node.inputs[_BIAS] is not None


def _separate_projections(node: ir.Node) -> None:
    """Replace a fused attention by the product of its projections and the attention of these.

    An attention that reads a cache or lengths of its rows stays as it is, in floats: the quantizer leaves those alone
    that state the sizes of queries, keys and values.
    """
    x, weights, bias, *_ = node.inputs
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    sizes = attributes.pop("qkv_hidden_sizes", None)
    graph = node.graph
    assert graph is not None
    assert weights is not None
    assert weights.const_value is not None
    sizes = [weights.const_value.numpy().shape[1] // 3] * 3 if sizes is None else list(sizes)
    others = [value for position, value in enumerate(node.inputs) if position not in (0, 1, 2, _BIAS)]
    if any(value is not None for value in others) or not attributes.keys() <= _SHARED_ATTRIBUTES:
        node.attributes["qkv_hidden_sizes"] = ir.AttrInt64s("qkv_hidden_sizes", sizes)
        return
    product = ir.node("MatMul", [x, weights], name=node.name)
    lengths = ir.node("Constant", [], {"value": ir.tensor(np.array(sizes, np.int64))})
    split = ir.node("Split", [product.outputs[0], lengths.outputs[0]], {"axis": -1}, num_outputs=3)
    operands = [*split.outputs, bias, None, node.inputs[_BIAS]]
    attention = ir.node("MultiHeadAttention", operands, attributes, domain=node.domain, name=f"{node.name}.attention")
    graph.insert_before(node, [product, lengths, split, attention])
    for value, suffix in zip((product.outputs[0], lengths.outputs[0], *split.outputs), _SUFFIXES, strict=True):
        value.name = f"{node.outputs[0].name}.{suffix}"
    output, replaced = attention.outputs[0], node.outputs[0]
    output.type, output.shape = replaced.type, replaced.shape
    name, replaced.name = replaced.name, None
    output.name = name
    ir.convenience.replace_all_uses_with(replaced, output, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _omit_equal_sizes(node: ir.Node) -> None:
    """Remove the sizes of queries, keys and values where they are equal: `QAttention` derives them from the weights."""
    sizes = node.attributes.get("qkv_hidden_sizes")
    if sizes is not None and len(set(sizes.as_ints())) == 1:
        node.attributes.pop("qkv_hidden_sizes")


def _forget_shapes(path: Path) -> None:
    """Remove the shapes of inner tensors, which shape inference would compare with its own after names were reused."""
    proto = onnx.load(path, load_external_data=False)
    del proto.graph.value_info[:]
    onnx.save(proto, path)
