"""Caches of a graph: tensors that one call of a graph returns and the next call reads.

A decoder returns the keys and values of all positions (`present`) and reads them again as those of the earlier
positions (`past`). Callers pass a cache back unchanged, so a cache may lose heads if its input and its output lose the
same heads. An encoder returns keys and values that the decoder reads in every call: a cache whose output belongs to
another graph.

Which inputs and outputs are caches is recorded in the metadata of the graph that reads them, because names differ
between exporters. In a graph without a record, an output that is an input with further positions after its own is the
next content of this input.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a server that generates reads this file, and has no onnx_ir
    import onnx_ir as ir

CACHES = "graph_passes.caches"
"""Key of a graph's metadata: JSON list of caches."""

IN_PLACE = "graph_passes.caches.in_place"
"""Key of a graph's metadata: callers may pass caches with room for further positions, and bind each output to the
memory of its input. The graph then writes the new positions alone, in their place. It reads the number of positions
from its mask."""

_AXES = 4
"""Minimum number of axes of a cache: text, head, position, width. A memory of hidden states has no axis of heads."""

Cache = tuple[str, str]
"""Name of an input, and of the output that the next call reads as this input: of the same graph, or of an earlier one.
"""


def record_caches(model: ir.Model, caches: Iterable[Cache]) -> None:
    """Record which inputs of a graph are caches.

    Args:
        model: the graph, whose metadata are changed.
        caches: name of the input, and of the output that holds its content.

    Raises:
        ValueError: the graph has no input of a name.
    """
    caches = list(caches)
    inputs = {value.name for value in model.graph.inputs}
    if unknown := [name for name, _ in caches if name not in inputs]:
        raise ValueError(f"cache {unknown[0]}: the graph has no such input")
    model.metadata_props[CACHES] = json.dumps(caches)


def cache_names(model: ir.Model) -> dict[str, str]:
    """The caches of a graph: name of the input -> name of the output that holds its content.

    They are those that the metadata record; without a record, those that the graph returns with further positions.
    """
    recorded = model.metadata_props.get(CACHES)
    return _returned_caches(model) if recorded is None else dict(json.loads(recorded))


def _returned_caches(model: ir.Model) -> dict[str, str]:
    """The inputs of four or more axes that a graph returns with further positions after their own."""
    from graph_passes.flow.rules import RULES  # a server that generates has no onnx_ir

    inputs = {value for value in model.graph.inputs if value.shape is not None and len(value.shape) >= _AXES}
    caches: dict[str, str] = {}
    for output in model.graph.outputs if inputs else ():
        value: ir.Value | None = output
        while value is not None and (node := value.producer()) is not None and node.op_type == "Identity":
            value = node.inputs[0]
        node = None if value is None else value.producer()
        rule = None if node is None else RULES.get((node.domain, node.op_type))
        if node is None or rule is None:
            continue
        for source, result in rule.continued(node):
            earlier = node.inputs[source] if source < len(node.inputs) else None
            if earlier in inputs and _extends(earlier, output) and node.outputs[result : result + 1] == (value,):
                caches.setdefault(earlier.name or "", output.name or "")
    return caches


def _extends(earlier: ir.Value, output: ir.Value) -> bool:
    """Whether an output may hold further positions than an input: it has as many heads, and their width."""
    if earlier.shape is None or output.shape is None or len(earlier.shape) != len(output.shape):
        return False
    heads, width = earlier.shape[-3], earlier.shape[-1]
    is_named = isinstance(width, int) or width.value is not None  # sizes without a name may differ
    return isinstance(heads, int) and is_named and (heads, width) == (output.shape[-3], output.shape[-1])


def read_caches(model: ir.Model) -> dict[ir.Value, ir.Value | None]:
    """The caches that a graph reads: input -> output of the same graph; None: the output of another graph."""
    outputs, names = {value.name: value for value in model.graph.outputs}, cache_names(model)
    return {value: outputs.get(names[value.name]) for value in model.graph.inputs if value.name in names}


def bytes_per_token(model: ir.Model) -> int:
    """Bytes of keys and values that a token adds to the caches that a graph both reads and returns.

    Raises:
        ValueError: the number of heads or their width is not fixed.
    """
    total = 0
    for value, output in read_caches(model).items():
        if output is None:
            continue
        heads, width = (value.shape[axis] if value.shape else None for axis in (1, 3))
        if not (isinstance(heads, int) and isinstance(width, int) and value.dtype is not None):
            raise ValueError(f"{value.name}: the cache has no fixed number of heads and width")
        total += int(heads * width * value.dtype.itemsize)
    return total


def cache_writers(
    nodes: Sequence[ir.Node], outputs: Collection[ir.Value], captured: Collection[ir.Value] = ()
) -> frozenset[ir.Node]:
    """The nodes from which nothing is computed but the outputs of caches.

    Args:
        nodes: the nodes of a graph, in its order.
        outputs: outputs of caches.
        captured: tensors that bodies of nodes read.
    """
    writers: set[ir.Node] = set()
    for node in reversed(nodes) if outputs else ():
        if all(
            (value in outputs or not value.is_graph_output())
            and value not in captured
            and all(reader in writers for reader, _ in value.uses())
            for value in node.outputs
        ):
            writers.add(node)
    return frozenset(writers)
