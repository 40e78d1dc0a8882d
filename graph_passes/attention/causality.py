"""Detect whether the mask of an attention hides later keys: whether a comparison of positions tells these apart."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.attention.mask_meaning import evaluate, nodes_behind
from graph_passes.attention.tracing import LAYOUT, PRODUCTS
from graph_passes.flow.concrete_shapes import Probe

_logger = logging.getLogger(__name__)

_COMPARISONS = frozenset(("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Trilu"))


class Causality:
    """Whether the attentions of one graph hide later keys. What several of them share is computed once."""

    def __init__(self, model: ir.Model, probe: Probe) -> None:
        self._model, self._probe = model, probe
        self._known: dict[ir.Node, bool] = {}

    def is_masked(self, values: Sequence[ir.Value | None]) -> bool:
        """Whether one of some tensors, scores or masks, is computed from a comparison that tells later keys apart."""
        stack, visited = list(values), set[ir.Value]()
        while stack:
            value = stack.pop()
            if value is None or value in visited or (node := value.producer()) is None:
                continue
            visited.add(value)
            if node.op_type in PRODUCTS | {"Gather", "Shape"}:
                continue
            if node.op_type in _COMPARISONS and self._hides_later(node):
                return True
            stack.extend(node.inputs)
        return False

    def _hides_later(self, node: ir.Node) -> bool:
        """Whether a comparison of query and key positions has one result for all later keys, another for equal ones.

        A window around each query, or the buckets of a relative position, treat keys on both sides alike. A comparison
        that cannot be computed counts as one that hides later keys.
        """
        if node not in self._known:
            shape = self._probe.shape(node.outputs[0]) or ()
            of_pairs = len(shape) >= 2 and shape[-1] > 1 and shape[-2] > 1
            self._known[node] = (
                of_pairs and not _is_threshold(node, self._probe) and self._compute(node.outputs[0]) is not False
            )
        return self._known[node]

    def _compute(self, value: ir.Value) -> bool | None:
        """Whether a comparison has one result for all later keys and another for equal ones; None: it is unknown."""
        nodes = nodes_behind(value, self._probe.known)
        if nodes is None:
            return None
        read = {value, *(source for node in nodes for source in node.inputs if source is not None)}
        feeds = {source: content for source in read if (content := self._content(source)) is not None}
        try:
            content = evaluate(value, nodes, feeds, self._model.graph.opset_imports.get("", 1))
        except Exception as error:  # the reference evaluator raises whatever its operators raise
            _logger.debug("the comparison %s cannot be evaluated: %s", value.name, error)
            return None
        length = content.shape[-1]
        if content.shape[-2] != length or length < 2:
            return None
        pairs = content.reshape(-1, length, length)
        (queries, keys), positions = np.triu_indices(length, 1), np.arange(length)
        later, equal = pairs[:, queries, keys], pairs[:, positions, positions]
        return bool((later == later[0, 0]).all() and (equal == equal[0, 0]).all() and later[0, 0] != equal[0, 0])

    def _content(self, value: ir.Value) -> np.ndarray | None:
        """Content of a tensor, as far as the probe knows it, or of a graph's input: positions in order, or ones."""
        content, shape = self._probe.contents(value)[0], self._probe.shape(value)
        if content is not None or shape is None or not value.is_graph_input():
            return content
        dtype = value.dtype.numpy() if value.dtype is not None else np.dtype(np.int64)
        if "position" in (value.name or ""):
            return np.broadcast_to(np.arange(shape[-1]), shape).astype(dtype)
        return np.ones(shape, dtype)


def _is_threshold(node: ir.Node, probe: Probe) -> bool:
    """Whether a computed mask of floats is compared with a single number.

    Block masks test the model's own mask for hidden pairs this way. Such a node does not compare positions; the nodes
    that compute the model's mask do. A mask that is stored in the graph has no such nodes, and counts as a comparison.
    """
    if node.op_type == "Trilu":
        return False
    sizes = [math.prod(shape) for shape in map(probe.shape, node.inputs) if shape is not None]
    dtypes = [dtype for dtype in map(probe.dtype, node.inputs) if dtype is not None]
    if 1 not in sizes or not any(dtype.is_floating_point() for dtype in dtypes):
        return False
    return any(_is_calculated(value) for value in node.inputs)


def _is_calculated(value: ir.Value | None) -> bool:
    """Whether a tensor is calculated rather than stored; changes of layout are not calculations."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in LAYOUT:
            return node.op_type != "Constant"
        value = node.inputs[0]
    return False
