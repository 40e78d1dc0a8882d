"""Operators that are a whole attention: `Attention` of ONNX, and those of ONNX Runtime.

Heads lie in blocks on one axis of each tensor, sometimes several runs of blocks one after the other (packed weights).
A head is kept or dropped whole; a key/value head goes when no query head that it serves is left. Where the heads left
are shared unevenly among key/value heads, those are repeated until each query head has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from graph_passes.flow.axis_flow import Demand, Flow, Gain, Need, NoRuleError, simplify, whole

Per = Literal["query", "key"]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Where heads lie in one tensor: on `axis`, as consecutive runs of one block (`width` indices) a head."""

    axis: int
    runs: tuple[tuple[Per, int], ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where heads lie in every tensor of an attention operator; None: nowhere."""

    heads: int
    kv_heads: int
    inputs: tuple[Blocks | None, ...]
    outputs: tuple[Blocks | None, ...]
    attributes: Callable[[int, int], dict[str, int | tuple[int, ...]]]
    """The attributes that state the numbers of (query, key/value) heads."""


def _width(flow: Flow, value: ir.Value | None, axis: int, heads: int, per: Per) -> Blocks | None:
    return None if value is None else Blocks(axis, ((per, flow.shape(value)[axis] // heads),))


def _per_head(flow: Flow, value: ir.Value | None, axis: int, per: Per = "query") -> Blocks | None:
    """Blocks of a tensor that has an axis of heads, unless it is broadcast along it."""
    return None if value is None or flow.shape(value)[axis] == 1 else Blocks(axis, ((per, 1),))


def _input(node: ir.Node, position: int) -> ir.Value | None:
    return node.inputs[position] if position < len(node.inputs) else None


def _outputs(
    node: ir.Node, flow: Flow, first: Blocks | None, rest: Sequence[Blocks | None]
) -> tuple[Blocks | None, ...]:
    return (first, *rest)[: len(node.outputs)]


def _standard(node: ir.Node, flow: Flow) -> Layout:
    """ONNX `Attention` on `[batch, heads, length, width]`, or on `[batch, length, heads * width]` counted."""
    query, key, value = (node.inputs[position] for position in range(3))
    if len(flow.shape(query)) == 4:
        heads, kv_heads = flow.shape(query)[1], flow.shape(key)[1]
        first: list[Blocks | None] = [Blocks(1, ((per, 1),)) for per in ("query", "key", "key")]
        out = first[0]

        def attributes(query_heads: int, key_heads: int) -> dict[str, int | tuple[int, ...]]:
            return {}
    else:
        heads, kv_heads = (node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads"))
        first = [_width(flow, query, 2, heads, "query"), *(_width(flow, v, 2, kv_heads, "key") for v in (key, value))]
        out = Blocks(2, (("query", flow.shape(value)[2] // kv_heads),))

        def attributes(query_heads: int, key_heads: int) -> dict[str, int | tuple[int, ...]]:
            return {"q_num_heads": query_heads, "kv_num_heads": key_heads}

    mask = _input(node, 3)
    per_head = mask is not None and len(flow.shape(mask)) == 4
    inputs = [*first, _per_head(flow, mask, 1) if per_head else None]
    inputs += [_per_head(flow, _input(node, position), 1, "key") for position in (4, 5)]
    present = [Blocks(1, (("key", 1),)), Blocks(1, (("key", 1),)), Blocks(1, (("query", 1),))]
    return Layout(heads, kv_heads, tuple(inputs), _outputs(node, flow, out, present), attributes)


def _multi_head(node: ir.Node, flow: Flow) -> Layout:
    """`com.microsoft.MultiHeadAttention`: separate, packed or already split query, key and value."""
    heads = node.attributes["num_heads"].as_int()
    inputs: list[Blocks | None] = []
    for value in (_input(node, position) for position in range(3)):
        rank = len(flow.shape(value)) if value is not None else 0
        axis = 1 if rank == 4 else 2
        inputs.append(_width(flow, value, axis, heads, "query"))
    bias = _input(node, 3)
    if bias is not None:
        inner = [flow.shape(_input(node, position)) for position in range(3)]
        widths = [shape[1] * shape[3] if len(shape) == 4 else shape[2] for shape in inner]
        inputs.append(Blocks(0, tuple(("query", width // heads) for width in widths)))
    else:
        inputs.append(None)
    inputs.append(None)
    inputs += [_per_head(flow, _input(node, position), 1) for position in (5, 6, 7)]
    out = Blocks(2, (("query", flow.shape(node.outputs[0])[2] // heads),))
    present = [Blocks(1, (("query", 1),))] * 3
    return Layout(heads, heads, tuple(inputs), _outputs(node, flow, out, present), lambda q, _: {"num_heads": q})


def _packed(node: ir.Node, flow: Flow) -> Layout:
    """`com.microsoft.Attention`: the projections of query, key and value are inside, their weights side by side."""
    heads = node.attributes["num_heads"].as_int()
    total = flow.shape(node.inputs[1])[1]
    sizes = node.attributes.get_ints("qkv_hidden_sizes", (total // 3,) * 3)
    widths = tuple(int(size) // heads for size in sizes)
    runs: tuple[tuple[Per, int], ...] = tuple(("query", width) for width in widths)
    past = Blocks(2, (("query", 1),)) if _input(node, 4) is not None else None
    bias = Blocks(0, runs) if _input(node, 2) is not None else None
    inputs = (None, Blocks(1, runs), bias, None, past, _per_head(flow, _input(node, 5), 1))

    def attributes(query_heads: int, _: int) -> dict[str, int | tuple[int, ...]]:
        return {"num_heads": query_heads, "qkv_hidden_sizes": tuple(width * query_heads for width in widths)}

    out = Blocks(2, (("query", widths[2]),))
    return Layout(heads, heads, inputs, _outputs(node, flow, out, [Blocks(2, (("query", 1),))]), attributes)


def _grouped(node: ir.Node, flow: Flow) -> Layout:
    """`com.microsoft.GroupQueryAttention`: fewer key/value heads than query heads, maybe packed in the first input."""
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    query, key = flow.shape(node.inputs[0]), _input(node, 1)
    if key is None:
        width = query[2] // (heads + 2 * kv_heads)
        first: list[Blocks | None] = [Blocks(2, (("query", width), ("key", width), ("key", width))), None, None]
    else:
        width = query[2] // heads
        first = [Blocks(2, (("query", width),)), Blocks(2, (("key", width),)), Blocks(2, (("key", width),))]
    inputs = [*first, *(_per_head(flow, _input(node, position), 1, "key") for position in (3, 4)), *(None,) * 5]
    inputs += [_per_head(flow, _input(node, 10), 1), _per_head(flow, _input(node, 11), 0)]
    present = [Blocks(1, (("key", 1),))] * 2
    out = Blocks(2, (("query", width),))
    outputs = _outputs(node, flow, out, present)
    return Layout(heads, kv_heads, tuple(inputs), outputs, lambda q, k: {"num_heads": q, "kv_num_heads": k})


def _rotary(node: ir.Node, flow: Flow) -> Layout:
    """`RotaryEmbedding` of ONNX and ONNX Runtime: each head turns alone, on an axis of heads or of heads * width."""
    shape = flow.shape(node.inputs[0])
    stated = "num_heads" in node.attributes
    if len(shape) == 4:
        heads, blocks = shape[1], Blocks(1, (("query", 1),))
    else:
        heads = node.attributes.get_int("num_heads", 0)
        if heads == 0:
            # The tables hold half a head's width, and the whole width is rotated.
            tables = flow.shape(_input(node, 1 if node.domain in ("", "ai.onnx") else 2))
            heads = shape[2] // (2 * tables[-1])
        blocks = Blocks(2, (("query", shape[2] // heads),))
    return Layout(heads, heads, (blocks,), (blocks,), lambda q, _: {"num_heads": q} if stated else {})


@dataclasses.dataclass(frozen=True)
class AttentionRule:
    """The rule of one fused operator, from where its heads lie."""

    layout: Callable[[ir.Node, Flow], Layout]
    selective: bool = False

    def demand(self, node: ir.Node, outputs: Sequence[Need], flow: Flow) -> Demand:
        layout = self.layout(node, flow)
        heads = self._asked(node, layout, outputs, flow)
        shared = layout.heads // layout.kv_heads
        groups, counts = np.unique(heads // shared, return_counts=True)
        even = len(counts) == 0 or (counts == counts[0]).all()
        keys = groups if even else heads // shared
        inputs = tuple(
            None
            if value is None
            else whole(_rank(flow, value))
            if blocks is None
            else _expand(layout, blocks, heads, keys, flow.shape(value))
            for value, blocks in zip(node.inputs, (*layout.inputs, *(None,) * len(node.inputs)), strict=False)
        )
        held = tuple(
            _expand(layout, blocks, heads, keys, flow.shape(value))
            if blocks is not None and _read(value)
            else whole(_rank(flow, value))
            for value, blocks in zip(node.outputs, layout.outputs, strict=False)
        )
        return Demand(inputs, held)

    def _asked(self, node: ir.Node, layout: Layout, outputs: Sequence[Need], flow: Flow) -> np.ndarray:
        """Query heads that the outputs need, ascending."""
        asked: set[int] = set()
        for value, blocks, need in zip(node.outputs, layout.outputs, outputs, strict=False):
            if blocks is None or not _read(value):
                continue
            if any(index is not None for axis, index in enumerate(need) if axis != blocks.axis):
                raise NoRuleError("is asked for a part of another axis than its heads'")
            index = need[blocks.axis] if need else None
            per, width = blocks.runs[0]
            found = range(layout.heads if per == "query" else layout.kv_heads) if index is None else index // width
            shared = 1 if per == "query" else layout.heads // layout.kv_heads
            asked |= {int(head) * shared + member for head in found for member in range(shared)}
            if value is not node.outputs[0] and index is None and any(one is not None for one in outputs[0]):
                raise NoRuleError(f"also gives every head out as {value.name}")
        return np.array(sorted(asked), dtype=np.int64)

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], flow: Flow) -> list[Gain | None]:
        raise NoRuleError("is not a product with the gated tensor")

    def mixes(self, node: ir.Node, index: int, axis: int, flow: Flow) -> bool:
        blocks = (*self.layout(node, flow).inputs, *(None,) * len(node.inputs))[index]
        return blocks is None or blocks.axis != axis

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], flow: Flow) -> None:
        layout = self.layout(node, flow)
        first = layout.outputs[0]
        assert first is not None
        index = demand.outputs[0][first.axis]
        if index is None:
            return
        heads = np.unique(index // first.runs[0][1])
        groups, counts = np.unique(heads // (layout.heads // layout.kv_heads), return_counts=True)
        keys = len(groups) if (counts == counts[0]).all() else len(heads)
        for name, number in layout.attributes(len(heads), keys).items():
            make = ir.AttrInt64s if isinstance(number, tuple) else ir.AttrInt64
            node.attributes[name] = make(name, number)  # type: ignore[arg-type]


def _read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _rank(flow: Flow, value: ir.Value) -> int:
    return len(flow.probe.shape(value) or ())


def _expand(layout: Layout, blocks: Blocks, heads: np.ndarray, keys: np.ndarray, shape: tuple[int, ...]) -> Need:
    """The need of the given query heads and key/value heads (repeats allowed) in a tensor."""
    need = list(whole(len(shape)))
    parts: list[np.ndarray] = []
    start = 0
    for per, width in blocks.runs:
        chosen = heads if per == "query" else keys
        parts.append((start + chosen[:, None] * width + np.arange(width)).reshape(-1))
        start += width * (layout.heads if per == "query" else layout.kv_heads)
    need[blocks.axis] = simplify(np.concatenate(parts), shape[blocks.axis])
    return tuple(need)


RULES = {
    ("", "Attention"): AttentionRule(_standard),
    ("com.microsoft", "Attention"): AttentionRule(_packed),
    ("com.microsoft", "MultiHeadAttention"): AttentionRule(_multi_head),
    ("com.microsoft", "GroupQueryAttention"): AttentionRule(_grouped),
    ("", "RotaryEmbedding"): AttentionRule(_rotary),
    ("com.microsoft", "RotaryEmbedding"): AttentionRule(_rotary),
}
