"""GELU and normalization as the one operator that PyTorch has, where an exporter wrote several.

Exporters and optimizers write them in many forms: factors before or after, `Div` or `Mul` by a reciprocal, with casts.
A subgraph is therefore not compared with patterns: it is run on samples, and replaced by an operator that computes the
same. Exporters' forms of attention stay, because no rewrite holds for every mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from torch import Tensor

from compressor.graph.operators import MICROSOFT, executor, tensor_of

_ACTIVATIONS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "Erf": [("", "Gelu", {"approximate": "none"})],
    "Tanh": [("", "Gelu", {"approximate": "tanh"})],
    "Sigmoid": [(MICROSOFT, "QuickGelu", {"alpha": 1.0}), (MICROSOFT, "QuickGelu", {"alpha": 1.702})],
}
"""An operator within an activation -> the activations that contain it."""
_PARTS = {"Add", "Cast", "Div", "Erf", "Identity", "Mul", "Neg", "Pow", "Reciprocal", "ReduceMean", "Sigmoid", "Sqrt"}
_PARTS |= {"Sub", "Tanh"}
"""Operators of decomposed activations and normalizations."""
_LONGEST = 16
"""Maximum number of operators of a subgraph that is replaced."""
_WIDTH = 16
_HALF_TOLERANCE, _TOLERANCE = 2e-3, 2e-5
"""Largest difference if constants are rounded to 16 bits, and otherwise."""


def fuse(model: ir.Model) -> ir.Model:
    """A copy of a graph in which GELU, SiLU and normalizations over the last axis are one operator each.

    Tensors that the copy still computes, and weights, keep their names. The operators may be newer than the version
    that the graph imports: the copy is for `compressor.graph.operators`, not for other runtimes.

    Args:
        model: a graph whose local functions are inlined.
    """
    fused = model.clone()
    for node in list(fused.graph):
        if node.domain in ("", "ai.onnx"):
            if node.op_type in _ACTIVATIONS:
                _fuse_activation(node, fused.opset_imports[""])
            elif node.op_type == "Sqrt":
                _fuse_normalization(node, fused.opset_imports[""])
    common.RemoveUnusedNodesPass()(fused)
    return fused


def _fuse_activation(inner: ir.Node, opset: int) -> None:
    """Replace the activation around an `Erf`, `Tanh` or `Sigmoid`."""
    for y in _after(inner.outputs[0]):
        for x in _before(inner.inputs[0]):
            for domain, name, attributes in _ACTIVATIONS[inner.op_type]:
                if _computes(ir.node(name, [ir.val("x")], attributes, domain=domain), x, y, opset):
                    return _replace(y, ir.node(name, [x], attributes, domain=domain))
    return None


def _fuse_normalization(root: ir.Node, opset: int) -> None:
    """Replace the normalization around the root of a variance, with the weight and the bias that follow it.

    A normalization with a mean comes first: behind the subtraction of the mean there is one without.
    """
    for name in ("LayerNormalization", "RMSNormalization"):
        for y in _after(root.outputs[0]):
            if (scaled := _next_of_vector(y, "Mul")) is None:
                continue
            for x in _before(root.inputs[0]):
                for epsilon in _numbers(y, x):
                    attributes = {"axis": -1, "epsilon": epsilon}
                    if _computes(ir.node(name, [ir.val("x"), ir.val("weight")], attributes), x, y, opset):
                        shifted = _next_of_vector(scaled[1], "Add") if name == "LayerNormalization" else None
                        inputs = [x, scaled[0]] if shifted is None else [x, scaled[0], shifted[0]]
                        return _replace((shifted or scaled)[1], ir.node(name, inputs, attributes))
    return None


def _after(value: ir.Value | None) -> Iterator[ir.Value]:
    """The tensors that are computed from one alone or with others, until one that several nodes read."""
    for _ in range(_LONGEST):
        uses = [] if value is None else list(value.uses())
        if len(uses) != 1 or value is None or value.is_graph_output():
            return
        value = uses[0].node.outputs[0]
        yield value


def _before(value: ir.Value | None) -> list[ir.Value]:
    """A tensor and those that it is computed from by operators of `_PARTS`, the nearest first."""
    sources = [value] if value is not None else []
    for source in sources:
        node = source.producer()
        if node is None or node.op_type not in _PARTS or len(sources) > _LONGEST:
            continue
        sources += [x for x in node.inputs if x is not None and x not in sources and _number(x) is None]
    return sources


def _next_of_vector(value: ir.Value, operator: str) -> tuple[ir.Value, ir.Value] | None:
    """A vector that is the only one to be multiplied with a tensor or added to it, and the result."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.op_type != operator:
        return None
    vector = next((x for x in uses[0].node.inputs if x is not value), None)
    if vector is None or not vector.is_initializer() or vector.shape is None or len(vector.shape) != 1:
        return None
    return vector, uses[0].node.outputs[0]


