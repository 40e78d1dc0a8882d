"""Dynamic quantization for ONNX Runtime: weights in int8, activations quantized by the range of each call."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

import onnx
import onnx_ir as ir

from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line, quiet_tools
from compressor.targets.base import Widths
from compressor.targets.graph_facts import names_of, names_of_widths, weight_matmuls, write_float_widths
from graph_passes import load, save
from graph_passes.attention.operands import has_score_bias
from graph_passes.passes import FoldWeights, SeparateProjections, UsePaddingMask
from graph_passes.passes.normalize import is_constant

INT8_KERNELS = frozenset(
    ("DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QAttention", "QGemm", "QLinearMatMul")
)
"""Operator types of ONNX Runtime that compute a matmul in int8."""


def quantize_dynamically(
    fused: Path, out: Path, *, reduce_range: bool = False, float_widths: Collection[Widths] = ()
) -> tuple[str, ...]:
    """Quantize the matmuls of a fused graph; scales are per output channel for weights, per tensor for activations.

    Fused attention stays fused. Without a mask, or with a padding mask, it is quantized with its projections, as
    `QAttention`. That operator has no input for a bias of the scores, which onnxruntime's quantizer would leave out:
    where an attention has such a bias, its projections become a separate matmul, and the attention stays in floats.

    Args:
        fused: the graph, fused for ONNX Runtime.
        out: the file to write; it may be `fused`.
        reduce_range: whether weights use 7 of 8 bits, for processors whose sums of int8 products saturate.
        float_widths: widths of matmuls that stay in floats.

    Returns:
        Names of the matmuls that the quantizer was requested to quantize.

    Raises:
        InputError: onnxruntime's quantizer cannot quantize the graph.
    """
    model = load(fused)
    # The quantizer reads weights only where they are initializers of the matmul.
    FoldWeights()(model)
    UsePaddingMask()(model)
    SeparateProjections()(model)
    for node in list(model.graph):
        # The quantizer skips attentions that state the sizes of queries, keys and values.
        if node.op_type == "Attention" and not has_score_bias(node):
            _omit_equal_sizes(node)
        elif node.op_type in ("FusedMatMul", "Gemm"):
            _as_matmul(node)
    FoldWeights()(model)
    in_float = frozenset(names_of_widths(model, float_widths))
    matmuls = tuple(name for name in names_of(weight_matmuls(model)) if name not in in_float)
    write_float_widths(model, float_widths)
    with tempfile.TemporaryDirectory() as folder:
        plain, quantized = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        save(model, plain)
        _quantize(plain, quantized, fused, reduce_range=reduce_range, in_float=in_float)
        result = load(quantized)
        if lost := lost_dependencies(model, result):
            text = (
                f"{fused}: onnxruntime's quantizer drops inputs of nodes ({', '.join(lost[:3])}), and the graph would"
                " compute something else; use --precision fp32, or another target"
            )
            raise InputError(text, code=ErrorCode.RUNTIME_FAILED, path=fused)
        save(result, out)
    return matmuls


def _quantize(plain: Path, quantized: Path, shown: Path, *, reduce_range: bool, in_float: Collection[str]) -> None:
    """Run onnxruntime's quantizer on a file, except on the matmuls `in_float`; messages name the file `shown`."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    _forget_shapes(plain)
    try:
        with quiet_tools():
            quantize_dynamic(
                plain,
                quantized,
                per_channel=True,
                reduce_range=reduce_range,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=sorted(in_float),
                # The fused operators have no shape inference, so that the types of their outputs are unknown.
                extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
                use_external_data_format=True,
            )
    except Exception as error:  # the quantizer raises any exception on graphs that it does not expect
        text = f"{shown}: onnxruntime cannot quantize it ({one_line(error)}); use --precision fp32"
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED, path=shown) from error


def _as_matmul(node: ir.Node) -> None:
    """Replace a `FusedMatMul` or `Gemm` with constant weights by a `MatMul` of the same name, and an `Add`.

    The quantizer does not know `FusedMatMul`. It splits a `Gemm` itself and names the product otherwise, so that one
    that is to stay in floats would be quantized.
    """
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    is_transposed = bool(attributes.pop("transB", 0))
    is_plain = all(attributes.pop(name, 1.0) == 1.0 for name in ("alpha", "beta")) and not any(attributes.values())
    (activation, weights), addends, graph = node.inputs[:2], node.inputs[2:], node.graph
    if not is_plain or weights is None or not weights.is_initializer() or graph is None:
        return
    added = []
    if is_transposed:
        added.append(ir.node("Transpose", [weights], {"perm": (1, 0)}, name=f"{node.name}.weights"))
        added[0].outputs[0].name = f"{node.outputs[0].name}.weights"  # several nodes may read the same weights
        weights = added[0].outputs[0]
    added.append(ir.node("MatMul", [activation, weights], name=node.name))
    output = node.outputs[0]
    if addends and addends[0] is not None:
        added[-1].outputs[0].name = f"{output.name}.product"
        added.append(ir.node("Add", [added[-1].outputs[0], addends[0]], name=f"{node.name}.bias"))
    graph.insert_before(node, added)
    value = added[-1].outputs[0]
    value.type, value.shape = output.type, output.shape
    name, output.name = output.name, None
    value.name = name
    ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _omit_equal_sizes(node: ir.Node) -> None:
    """Remove the sizes of queries, keys and values where they are equal: `QAttention` derives them from the weights."""
    sizes = node.attributes.get("qkv_hidden_sizes")
    if sizes is not None and len(set(sizes.as_ints())) == 1:
        node.attributes.pop("qkv_hidden_sizes")


def _forget_shapes(path: Path) -> None:
    """Remove the shapes of inner tensors, since shape inference fails where a name now belongs to another tensor."""
    proto = onnx.load(path, load_external_data=False)
    del proto.graph.value_info[:]
    onnx.save(proto, path)


def lost_dependencies(before: ir.Model, after: ir.Model) -> list[str]:
    """The inputs of nodes on which the outputs of these nodes do not depend any more after nodes were replaced.

    Args:
        before: the graph, with all nodes on its top level.
        after: the graph after some nodes were replaced; values that remain have the same names.

    Returns:
        For each lost input `input -> output`, with the names of both. Constants are not counted.
    """
    names = {value.name for node in before.graph for value in node.outputs} | {v.name for v in before.graph.inputs}
    values = {value.name: value for node in after.graph for value in node.outputs}
    lost = []
    for node in before.graph:
        # Outputs that a node omits have an empty name.
        for output in (value for value in node.outputs if value.name and value.name in values):
            sources = _nearest(values[output.name], names)
            lost += [
                f"{value.name} -> {output.name}"
                for value in node.inputs
                if value is not None and not is_constant(value) and not _is_read(value, sources)
            ]
    return lost


def _is_read(value: ir.Value, sources: Collection[str | None]) -> bool:
    """Whether a value is among some sources, or what it looks up, whose table the quantizer may have rounded, is."""
    node = value.producer()
    if value.name in sources or node is None or node.op_type != "Gather":
        return value.name in sources
    return all(source is None or is_constant(source) or source.name in sources for source in node.inputs)


def _nearest(value: ir.Value, names: Collection[str | None]) -> set[str | None]:
    """The names, among some names, of the values nearest upstream that a value is computed from."""
    reached: set[str | None] = set()
    pending = [value]
    while pending:
        producer = pending.pop().producer()
        for source in () if producer is None else filter(None, producer.inputs):
            if source.name in names:
                reached.add(source.name)
            else:
                pending.append(source)
    return reached
