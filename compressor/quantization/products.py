"""The quantized products of a graph one by one: as graphs of their own, and what each costs in the outputs."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from compressor.progress import ProgressCallback
from compressor.quantization.portable import QuantizedGraph, quantize_graph
from compressor.targets.base import Feeds
from compressor.targets.graph_facts import quantized_products
from compressor.targets.onnxruntime import ort_session
from graph_passes import load, save
from graph_passes.passes import ReturnToFloats

PREFIX = "product:"
"""Beginning of the names of the outputs of `products_graph`."""
_EXAMINED_ROWS = 8
"""Calibration rows on which products are examined; each has many positions."""
_RUINED = 0.5
"""Relative error of half of the positions above which a product is ruined; it is a few hundredths otherwise."""
Outputs = Sequence[dict[str, np.ndarray]]


def names_of(model: ir.Model, outputs: Collection[str]) -> list[str]:
    """Names of the quantized products of a graph whose outputs in `products_graph` are among `outputs`."""
    return [node.name or "" for node in quantized_products(model) if f"{PREFIX}{node.outputs[0].name}" in outputs]


def activations_graph(model: ir.Model) -> ir.Model:
    """A graph whose outputs are the activations that its quantized products quantize; the model is edited in place."""
    model.graph.outputs[:] = list(_activations(model).values())
    return model


def products_graph(model: ir.Model, feeds: Sequence[Feeds] = ()) -> ir.Model:
    """A graph of the quantized products alone, each with its quantizers.

    Its inputs are the outputs of `activations_graph`, and inputs of the model that a product depends on otherwise; its
    outputs are those of the products, named `product:<tensor>`.

    Args:
        model: the quantized graph, which stays unchanged.
        feeds: outputs of `activations_graph` at several sizes. Axes of equal size are fixed in the new graph. Empty:
            the shapes are those that the graph states, if any.
    """
    activations = _activations(model)
    copies: dict[ir.Value | None, ir.Value | None] = {None: None}
    inputs: list[ir.Value] = []
    nodes: list[ir.Node] = []
    constants: list[ir.Value] = []

    def copy(value: ir.Value | None) -> ir.Value | None:
        """The copy of a tensor and of the nodes that compute it from activations and constants."""
        if value in copies or value is None:
            return copies[value]
        name, producer = str(value.name), value.producer()
        if name in activations:
            shape = _common_shape(name, [batch[name].shape for batch in feeds]) if feeds else value.shape
            copies[value] = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
            inputs.append(copies[value])  # type: ignore[arg-type]
        elif producer is not None:
            copy_node(producer)
        else:
            copies[value] = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
            (constants if value.is_initializer() else inputs).append(copies[value])  # type: ignore[arg-type]
        return copies[value]

    def copy_node(node: ir.Node, prefix: str = "") -> ir.Value:
        """The copy of a node; returns its first output."""
        operands = [copy(operand) for operand in node.inputs]
        copied = ir.Node(node.domain, node.op_type, operands, node.attributes.values(), name=node.name)
        nodes.append(copied)
        for output, original in zip(copied.outputs, node.outputs, strict=True):
            output.name, output.type, output.shape = f"{prefix}{original.name}", original.type, original.shape
            if not prefix:
                copies[original] = output
        return copied.outputs[0]

    # A product is copied even if its output is the activation of another one, which is an input.
    outputs = [copy_node(node, PREFIX) for node in quantized_products(model)]
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=constants,
        opset_imports=dict(model.graph.opset_imports),
        name="products",
    )
    return ir.Model(graph, ir_version=model.ir_version)


def _common_shape(name: str, shapes: Sequence[tuple[int, ...]]) -> ir.Shape:
    """The shape of a tensor, with names for the axes that differ."""
    axes = enumerate(zip(*shapes, strict=True))
    return ir.Shape([sizes[0] if len(set(sizes)) == 1 else f"{name}:{axis}" for axis, sizes in axes])


def _activations(model: ir.Model) -> dict[str, ir.Value]:
    """The float tensors that the first factors of the quantized products are quantized from, by name."""
    tensors: dict[str, ir.Value] = {}
    for node in quantized_products(model):
        value = node.inputs[0]
        while value is not None and (producer := value.producer()) is not None:
            value = producer.inputs[0]
            if producer.op_type == "QuantizeLinear":
                break
        if value is not None and value.name is not None:
            tensors[value.name] = value
    return tensors


def quantize_without_ruined(
    graph: Path, rows: Sequence[Feeds], out: Path, *, reduce_range: bool = False
) -> QuantizedGraph:
    """Quantize a float graph, and once more without the products that outliers ruin, where there are any.

    Args:
        graph: the graph; its file stays unchanged.
        rows: calibration rows, one batch each; products are examined on the first ones.
        out: the file to write.
        reduce_range: whether weights use 7 of 8 bits, see `quantize_graph`.

    Raises:
        TargetMissingError: NNCF is not installed.
        InputError: NNCF cannot quantize the graph, or there are no rows; see `quantize_graph`.
    """
    quantized = quantize_graph(graph, rows, out, reduce_range=reduce_range)
    ruined = ruined_products(quantized.path, rows[:_EXAMINED_ROWS])
    if not ruined:
        return quantized
    # Their weights were smoothed and rounded for int8, so that they do not merely drop their quantizers.
    quantized = quantize_graph(graph, rows, out, keep_float=ruined, reduce_range=reduce_range)
    left = tuple(name for name in quantized.in_float if name not in ruined)
    return dataclasses.replace(quantized, in_float=left, ruined=ruined)


def ruined_products(quantized: Path, rows: Sequence[Feeds]) -> tuple[str, ...]:
    """Names of the quantized products whose outputs, at half of the positions or more, have little left of the values.

    Each product is computed from the same activations, with these in int8 and in floats. An outlier dominates the norm
    of a whole tensor, so that errors are relative to each position.

    Args:
        quantized: the portable quantized graph.
        rows: batches of inputs.
    """
    ruined: list[str] = []
    # A ruined product passes on little of its outliers, so that later ones show only when it is in floats.
    while further := _ruined(ReturnToFloats(ruined)(load(quantized)).model, rows):
        ruined += further
    return tuple(ruined)


def _ruined(model: ir.Model, rows: Sequence[Feeds]) -> list[str]:
    """Names of the ruined products of a graph, computed from the activations that they have in it."""
    names = {f"{PREFIX}{node.outputs[0].name}": node.name or "" for node in quantized_products(model)}
    if not names:
        return []
    errors: dict[str, list[np.ndarray]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.onnx" for name in ("int8", "float", "activations")]
        save(products_graph(model), paths[0])
        save(ReturnToFloats(names.values())(products_graph(model)).model, paths[1])
        save(activations_graph(model), paths[2])
        run_int8, run_float, run = map(ort_session.unoptimized_runner, paths)
        for feeds in rows:
            operands = {**feeds, **run(feeds)}
            expected = run_float(operands)
            for name, output in run_int8(operands).items():
                errors[name].append(_position_errors(expected[name], output))
    ruined = [name for name, parts in errors.items() if np.median(np.concatenate(parts)) > _RUINED]
    return [names[output] for output in ruined]


def _position_errors(expected: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Norm of the difference over the norm of the expected values, over the last axis."""
    difference, norm = (np.linalg.norm(array, axis=-1).ravel() for array in (output - expected, expected))
    return np.where(norm > 0, difference / np.maximum(norm, np.finfo(np.float32).tiny), 0.0)