def _number(value: ir.Value) -> Tensor | None:
    """The constant of one element that a tensor is, if it is one."""
    constant = ir.convenience.get_const_tensor(value)
    return tensor_of(constant) if constant is not None and constant.size == 1 else None


def _nodes_between(y: ir.Value, x: ir.Value) -> list[ir.Node]:
    """The nodes that compute y from x and numbers alone, in order; none where there are others, or too many."""
    nodes: dict[ir.Node, None] = {}

    def is_of_x(value: ir.Value) -> bool:
        node = value.producer()
        if value is x or _number(value) is not None or node in nodes:
            return True
        if node is None or node.op_type not in _PARTS or node.domain not in ("", "ai.onnx") or len(nodes) > _LONGEST:
            return False
        if not all(is_of_x(read) for read in node.inputs if read is not None):
            return False
        nodes[node] = None
        return True

    return list(nodes) if is_of_x(y) else []


def _numbers(y: ir.Value, x: ir.Value) -> list[float]:
    """The constants that y is computed from, besides x."""
    read = [v for node in _nodes_between(y, x) for v in node.inputs if v is not None and v is not x]
    return [float(number) for number in map(_number, read) if number is not None and number.is_floating_point()]


def _computes(whole: ir.Node, x: ir.Value, y: ir.Value, opset: int) -> bool:
    """Whether an operator computes y from x, with weights of one."""
    nodes = _nodes_between(y, x)
    sample = _sample(x, nodes)
    if not nodes or sample is None:
        return False
    values: dict[ir.Value, Tensor | None] = {x: sample}
    halved = False
    for node in nodes:
        for read in node.inputs:
            if read is not None and read not in values:
                number = values[read] = _number(read)
                halved = halved or (number is not None and number.dtype in (torch.float16, torch.bfloat16))
        results = executor(node, opset)([None if read is None else values[read] for read in node.inputs])
        values.update(zip(node.outputs, results, strict=True))
    (expected,) = executor(whole, opset)([sample, torch.ones(_WIDTH)][: len(whole.inputs)])
    actual = values[y]
    assert expected is not None
    if actual is None or actual.shape != expected.shape:
        return False
    tolerance = _HALF_TOLERANCE if halved else _TOLERANCE
    return bool((actual.double() - expected.double()).abs().max() <= tolerance)


def _sample(x: ir.Value, nodes: list[ir.Node]) -> Tensor | None:
    """Values of x whose rows differ in size, so that a small addend matters; None where its last axis is not known."""
    axes = [axis for node in nodes if node.op_type == "ReduceMean" for axis in _axes(node)]
    if x.shape is None and any(axis != -1 for axis in axes):
        return None
    rank = 3 if x.shape is None else len(x.shape)
    if any(axis % max(rank, 1) != rank - 1 for axis in axes):
        return None
    values = torch.randn([2] * max(rank - 1, 1) + [_WIDTH], generator=torch.Generator().manual_seed(0))
    return (values + 0.5) * torch.tensor([[4.0], [1e-3]])


def _axes(node: ir.Node) -> list[int]:
    """The axes of a reduction; those that are not known count as the first."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        number = _number(node.inputs[1])
        return [0] if number is None else [int(number)]
    return list(node.attributes.get_ints("axes", [0]))


def _replace(y: ir.Value, whole: ir.Node) -> None:
    """Compute y by another node, under its name."""
    last, (result,) = y.producer(), whole.outputs
    assert last is not None
    assert last.graph is not None
    name, result.type, result.shape = y.name, y.type, y.shape
    last.graph.insert_after(last, whole)
    ir.convenience.replace_all_uses_with(y, result, replace_graph_outputs=True)
    whole.name, y.name, result.name = last.name, f"{name}_in_parts", name
