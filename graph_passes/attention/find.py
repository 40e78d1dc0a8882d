"""Find the attention of a graph, whichever exporter wrote it.

An attention is a `Softmax` between two products of activations, a single operator that computes all of it, or a call of
block-sparse attention. Heads, key/value heads and widths are read off concrete shapes; the site's name comes from its
gate or from the scopes that exporters record at nodes.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.attention.mask_meaning import evaluate, nodes_behind
from graph_passes.attention.site_names import block_sparse_site, module_path, site_name
from graph_passes.attention.tracing import (
    LAYOUT,
    PRODUCTS,
    attend_to_themselves,
    count_repeats,
    is_computed,
    product_ahead,
    product_behind,
    projection_ahead,
    separate_heads,
)
from graph_passes.block_sparse.function import is_block_sparse
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.refusal import Refusal, RefusalCode
from graph_passes.flow.rule import NoRuleError
from graph_passes.flow.sizes import BATCH
from graph_passes.plan import Kind
from graph_passes.tape import input_of, producer_of, source_before

_logger = logging.getLogger(__name__)

_COMPARISONS = frozenset(("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Trilu"))
_FUSED = frozenset(("Attention", "GroupQueryAttention", "MultiHeadAttention"))


@dataclasses.dataclass(frozen=True)
class GraphSite:
    """One attention of a graph.

    Attributes:
        name: the gate's site, else the module path that the exporter recorded, or None.
        kind: `bidirectional`, `causal` (the graph has a causal mask) or `cross` (keys and queries are computed from
            different activations, not from one or some of its positions). A block mask alone does not make an attention
            causal.
        heads: number of query heads.
        kv_heads: number of key/value heads.
        head_dim: width of one head's value vector.
        output: the tensor of the heads' outputs, which a gate multiplies.
        axis: the axis of `output` that holds heads, or heads * head_dim (then it is the last axis).
        rank: number of axes of `output`.
        projection: the module path that the exporter recorded of the product that mixes the heads, or None.
    """

    name: str | None
    kind: Kind
    heads: int
    kv_heads: int
    head_dim: int
    output: ir.Value = dataclasses.field(repr=False)
    axis: int = dataclasses.field(repr=False)
    rank: int = dataclasses.field(repr=False)
    projection: str | None = dataclasses.field(default=None, repr=False)


def find_attention(model: ir.Model) -> list[GraphSite]:
    """Every attention of a graph whose heads can be determined, in the order of the graph.

    Bodies of local functions are not searched: inline them first (`passes.Normalize`). Block-sparse attention is found
    by its calls.
    """
    return search_attention(model, Probe(model))[0]


def search_attention(model: ir.Model, probe: Probe) -> tuple[list[GraphSite], list[Refusal]]:
    """The attentions of a graph, see `find_attention`, and why nodes that look like attentions are none."""
    sites: list[GraphSite] = []
    refusals: list[Refusal] = []
    causality = _Causality(probe)
    overloads = {node.overload for node in model.graph if is_block_sparse(node)}
    for node in model.graph:
        try:
            if is_block_sparse(node):
                site = _block_sparse(node, overloads, probe, causality)
            elif node.op_type in _FUSED:
                site = _fused(node, probe, causality)
            elif node.op_type == "Softmax" and _looks_like_attention(node):
                site = _decomposed(node, probe, causality)
            elif node.op_type == "Softmax" and _is_quantized(node):
                raise _QUANTIZED
            else:
                continue
        except NoRuleError as error:
            _logger.debug("%s %s is not an attention whose heads can be determined", node.op_type, node.name)
            name = module_path(node) or node.name or node.op_type
            refusals.append(Refusal(frozenset((name,)), node.op_type, node.name or "", error.why, error.code))
            continue
        product = projection_ahead(site.output)
        sites.append(dataclasses.replace(site, projection=module_path(product) if product is not None else None))
    return sites, refusals


def _kind(*, cross: bool, causal: bool) -> Kind:
    return "cross" if cross else "causal" if causal else "bidirectional"


_UNKNOWN_SHAPE = NoRuleError(RefusalCode.UNKNOWN_SHAPE, "has tensors of unknown shape")


_QUANTIZED = NoRuleError(
    RefusalCode.QUANTIZED,
    "has quantized probabilities, so no head can be removed; prune the float graph, then quantize it",
)


def _fused(node: ir.Node, probe: Probe, causality: _Causality) -> GraphSite:
    """The site of one operator that computes all of an attention."""
    output, query, key = node.outputs[0], node.inputs[0], input_of(node, 1)
    shape, query_shape = probe.shape(output), probe.shape(query)
    if shape is None or query_shape is None:
        raise _UNKNOWN_SHAPE
    attributes = node.attributes
    if node.op_type == "Attention" and node.domain != "com.microsoft":
        key_shape = probe.shape(key)
        if len(query_shape) == 4 and key_shape is not None:
            heads, kv_heads = query_shape[1], key_shape[1]
        else:
            heads, kv_heads = attributes.get_int("q_num_heads"), attributes.get_int("kv_num_heads")
        kv_heads //= count_repeats(node.inputs[2], probe)
        causal = bool(attributes.get_int("is_causal", 0)) or causality.is_masked(node.inputs[3:4])
    else:
        heads = attributes.get_int("num_heads")
        kv_heads = attributes.get_int("kv_num_heads", heads)
        causal = bool(attributes.get_int("unidirectional", int(node.op_type == "GroupQueryAttention")))
    packed = node.op_type == "Attention" and node.domain == "com.microsoft"
    cross = not packed and key is not None and not attend_to_themselves(query, key)
    axis = 1 if len(shape) == 4 else 2
    head_dim = shape[3] if len(shape) == 4 else shape[2] // heads
    kind = _kind(cross=cross, causal=causal)
    return GraphSite(site_name(node, output), kind, heads, kv_heads, head_dim, output, axis, len(shape))


def _block_sparse(node: ir.Node, overloads: Collection[str], probe: Probe, causality: _Causality) -> GraphSite:
    """The site of a call of block-sparse attention."""
    output = node.outputs[0]
    shape = probe.shape(output)
    if shape is None or len(shape) != 4 or len(node.inputs) < 4:
        raise _UNKNOWN_SHAPE
    kind = _kind(
        cross=not attend_to_themselves(node.inputs[0], node.inputs[1]),
        causal=bool(node.attributes.get_int("causal", 0)) or causality.is_masked(node.inputs[4:]),
    )
    kv_heads = shape[2] // count_repeats(node.inputs[2], probe)
    return GraphSite(block_sparse_site(node, overloads), kind, shape[2], kv_heads, shape[3], output, 2, 4)


def _looks_like_attention(softmax: ir.Node) -> bool:
    """Whether a tensor that the graph computes is multiplied by the probabilities of a `Softmax`.

    A weight may mix the probabilities of several heads before.
    """
    stack, visited = [softmax.outputs[0]], set[ir.Value]()
    while stack:
        value = stack.pop()
        visited.add(value)
        for reader, _ in value.uses():
            is_product = reader.op_type in PRODUCTS | {"Einsum"}
            if is_product and all(is_computed(operand) for operand in reader.inputs[:2]):
                return True
            is_passed = is_product or reader.op_type in LAYOUT | {"Dropout", "Mul", "Where"}
            if is_passed and reader.outputs[0] not in visited:
                stack.append(reader.outputs[0])
    return False


def _is_quantized(softmax: ir.Node) -> bool:
    """Whether the probabilities of a `Softmax` are quantized."""
    return any(reader.op_type == "QuantizeLinear" for reader, _ in softmax.outputs[0].uses())


def _decomposed(softmax: ir.Node, probe: Probe, causality: _Causality) -> GraphSite:
    """The site of a `Softmax` between two products."""
    scores = product_behind(softmax.inputs[0])
    values = product_ahead(softmax.outputs[0])
    if scores is None or values is None:
        raise NoRuleError(RefusalCode.UNMATCHED_ATTENTION, "is not between two matmuls of activations")
    first, second = probe.shapes(values.outputs[0])
    if first is None or second is None:
        raise _UNKNOWN_SHAPE
    if len(first) not in (3, 4):
        raise NoRuleError(RefusalCode.UNMATCHED_ATTENTION, f"weights values of {len(first)} axes, neither 3 nor 4")
    if len(first) == 4:
        if first[1] != second[1]:
            raise NoRuleError(
                RefusalCode.FREE_SIZE, "has an axis in place of the heads whose size depends on the graph's inputs"
            )
        output, heads = values.outputs[0], first[1]
    elif first[0] * BATCH[1] == second[0] * BATCH[0]:
        # Batch and heads share the first axis: the gate belongs where they are separated again.
        heads = first[0] // BATCH[0]
        separated = separate_heads(values.outputs[0], heads, probe)
        if separated is None:
            raise NoRuleError(RefusalCode.INSEPARABLE_HEADS, "weights values whose rows and heads stay on one axis")
        output = separated
    else:
        raise NoRuleError(RefusalCode.UNMATCHED_ATTENTION, "has no axis of heads")
    kind = _kind(
        cross=not attend_to_themselves(*scores.inputs[:2]),
        causal=causality.is_masked(softmax.inputs),
    )
    kv_heads = heads // count_repeats(values.inputs[1], probe)
    return GraphSite(site_name(softmax, output), kind, heads, kv_heads, first[-1], output, 1, 4)


class _Causality:
    """Whether the attentions of one graph hide later keys. What several of them share is computed once."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._known: dict[ir.Node, bool] = {}

    def is_masked(self, values: Sequence[ir.Value | None]) -> bool:
        """Whether one of some tensors, scores or masks, is computed from a comparison that distinguishes later keys."""
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
        content = evaluate(value, nodes, feeds)
        length = 0 if content is None else content.shape[-1]
        if content is None or content.shape[-2] != length or length < 2:
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
    sources = [producer_of(source_before(value, LAYOUT)) for value in node.inputs]
    return any(source is not None and source.op_type != "Constant" for source in sources)