def rank_products(
    quantized: Path, float_graph: Path, rows: Sequence[Feeds], on_progress: ProgressCallback | None = None
) -> list[str]:
    """Names of the quantized products, the one whose return to floats helps most first.

    Each product is returned to floats alone, and the mean squared difference of all outputs to those of the float graph
    is measured, relative to the mean square of the latter. No labels are needed.

    Args:
        quantized: the portable quantized graph.
        float_graph: the graph that it was made from.
        rows: batches of inputs.
        on_progress: called with (products tried, products).
    """
    names = [node.name or "" for node in quantized_products(load(quantized))]
    run = ort_session.unoptimized_runner(float_graph)
    expected = [run(feeds) for feeds in rows]
    distances = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            model = ReturnToFloats({name})(load(quantized)).model
            path = Path(folder) / "graph.onnx"
            save(model, path)
            run = ort_session.unoptimized_runner(path)
            distances[name] = _distance(expected, [run(feeds) for feeds in rows])
            if on_progress is not None:
                on_progress(number + 1, len(names))
    return sorted(names, key=lambda name: distances[name])


def output_distance(quantized: Path, float_graph: Path, rows: Sequence[Feeds]) -> float:
    """Mean squared difference between the outputs of two graphs, relative to the mean square of the float graph's.

    Args:
        quantized: the quantized graph.
        float_graph: the graph that it was made from.
        rows: batches of inputs.
    """
    runs = map(ort_session.unoptimized_runner, (float_graph, quantized))
    expected, outputs = ([run(feeds) for feeds in rows] for run in runs)
    return _distance(expected, outputs)


def _distance(expected: Outputs, outputs: Outputs) -> float:
    """Mean squared difference over the mean square of the expected outputs, summed over the outputs."""
    total = 0.0
    for name in expected[0]:
        differences = sum(float(np.square(a[name] - b[name]).sum()) for a, b in zip(expected, outputs, strict=True))
        scale = sum(float(np.square(a[name]).sum()) for a in expected)
        total += differences / max(scale, 1e-30)
    return total
