"""Name decoding axes: every free axis of a decoder with key/value caches gets one name, whatever exporters call it."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.flow.caches import read_caches
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed

IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
"""Inputs of a decoder besides its caches: tokens `[text, new position]`, a mask `[text, earlier and new position]`, and
the number of each token in its text `[text, new position]`."""
_BATCH, _PAST, _NEW = "batch", "past", "sequence"
_TOTAL = f"{_PAST} + {_NEW}"


class NameDecodingAxes(GraphPass[Names]):
    """Name the axes of texts, of earlier, of new and of all positions, which are as long in every input and output.

    Cases:
        1. Inputs of texts and caches, and outputs of caches, get the names; sizes that are fixed stay.
        2. The first axes of other outputs get those of the tokens, where they had their names.
        3. Shapes of computed tensors that have other names are forgotten.

    The report has the names of the inputs and outputs with caches.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        graph, caches = model.graph, read_caches(model)
        known = {value.name: value for value in graph.inputs}
        if not caches or (ids := known.get(IDS)) is None:
            return changed(model, ())
        before = [str(axis) for axis in ids.shape or ()]
        for name, positions in ((IDS, _NEW), (POSITIONS, _NEW), (MASK, _TOTAL)):
            if (value := known.get(name)) is not None and value.shape is not None and len(value.shape) == 2:
                _name(value, _BATCH, positions)
        for cache, output in caches.items():
            _name(cache, _BATCH, None, _PAST, None)
            if output is not None:
                _name(output, _BATCH, None, _TOTAL, None)
        for value in (value for value in graph.outputs if value not in caches.values()):
            names = dict(zip(before, (_BATCH, _NEW), strict=False))
            _name(value, *(names.get(str(axis)) for axis in value.shape or ()))
        forget_shapes(graph)
        return changed(model, [value.name for pair in caches.items() for value in pair if value is not None])


def _name(value: ir.Value, *names: str | None) -> None:
    """Name the free axes of a tensor; None: an axis stays as it is."""
    sizes = list(value.shape or ())
    if len(sizes) == len(names):
        named = [
            size if name is None or isinstance(size, int) else name for size, name in zip(sizes, names, strict=True)
        ]
        value.shape = ir.Shape(named)


def forget_shapes(graph: ir.Graph) -> None:
    """Remove the shapes of computed tensors with free axes of other names than inputs have."""
    free = {str(size) for value in graph.inputs for size in value.shape or () if not isinstance(size, int)}
    for value in (output for node in graph for output in node.outputs if not output.is_graph_output()):
        if any(not isinstance(size, int) and str(size) not in free for size in value.shape or ()):
            value.shape = None
