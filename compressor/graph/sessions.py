"""Parts of an ONNX graph in ONNX Runtime: layer by layer over many batches, with weights that change on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from compressor.errors import ErrorCode, InputError
from compressor.graph.layers import Division, Layer
from compressor.targets.machine import usable_cores
from compressor.targets.onnxruntime.ort_session import error_line, run_session

Arrays = Mapping[str, np.ndarray]
"""Name of a tensor -> its values."""


class LayeredGraph:
    """A graph whose layers run one by one.

    Args:
        model: a normalized graph, whose local functions are inlined and whose constants are initializers.

    Attributes:
        division: its layers.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model, self.division = model, Division(model.graph)

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers, of which the last one ends with the outputs of the graph."""
        return self.division.layers

    def run_of(
        self, layer: int, outputs: Sequence[ir.Value], weights: Arrays
    ) -> Callable[[Arrays], dict[str, np.ndarray]]:
        """Compile what computes some values of a layer by name, from the inputs of the graph and operands of the layer.

        The values are of this layer or before it; `weights` are initializers with other values than in the graph.

        Raises:
            InputError: ONNX Runtime cannot load it, or, when it runs, the graph does not run on these inputs, e.g. with
                more positions than it has.
        """
        operands = {value.name or "": value for value in self.layers[layer].operands}
        wanted = {value.name or "": value for value in outputs}
        computed = [value for name, value in wanted.items() if name not in operands]
        session = _session(_part(self._model, computed, operands, weights)) if computed else None
        for value, output in zip(computed, [] if session is None else session.get_outputs(), strict=True):
            kind = output.type.removeprefix("tensor(").removesuffix(")").upper()
            value.type = value.type or ir.TensorType(ir.DataType[kind])  # which the next layer needs

        def run(feeds: Arrays) -> dict[str, np.ndarray]:
            try:
                results = {} if session is None else run_session(session, feeds)
            except InputError as error:
                raise InputError(
                    f"the graph does not run on these inputs ({error}); give rows of sizes that the graph takes, e.g."
                    " shorter ones",
                    code=ErrorCode.TENSOR_MISMATCH,
                ) from error
            return {**results, **{name: feeds[name] for name in wanted if name in operands}}

        return run


def _part(model: ir.Model, outputs: Sequence[ir.Value], stops: Mapping[str, ir.Value], weights: Arrays) -> ir.Model:
    """A graph that computes some values from the inputs of a graph and from values that are known."""
    needed: set[ir.Node] = set()
    inputs: dict[str, ir.Value] = {}
    initializers: dict[str, ir.Value] = {}
    pending = list(outputs)
    while pending:
        value = pending.pop()
        node, name = value.producer(), value.name or ""
        if name in stops or (node is None and not value.is_initializer()):
            inputs[name] = value
        elif node is None:
            initializers[name] = value
        elif node not in needed:
            needed.add(node)
            pending += [operand for operand in node.inputs if operand is not None]
    known = {value: _named(value) for value in inputs.values()}
    for value in known.values():
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)  # of a layer before which none was compiled
    for name, value in initializers.items():
        known[value] = copied = _named(value)
        copied.const_value = value.const_value
        if name in weights:
            copied.const_value = ir.Tensor(weights[name], name=name)
    nodes = []
    for node in model.graph:
        if node not in needed:
            continue
        results = [_named(value) for value in node.outputs]
        known.update(zip(node.outputs, results, strict=True))
        operands = [None if value is None else known[value] for value in node.inputs]
        options: dict[str, Any] = {"outputs": results, "version": node.version, "name": node.name}
        nodes.append(ir.Node(node.domain, node.op_type, operands, node.attributes.values(), **options))
    graph = ir.Graph(
        [known[value] for value in inputs.values()],
        [known[value] for value in outputs],
        nodes=nodes,
        initializers=[known[value] for value in initializers.values()],
        opset_imports=model.opset_imports,
        name="part",
    )
    return ir.Model(graph, ir_version=model.ir_version)


def _session(part: ir.Model) -> ort.InferenceSession:
    """Load a part, which shares the machine with many others: no memory is kept and no thread waits between runs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = usable_cores(), 4
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return ort.InferenceSession(ir.to_proto(part).SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the exceptions of ONNX Runtime share no other base class
        text = f"ONNX Runtime cannot load a part of the graph ({error_line(error)}); export the graph again"
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED) from error


def _named(value: ir.Value) -> ir.Value:
    """A value of the same name, type and shape."""
    return ir.Value(name=value.name, type=value.type, shape=value.shape)


class LayerPass:
    """All batches at the start of a layer, computed with weights that may change on the way.

    Args:
        graph: the graph.
        batches: its inputs by name, `[batch, ...]` each.
        weights: initializers with other values than in the graph; changes of layers before the present one have no
            effect any more.

    Attributes:
        layer: number of the present layer.
    """

    def __init__(self, graph: LayeredGraph, batches: Sequence[Arrays], weights: Arrays) -> None:
        self._graph, self._batches, self._weights, self.layer = graph, batches, weights, 0
        self._operands: list[Arrays] = [{} for _ in batches]

    def observe(self, values: Sequence[ir.Value], *, advance: bool = False) -> Iterator[dict[str, np.ndarray]]:
        """Some values of the present layer by name, batch by batch.

        If the pass is to `advance` to the start of the next layer, all batches have to be consumed.
        """
        results = self._graph.layers[self.layer].results if advance else ()
        run = self._graph.run_of(self.layer, [*values, *results], self._weights)
        for number, batch in enumerate(self._batches):
            computed = run({**batch, **self._operands[number]})
            if advance:
                self._operands[number] = {value.name or "": computed[value.name or ""] for value in results}
            yield {value.name or "": computed[value.name or ""] for value in values}
        self.layer += advance

    def advance(self, layer: int) -> None:
        """Run all batches up to the start of a layer."""
        while self.layer < layer:
            for _ in self.observe((), advance=True):
                pass
