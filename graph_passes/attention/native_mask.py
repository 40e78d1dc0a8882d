"""What does a family's own attention mask say? Told by computing it, so that a graph need not hold it for every pair.

Families build `[batch, 1, query, key]` out of a padding mask, positions and causality, each in its own way. The part of
the graph that makes it is small: it is run on random paddings, and what comes out is compared with what a padding mask
and causality would say. Once it is run on as many positions as there may be, so that a window is not overlooked.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.node_inference import run_node

_LENGTHS = (5, 11)
_HEAVY = frozenset("Attention Conv Einsum Gemm LayerNormalization MatMul Softmax".split())
"""What a mask that depends on positions and padding alone does without."""
_MOST_NODES = 300
_CANDIDATE = "attention_mask"


@dataclasses.dataclass(frozen=True)
class NativeMask:
    """A site's own mask: what a row of keys says, whether later keys are hidden, and what only pairs can say.

    Attributes:
        row: added to the scores, `[batch, 1, 1, key]`.
        causal: keys after the query are hidden.
        full: added to the scores, `[batch or 1, 1 or head, query, key]`.
        heads: of `full`; 0 where there is none.
    """

    row: ir.Value | None = None
    causal: bool = False
    full: ir.Value | None = None
    heads: int = 0


class FamilyMasks:
    """The masks of one graph, each read once.

    Args:
        model: the graph; tensors are added where they are asked for.
        longest: positions that the masks must hold good for.
        probe: the graph's shapes.
    """

    def __init__(self, model: ir.Model, longest: int, probe: Probe) -> None:
        self.model, self.longest, self.probe = model, longest, probe
        self._meanings: dict[ir.Value, tuple[ir.Value | None, bool] | None] = {}
        self._rows: dict[ir.Value, ir.Value] = {}

    def read(self, addends: list[ir.Value], before: ir.Node, *, causal_too: bool) -> NativeMask:
        """What is added to a site's scores, beside its blocks; new nodes go before its attention.

        Args:
            addends: numbers, or True where a pair is allowed; each broadcasts to `[batch, head, query, key]`.
            before: the attention.
            causal_too: whether causality may be told by the flag.
        """
        row: ir.Value | None = None
        causal, rest = False, []
        for value in addends:
            meaning = self._meaning(value)
            if meaning is None or (meaning[1] and not causal_too) or (meaning[0] and row not in (None, meaning[0])):
                rest.append(value)
                continue
            row, causal = meaning[0] or row, causal or meaning[1]
        full, heads = self._joined(rest, before)
        return NativeMask(None if row is None else self._row(row), causal, full, heads)

    def _joined(self, parts: list[ir.Value], before: ir.Node) -> tuple[ir.Value | None, int]:
        if not parts:
            return None, 0
        nodes: list[ir.Node] = []
        numbers = [self._numbers(value, nodes) for value in parts]
        full = numbers[0]
        for other in numbers[1:]:
            nodes.append(ir.node("Add", [full, other]))
            full = nodes[-1].outputs[0]
        assert before.graph is not None
        before.graph.insert_before(before, nodes)
        shapes = [self.probe.shape(value) or () for value in parts]
        return full, max(shape[1] if len(shape) == 4 else 1 for shape in shapes)

    def _numbers(self, value: ir.Value, nodes: list[ir.Node]) -> ir.Value:
        """A mask as numbers to add."""
        if value.dtype != ir.DataType.BOOL:
            return value
        zero, lowest = (
            ir.node("Constant", [], {"value": ir.tensor(np.float32(number))})
            for number in (0.0, np.finfo(np.float32).min)
        )
        nodes += [zero, lowest, ir.node("Where", [value, zero.outputs[0], lowest.outputs[0]])]
        return nodes[-1].outputs[0]

    def _row(self, given: ir.Value) -> ir.Value:
        """Zero for keys that a padding mask keeps, made once from the graph's input."""
        if given not in self._rows:
            nodes: list[ir.Node] = []
            allowed = ir.node("Cast", [given], {"to": ir.DataType.BOOL})
            allowed.outputs[0].dtype = ir.DataType.BOOL
            axes = ir.node("Constant", [], {"value": ir.tensor(np.array([1, 2]))})
            nodes.append(allowed)
            numbers = self._numbers(allowed.outputs[0], nodes)
            nodes += [axes, ir.node("Unsqueeze", [numbers, axes.outputs[0]])]
            self.model.graph.insert_before(self.model.graph[0], nodes)
            self._rows[given] = nodes[-1].outputs[0]
        return self._rows[given]

    def _meaning(self, value: ir.Value) -> tuple[ir.Value | None, bool] | None:
        """The padding mask that says the same, if any, and whether later keys are hidden too; None: neither does."""
        if value not in self._meanings:
            self._meanings[value] = self._compare(value)
        return self._meanings[value]

    def _compare(self, value: ir.Value) -> tuple[ir.Value | None, bool] | None:
        nodes = _behind(value)
        if nodes is None:
            return None
        read = {source for node in nodes for source in node.inputs if source is not None}
        given = [source for source in self.model.graph.inputs if source in read]
        masks = [source for source in given if _CANDIDATE in (source.name or "")]
        options: list[tuple[ir.Value | None, bool]] = list(itertools.product([None, *masks], (False, True)))
        opset = self.model.graph.opset_imports.get("", 1)
        rng = np.random.default_rng(0)
        for lengths, batch in ((_LENGTHS, 4), (_LENGTHS[::-1], 4), ((self.longest, self.longest), 1)):
            feeds = _feeds(given, lengths, batch, rng)
            try:
                found = _computed(value, nodes, feeds, opset)
            except Exception:  # a reference evaluation raises whatever its operators do
                return None
            options = [option for option in options if _says(found, option, feeds)]
            if not options:
                return None
        return options[0]


