"""The quantized matmuls of a graph in isolation, matmuls that quantization ruins, and their effect on the outputs."""

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
from compressor.targets.graph_facts import names_of, quantized_matmuls
from compressor.targets.onnxruntime import ort_session
from graph_passes import load, save
from graph_passes.passes import ReturnToFloats

PREFIX = "product:"
"""Beginning of the names of the outputs of `matmuls_graph`."""
_EXAMINED_BATCHES = 8
"""Number of batches of calibration examples on which matmuls are examined; each has many tokens."""
_RUINED = 0.5
"""Median relative error over tokens above which a matmul is ruined; usual errors are a few hundredths."""
Outputs = Sequence[dict[str, np.ndarray]]


def matmul_names(model: ir.Model, outputs: Collection[str]) -> list[str]:
    """Names of the quantized matmuls of a graph from the names of their outputs in `matmuls_graph`."""
    return [node.name or "" for node in quantized_matmuls(model) if f"{PREFIX}{node.outputs[0].name}" in outputs]


def activations_graph(model: ir.Model) -> ir.Model:
    """A graph that outputs the activations of its quantized matmuls in floats; the model is edited in place."""
    model.graph.outputs[:] = list(_activations(model).values())
    return model


def matmuls_graph(model: ir.Model, feeds: Sequence[Feeds] = ()) -> ir.Model:
    """A graph of the quantized matmuls only, each with its quantizers.

    Its inputs are the outputs of `activations_graph`, and inputs of the model on which a matmul depends otherwise; its
    outputs are those of the matmuls, named `product:<tensor>`.

    Args:
        model: the quantized graph, which stays unchanged.
        feeds: outputs of `activations_graph` at several sizes; an axis is fixed if its size is the same in all. Empty:
            inputs have the shapes that the graph states.
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
        """Copy a node, and return the first output of the copy."""
        operands = [copy(operand) for operand in node.inputs]
        copied = ir.Node(node.domain, node.op_type, operands, node.attributes.values(), name=node.name)
        nodes.append(copied)
        for output, original in zip(copied.outputs, node.outputs, strict=True):
            output.name, output.type, output.shape = f"{prefix}{original.name}", original.type, original.shape
            if not prefix:
                copies[original] = output
        return copied.outputs[0]

    # A matmul is copied even if its output is the activation of another matmul, which is an input.
    outputs = [copy_node(node, PREFIX) for node in quantized_matmuls(model)]
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
    """The float tensors that the first factors of the quantized matmuls are quantized from, by name."""
    tensors: dict[str, ir.Value] = {}
    for node in quantized_matmuls(model):
        value = node.inputs[0]
        while value is not None and (producer := value.producer()) is not None:
            value = producer.inputs[0]
            if producer.op_type == "QuantizeLinear":
                break
        if value is not None and value.name is not None:
            tensors[value.name] = value
    return tensors


def quantize_without_ruined(
    graph: Path, examples: Sequence[Feeds], out: Path, *, reduce_range: bool = False
) -> QuantizedGraph:
    """Quantize a float graph, and quantize it again without the matmuls that outliers ruin, if there are any.

    Args:
        graph: the graph; its file stays unchanged.
        examples: batches of calibration examples; matmuls are examined on the first batches.
        reduce_range: whether weights use 7 of 8 bits, see `quantize_graph`.

    Raises:
        TargetMissingError: NNCF is not installed.
        InputError: NNCF cannot quantize the graph, or there are no examples; see `quantize_graph`.
    """
    quantized = quantize_graph(graph, examples, out, reduce_range=reduce_range)
    ruined = ruined_matmuls(quantized.path, examples[:_EXAMINED_BATCHES])
    if not ruined:
        return quantized
    # Without their quantizers they would still have weights that were smoothed and rounded for int8.
    quantized = quantize_graph(graph, examples, out, keep_float=ruined, reduce_range=reduce_range)
    in_float = tuple(name for name in quantized.in_float if name not in ruined)
    return dataclasses.replace(quantized, in_float=in_float, ruined=ruined)


def ruined_matmuls(quantized: Path, batches: Sequence[Feeds]) -> tuple[str, ...]:
    """Names of the quantized matmuls whose outputs have large relative errors for half of the tokens or more.

    Each matmul is computed in int8 and in floats from the same activations. Errors are relative to the norm of each
    token, since an outlier dominates the norm of a whole tensor.
    """
    ruined: list[str] = []
    # Outliers hardly get through a ruined matmul, so that later ruined matmuls show only when it is in floats.
    while further := _ruined(ReturnToFloats(ruined)(load(quantized)).model, batches):
        ruined += further
    return tuple(ruined)


def _ruined(model: ir.Model, batches: Sequence[Feeds]) -> list[str]:
    """Names of the matmuls of a graph that are ruined with its activations."""
    names = {f"{PREFIX}{node.outputs[0].name}": node.name or "" for node in quantized_matmuls(model)}
    if not names:
        return []
    errors: dict[str, list[np.ndarray]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.onnx" for name in ("int8", "float", "activations")]
        save(matmuls_graph(model), paths[0])
        save(ReturnToFloats(names.values())(matmuls_graph(model)).model, paths[1])
        save(activations_graph(model), paths[2])
        run_int8, run_float, run = map(ort_session.unoptimized_runner, paths)
        for feeds in batches:
            operands = {**feeds, **run(feeds)}
            expected = run_float(operands)
            for name, output in run_int8(operands).items():
                errors[name].append(_token_errors(expected[name], output))
    ruined = [name for name, parts in errors.items() if np.median(np.concatenate(parts)) > _RUINED]
    return [names[output] for output in ruined]


def _token_errors(expected: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Norm of the difference over the norm of the expected values, over the last axis."""
    difference, norm = (np.linalg.norm(array, axis=-1).ravel() for array in (output - expected, expected))
    return np.where(norm > 0, difference / np.maximum(norm, np.finfo(np.float32).tiny), 0.0)


