"""A graph of one example, repeated: each copy gates the units of another axis and sums over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import onnx.reference
import onnx_ir as ir
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph, NotImplemented

from graph_passes.flow.concrete_shapes import Probe, Shape
from graph_passes.tape import Tape, add_initializer
from tests.graph_passes.graphs import Feeds, draw, graph, run_all


@dataclasses.dataclass(frozen=True)
class Example:
    """Nodes around one operator, as ONNX text.

    An axis is named by a tensor and its position: `y2` is the last axis of `y [B, 4, 6]`.

    Attributes:
        nodes: the nodes; tensors that none of them reads are the outputs, unless their names begin
            with an underscore.
        inputs: declarations of the tensors that they read. B and S are free sizes. Units of the other axes can be
            removed, since these tensors are computed from weights.
        weights: declarations of initializers; those without content are random.
        cut: the axes from which units are removed. Units of inputs are gated before the nodes, and all outputs are
            summed over; units of outputs are gated after them.
        whole: the axes of `cut` whose dropped units are not in the inputs, or stay in them.
        shared: the axes of `cut` whose dropped units stay computed, because a norm reads all of them.
        opset: version of the operator set.
        width: number of elements of a unit, on axes that hold several such units.
        low: smallest value of the inputs, of which the largest is 1.
    """

    nodes: str
    inputs: str = "float[B, 4, 6] x"
    weights: str = ""
    cut: str = "y1 y2"
    whole: str = ""
    shared: str = ""
    opset: int = 18
    width: int = 1
    low: float = -1.0


def gated_copies(example: Example, seed: int = 0) -> tuple[ir.Model, list[str]]:
    """A graph with one copy of an example for each axis of its inputs and outputs that holds several units.

    Gates of some units are zero, those of the others are random. The gate of `y2` is `y2.head_gate`.

    Returns:
        The graph, and the axes that are gated.
    """
    pattern = graph(example.nodes, example.weights, inputs=example.inputs, outputs="", opset=example.opset, seed=seed)
    copies = _Copies(example, pattern, np.random.default_rng(seed))
    results = [
        value
        for node in pattern.graph
        for value in node.outputs
        if value.name and not value.uses() and not value.name.startswith("_")
    ]
    for value in pattern.graph.inputs:
        for axis, _ in copies.unit_axes(value):
            copies.add(f"{value.name}{axis}", {value: axis}, results)
    for axis, size in sorted({pair for value in results for pair in copies.unit_axes(value)}):
        of_size = {value: axis for value in results if (axis, size) in copies.unit_axes(value)}
        copies.add(f"{next(iter(of_size)).name}{axis}", of_size, results)
    return copies.finish(), copies.axes


class _Copies:
    """Copies of a graph whose axes are gated, in this graph."""

    def __init__(self, example: Example, pattern: ir.Model, rng: np.random.Generator) -> None:
        self.model, self.axes = pattern, list[str]()
        self._example, self._rng, self._probe, self._tape = example, rng, Probe(pattern), Tape()
        self._nodes = list(pattern.graph)
        self._inputs = {value: self._input(value) for value in pattern.graph.inputs if self.unit_axes(value)}
        self._sources = list(pattern.graph.inputs)
        self._results: list[ir.Value] = []

    def unit_axes(self, value: ir.Value) -> list[tuple[int, int]]:
        """The axes of a tensor that hold several elements, whatever the sizes of the graph's inputs, with the size."""
        fixed = ((axis, size) for axis, size in enumerate(self._shape(value)) if self._probe.fixed(value, axis))
        return [(axis, size) for axis, size in fixed if size > 1]

    def _shape(self, value: ir.Value) -> Shape:
        shape = self._probe.shape(value)
        assert shape is not None, f"{value.name} has no shape"
        return shape

    def _factor(self, name: str, value: ir.Value, axes: Sequence[int], content: np.ndarray) -> ir.Value:
        """An initializer that varies along some axes of a tensor."""
        shape = [size if axis in axes else 1 for axis, size in enumerate(self._shape(value))]
        return add_initializer(self.model.graph, name, content.reshape(shape).astype(np.float32))

    def _input(self, value: ir.Value) -> tuple[ir.Value, ir.Value]:
        """An input of free sizes alone, and the weight that it is multiplied by to give an input of the example."""
        assert value.shape is not None
        sizes = [1 if isinstance(size, int) else size for size in value.shape]
        kind = ir.TensorType(ir.DataType.FLOAT)
        source = ir.Value(name=f"{value.name}.source", shape=ir.Shape(sizes), type=kind)
        axes = [axis for axis, _ in self.unit_axes(value)]
        count = int(np.prod([size for _, size in self.unit_axes(value)]))
        content = self._rng.uniform(self._example.low, 1.0, count)
        return source, self._factor(f"{value.name}.weight", value, axes, content)

    def _gated(self, site: str, value: ir.Value, copy: ir.Value, axis: int) -> ir.Value:
        """A tensor multiplied by the gate of its units."""
        name, size, width = f"{site}.head_gate", self._shape(value)[axis], self._example.width
        if name not in self.model.graph.initializers:
            width = width if size > width and size % width == 0 else 1
            units = size // width
            kept = self._rng.permutation(units) < self._rng.integers(1, units)
            gate = np.repeat(kept * self._rng.uniform(0.5, 2.0, units), width)
            self._factor(name, value, [axis], gate)
        return self._tape("Mul", copy, self.model.graph.initializers[name])

    def add(self, site: str, gated: Mapping[ir.Value, int], results: Sequence[ir.Value]) -> None:
        """Add a copy of the nodes, with gates on axes of some tensors."""
        op, copies = self._tape, dict[ir.Value | None, ir.Value | None]()
        for value, (source, weight) in self._inputs.items():
            copy = op("Mul", source, weight)
            self._name(copy, f"{site}.{value.name}")
            copy = self._gated(site, value, copy, gated[value]) if value in gated else copy
            copies[value] = self._typed(copy, value.dtype)
        for position, node in enumerate(self._nodes):
            read = [copies.get(value, value) for value in node.inputs]
            outputs = op.op_multi_out(
                node.op_type, read, node.attributes, domain=node.domain, num_outputs=len(node.outputs)
            )
            self._name(outputs[0], f"{site}.{position}")
            copies.update(zip(node.outputs, outputs, strict=True))
        for value in results:
            result = copies[value]
            assert result is not None
            result = result if self._probe.dtype(value) == ir.DataType.FLOAT else op("Cast", result, to=1)
            result = self._gated(site, value, result, gated[value]) if value in gated else result
            summed = [gated[value]] if value in gated else []
            if gated.keys() <= self._inputs.keys():
                summed = [axis for axis in range(len(self._shape(value))) if self._probe.fixed(value, axis)]
            if summed:
                content = self._rng.normal(size=int(np.prod([self._shape(value)[axis] for axis in summed])))
                result = op("Mul", result, self._factor(f"{site}.{value.name}.factors", value, summed, content))
                attributes, inputs = ({}, [op.ints(summed)]) if self._example.opset >= 13 else ({"axes": summed}, [])
                result = op("ReduceSum", result, *inputs, keepdims=0, **attributes)
            self._results.append(result)
        self.axes.append(site)

    def _typed(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """Random floats as another type."""
        op = self._tape
        if dtype == ir.DataType.FLOAT:
            return value
        if dtype == ir.DataType.BOOL:
            return op("Greater", value, op.constant(np.array(0, np.float32)))
        return op("Cast", op("Mul", value, op.constant(np.array(100, np.float32))), to=dtype)

    def _name(self, value: ir.Value, name: str) -> None:
        node = value.producer()
        assert node is not None
        node.name = name

    def finish(self) -> ir.Model:
        """The graph of the copies, without the example."""
        model = self.model
        model.graph.remove(self._nodes, safe=False)
        model.graph.extend(self._tape.nodes)
        model.graph.inputs[:] = [self._inputs[value][0] if value in self._inputs else value for value in self._sources]
        for position, value in enumerate(self._results):
            value.name, value.type = f"result{position}", ir.TensorType(ir.DataType.FLOAT)
        model.graph.outputs[:] = self._results
        return model


def elements(model: ir.Model, axis: str) -> int:
    """Number of elements of the float weights of the copy that gates an axis."""
    copy = [node for node in model.graph if (node.name or "").startswith(f"{axis}.")]
    weights = {
        value.const_value for node in copy for value in node.inputs if value is not None and value.is_initializer()
    }
    return sum(weight.size for weight in weights if weight is not None and weight.dtype.is_floating_point())


def evaluate(model: ir.Model, cases: Sequence[Feeds]) -> list[list[np.ndarray]]:
    """Outputs of a graph in ONNX Runtime, or in ONNX's reference evaluator where that has no kernel for an operator."""
    try:
        return run_all(model, cases)
    except (Fail, InvalidGraph, NotImplemented):
        evaluator = onnx.reference.ReferenceEvaluator(ir.to_proto(model))
        return [[np.asarray(output) for output in evaluator.run(None, dict(feeds))] for feeds in cases]


def cases(model: ir.Model, sizes: Sequence[Mapping[str, int]]) -> list[Feeds]:
    """Positive inputs of a graph for each assignment of its free sizes."""
    drawn = [draw(model, assignment) for assignment in sizes]
    return [
        {name: np.abs(content) if content.dtype.kind == "f" else content for name, content in feeds.items()}
        for feeds in drawn
    ]