def _behind(value: ir.Value) -> list[ir.Node] | None:
    """The nodes that make a value, in order; None if they do more than a mask takes."""
    stack, seen = [value.producer()], set[ir.Node]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node.op_type in _HEAVY or node.domain or len(seen) > _MOST_NODES:
            return None
        seen.add(node)
        stack += [source.producer() for source in node.inputs if source is not None]
    graph = value.graph
    return [node for node in graph if node in seen] if isinstance(graph, ir.Graph) else []


def _computed(value: ir.Value, nodes: list[ir.Node], feeds: dict[ir.Value, np.ndarray], opset: int) -> np.ndarray:
    """A tensor, node by node; each tensor on the way is let go after its last use, for at thousands of positions some
    fill gigabytes together."""
    last = {source: node for node in nodes for source in node.inputs}
    held = dict(feeds)
    for node in nodes:
        given = {}
        for source in node.inputs:
            if source is not None:
                known = source.const_value
                given[source.name or ""] = held[source] if source in held or known is None else known.numpy()
        held.update(zip(node.outputs, run_node(ir.serde.serialize_node(node), given, opset), strict=True))
        for source in node.inputs:
            if source is not None and last[source] is node:
                held.pop(source, None)
    return held[value]


def _feeds(
    given: list[ir.Value], lengths: tuple[int, ...], batch: int, rng: np.random.Generator
) -> dict[ir.Value, np.ndarray]:
    """Inputs of these sizes: one length for each symbol, masks that hide keys anywhere, all else zeros and ones."""
    sizes: dict[str, int] = {}
    feeds = {}
    for source in given:
        shape = []
        for axis, dim in enumerate(source.shape or ()):
            name = str(dim)
            size = dim if isinstance(dim, int) else batch if axis == 0 else sizes.get(name)
            if size is None:
                size = sizes[name] = lengths[len(sizes) % len(lengths)]
            shape.append(size)
        dtype = source.dtype.numpy() if source.dtype is not None else np.dtype(np.int64)
        if _CANDIDATE in (source.name or ""):
            content = np.ones(shape, dtype)
            hidden = slice(int(batch > 1), None)
            content[hidden] = rng.random(content[hidden].shape) < 0.7
        else:  # what reads more of it than its shape makes no padding mask
            content = rng.integers(0, 2, shape).astype(dtype)
        feeds[source] = content
    return feeds


def _says(found: np.ndarray, option: tuple[ir.Value | None, bool], feeds: dict[ir.Value, np.ndarray]) -> bool:
    """Whether a mask allows what a padding mask and causality allow, and adds nothing else."""
    given, causal = option
    if found.dtype == np.bool_:
        allowed = found
    else:
        lowest = np.finfo(found.dtype).min
        allowed = found > lowest / 2
        if not np.isin(found, (0, lowest)).all() and found[allowed].any():
            return False
    if allowed.ndim != 4 or (causal and allowed.shape[2] != allowed.shape[3]):
        return False
    expected = np.ones((1, 1, 1, 1), np.bool_)
    if given is not None:
        expected = feeds[given].astype(np.bool_)[:, None, None, :]
    if causal:
        expected = expected & np.tri(allowed.shape[2], dtype=np.bool_)
    try:
        shape = np.broadcast_shapes(expected.shape, allowed.shape)
    except ValueError:
        return False
    return np.array_equal(np.broadcast_to(allowed, shape), np.broadcast_to(expected, shape))