def rank_matmuls(
    quantized: Path, float_graph: Path, batches: Sequence[Feeds], on_progress: ProgressCallback | None = None
) -> list[str]:
    """Names of the quantized matmuls, sorted by how much the outputs improve with the matmul in floats, most first.

    Only one matmul at a time is returned to floats. The outputs are compared with those of the float graph, by the mean
    squared difference relative to the mean square. No labels are needed.

    Args:
        on_progress: called with (matmuls tried, matmuls).
    """
    names = names_of(quantized_matmuls(load(quantized)))
    expected = _outputs(float_graph, batches)
    distances = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.onnx"
        for number, name in enumerate(names):
            save(ReturnToFloats({name})(load(quantized)).model, path)
            distances[name] = _distance(expected, _outputs(path, batches))
            if on_progress is not None:
                on_progress(number + 1, len(names))
    return sorted(names, key=lambda name: distances[name])


def output_distance(quantized: Path, float_graph: Path, batches: Sequence[Feeds]) -> float:
    """Mean squared difference between the outputs of two graphs, relative to the mean square of the float graph's."""
    return _distance(_outputs(float_graph, batches), _outputs(quantized, batches))


def _outputs(graph: Path, batches: Sequence[Feeds]) -> Outputs:
    return [*map(ort_session.unoptimized_runner(graph), batches)]


def _distance(expected: Outputs, outputs: Outputs) -> float:
    """Mean squared difference over the mean square of the expected outputs, summed over the outputs."""
    total = 0.0
    for name in expected[0]:
        differences = sum(float(np.square(a[name] - b[name]).sum()) for a, b in zip(expected, outputs, strict=True))
        scale = sum(float(np.square(a[name]).sum()) for a in expected)
        total += differences / max(scale, 1e-30)
    return total
