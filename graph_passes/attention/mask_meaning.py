"""Determine the meaning of a mask by computing it: whether it equals a padding mask, causality, or both.

The part of a graph that computes a mask from inputs and positions is small. It is run on random paddings, and the
result is compared with the masks of each input and of causality. The last run has the maximum number of positions, so
that a sliding window is detected.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.flow.edit import opset
from graph_passes.flow.node_calls import run_node

_logger = logging.getLogger(__name__)

_LENGTHS = (5, 11)
"""Lengths of the short runs; two inputs of one run have different lengths."""
_BATCH = 4
_EXPENSIVE = frozenset("Attention Conv Einsum Gemm LayerNormalization MatMul Softmax".split())
"""Operators that do not occur in the computation of a mask from positions and padding."""
_MAX_NODES = 300
_PADDING_MASK = "attention_mask"
"""Part of the names of inputs that may be padding masks."""
_CALLS = ((2, 0, 6), (3, 8, 1), (2, 5, 4), (1, 2**12, 1), (1, 2**17, 1))
"""Texts, earlier and new positions of calls of a decoder. No window of attention is longer than the last."""
_VALUES = 1024
"""Maximum number of values for each position in a tensor behind a mask: the square of the positions, which some graphs
compute, would fill the memory in the last call."""
_HIDING = -1e4
"""Largest number that hides a key when it is added to its score."""
_KEPT_SHARE = 0.7
"""Share of the keys that random padding masks keep."""


class MaskMeaning(NamedTuple):
    """The meaning of a mask.

    Attributes:
        padding: the graph's input `[batch, key]` that is nonzero for the keys that it keeps; None: it keeps all keys.
        causal: whether it hides the keys after the query.
    """

    padding: ir.Value | None
    causal: bool


def mask_meaning(model: ir.Model, value: ir.Value, longest: int) -> MaskMeaning | None:
    """The meaning of a mask, or None where a padding mask and causality cannot express it.

    Args:
        value: the mask: numbers to add to scores, or booleans that are True where a pair is allowed.
        longest: number of positions for which the meaning must hold.
    """
    nodes = nodes_behind(value)
    if nodes is None:
        return None
    read = {source for node in nodes for source in node.inputs if source is not None}
    inputs = [source for source in model.graph.inputs if source in read]
    paddings = [source for source in inputs if _PADDING_MASK in (source.name or "")]
    meanings = [MaskMeaning(*pair) for pair in itertools.product([None, *paddings], (False, True))]
    rng = np.random.default_rng(0)
    for lengths, batch in ((_LENGTHS, _BATCH), (_LENGTHS[::-1], _BATCH), ((longest, longest), 1)):
        feeds = _random_feeds(inputs, lengths, batch, rng)
        content = evaluate(value, nodes, feeds)
        meanings = [meaning for meaning in meanings if content is not None and _matches(content, meaning, feeds)]
        if not meanings:
            return None
    return meanings[0]


def hides_padding(value: ir.Value, mask: ir.Value, ids: ir.Value) -> bool:
    """Whether the numbers added to the scores of a decoder hide padding and later keys, and nothing else.

    Args:
        value: the numbers.
        mask: the graph's input that is nonzero for earlier and new positions that are read, `[text, position]`.
        ids: the graph's input of new tokens, `[text, new position]`.
    """
    nodes = nodes_behind(value)
    if nodes is None:
        return False
    rng = np.random.default_rng(0)
    for texts, earlier, new in _CALLS:
        content: dict[ir.Value, np.ndarray] = {}
        for source, length in ((mask, earlier + new), (ids, new)):
            content[source] = rng.integers(0, 2, (texts, length)).astype((source.dtype or ir.DataType.INT64).numpy())
        shape, most = (texts, 1, new, earlier + new), _VALUES * (earlier + new)
        added = evaluate(value, nodes, content, shape=shape, most=most)
        if added is None:
            return False
        later = np.arange(earlier + new) > earlier + np.arange(new)[:, None]
        hidden = later | (content[mask] == 0)[:, None, None]
        if added[~hidden].any() or (added[hidden] > _HIDING).any():
            return False
    return True


def nodes_behind(value: ir.Value, known: Collection[ir.Value] = ()) -> list[ir.Node] | None:
    """The nodes that compute a value, in order; None if they are too many or have operators that no mask needs.

    Args:
        known: tensors whose content is known, before which no nodes are needed.
    """
    stack, visited = [value], set[ir.Node]()
    while stack:
        source = stack.pop()
        node = source.producer() if source not in known else None
        if node is None or node in visited:
            continue
        if node.op_type in _EXPENSIVE or node.domain or len(visited) > _MAX_NODES:
            return None
        visited.add(node)
        stack += [operand for operand in node.inputs if operand is not None]
    graph = value.graph
    return [node for node in graph if node in visited] if isinstance(graph, ir.Graph) else []


def evaluate(
    value: ir.Value,
    nodes: list[ir.Node],
    feeds: Mapping[ir.Value, np.ndarray],
    *,
    shape: tuple[int, ...] | None = None,
    most: float = math.inf,
) -> np.ndarray | None:
    """The content of a tensor, computed node by node; None where ONNX's reference evaluator cannot compute it.

    Args:
        nodes: the nodes that compute it, in order.
        feeds: contents of the graph's inputs, and of tensors that the nodes do not compute.
        shape: what the content is broadcast to, if it can be; None: it keeps its shape.
        most: maximum number of values of a tensor.
    """
    try:
        content = _compute(value, nodes, feeds, most)
        return content if shape is None else np.broadcast_to(content, shape)
    except Exception as error:  # the reference evaluator raises whatever its operators raise
        _logger.debug("%s cannot be evaluated: %s", value.name, error)
        return None


def _compute(value: ir.Value, nodes: list[ir.Node], feeds: Mapping[ir.Value, np.ndarray], most: float) -> np.ndarray:
    """See `evaluate`. Tensors are dropped after their last use: at thousands of positions they would fill gigabytes."""
    last_readers = {source: node for node in nodes for source in node.inputs}
    contents = dict(feeds)
    for node in nodes:
        inputs = {}
        for source in node.inputs:
            if source is not None:
                stored = source.const_value
                inputs[source.name or ""] = contents[source] if source in contents or stored is None else stored.numpy()
        contents.update(zip(node.outputs, run_node(ir.serde.serialize_node(node), inputs, opset(node)), strict=True))
        if any(np.size(contents[output]) > most for output in node.outputs):
            raise ValueError(f"{node.op_type} computes more than {most} values")
        for source in node.inputs:
            if source is not None and last_readers[source] is node:
                contents.pop(source, None)
    return contents[value]


def _random_feeds(
    inputs: list[ir.Value], lengths: tuple[int, ...], batch: int, rng: np.random.Generator
) -> dict[ir.Value, np.ndarray]:
    """Contents of the graph's inputs: masks that hide random keys (none in the first row of a batch), zeros and ones.

    The symbolic dimensions other than the batch have the lengths in turn.
    """
    sizes: dict[str, int] = {}
    feeds = {}
    for source in inputs:
        shape = []
        for axis, dim in enumerate(source.shape or ()):
            symbol = str(dim)
            size = dim if isinstance(dim, int) else batch if axis == 0 else sizes.get(symbol)
            if size is None:
                size = sizes[symbol] = lengths[len(sizes) % len(lengths)]
            shape.append(size)
        dtype = source.dtype.numpy() if source.dtype is not None else np.dtype(np.int64)
        if _PADDING_MASK in (source.name or ""):
            content = np.ones(shape, dtype)
            hidden = slice(int(batch > 1), None)
            content[hidden] = rng.random(content[hidden].shape) < _KEPT_SHARE
        else:  # a mask that depends on more of it than its shape matches no padding mask
            content = rng.integers(0, 2, shape).astype(dtype)
        feeds[source] = content
    return feeds


def _matches(content: np.ndarray, meaning: MaskMeaning, feeds: Mapping[ir.Value, np.ndarray]) -> bool:
    """Whether a mask allows exactly what a padding mask and causality allow, and adds nothing else."""
    if content.dtype == np.bool_:
        allowed = content
    else:
        lowest = np.finfo(content.dtype).min
        allowed = content > lowest / 2
        if not np.isin(content, (0, lowest)).all() and content[allowed].any():
            return False
    if allowed.ndim != 4 or (meaning.causal and allowed.shape[2] != allowed.shape[3]):
        return False
    expected = np.ones((1, 1, 1, 1), np.bool_)
    if meaning.padding is not None:
        expected = feeds[meaning.padding].astype(np.bool_)[:, None, None, :]
    if meaning.causal:
        expected = expected & np.tri(allowed.shape[2], dtype=np.bool_)
    try:
        shape = np.broadcast_shapes(expected.shape, allowed.shape)
    except ValueError:
        return False
    return np.array_equal(np.broadcast_to(allowed, shape), np.broadcast_to(expected, shape))
