"""Fuse cached attention: compute attention over a key/value cache by one operator of ONNX Runtime."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graph_passes.attention.mask_meaning import evaluate, hides_padding, nodes_behind
from graph_passes.attention.operands import (
    SWAP,
    NoMatchError,
    Operands,
    before_swap,
    operands_of_softmax,
    swaps,
    unmatched,
)
from graph_passes.attention.site_names import site_name
from graph_passes.attention.tracing import LAYOUT, product_ahead, product_behind
from graph_passes.flow.caches import IN_PLACE, read_caches
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.refusal import Refusal, RefusalCode
from graph_passes.passes.base import GraphPass, ReportedResult
from graph_passes.passes.count_positions import CountPositions, reads_free_size
from graph_passes.passes.name_decoding_axes import IDS, MASK
from graph_passes.tape import Tape, ancestors, producer_of, take_over

DOMAIN = "com.microsoft"
_GROUPED = "GroupQueryAttention"
_WIDTHS = 8
"""Divisor of the width of a head in `GroupQueryAttention`."""
_SELECTS = LAYOUT | {"Concat", "Gather"}
"""Operators that repeat, select or move the heads of a cache."""
_ELEMENTWISE = frozenset("Add And Cast Div Identity Max Min Mul Not Or Sub Where".split())
"""Operators that compute masks, and broadcast their inputs."""


@dataclasses.dataclass(frozen=True)
class FusedCachedAttention:
    """What `FuseCachedAttention` changed.

    Attributes:
        extending: names of the attentions whose operator also extends the cache.
        reading: names of the attentions whose operator reads keys and values of all positions.
        refused: attentions over a cache that stay as they are, and caches that no such attention reads.
    """

    extending: tuple[str, ...]
    reading: tuple[str, ...]
    refused: tuple[Refusal, ...]


class FuseCachedAttention(GraphPass[FusedCachedAttention]):
    """Replace attention over a recorded cache (`flow.caches`) by an operator of ONNX Runtime.

    The operator reads keys as they are cached, so no step transposes them. The addends of the scores (masks, windows,
    relative positions) stay unchanged, and are prepared once for all layers that share them.

    Args:
        folds_queries: whether query heads that share a key/value head become further queries of it (case 3).
        in_place: whether attentions may write new keys and values into the memory of the caches (case 5).

    Cases:
        1. Keys and values are a cache of the graph, that is the concatenation of earlier and new positions:
           `MultiHeadAttention` concatenates them, and the cache is its output.
        2. Keys and values are a cache that another graph computes, or are computed from a cache by selecting heads:
           `MultiHeadAttention` reads `[batch, head, position, width]`.
        3. In both cases, consecutive query heads that share a key/value head are further queries of this head, so that
           each key is read once for all of them. Where heads have biases of their own, or without `folds_queries`,
           keys and values are repeated.
        4. An attention that computes something else, or not in single precision, stays as it is and is refused.
        5. With `in_place`, an attention over a cache of the graph becomes `GroupQueryAttention`, whose caches may have
           room for further positions. The operator hides later keys by itself. Query heads are ordered by
           the key/value heads that they read, and repeated until each of these has equally many. Widths that are no
           multiple of 8, and graphs without `attention_mask` and `input_ids`, are left to case 1. Where every cache is
           read this way, the metadata say so (`flow.caches.IN_PLACE`).
    """

    def __init__(self, *, folds_queries: bool = True, in_place: bool = False) -> None:
        super().__init__()
        self._folds_queries, self._in_place = folds_queries, in_place

    def call(self, model: ir.Model) -> ReportedResult[FusedCachedAttention]:
        matches: list[_Match] = []
        refused: list[Refusal] = []
        counted = self._in_place and CountPositions()(model).modified
        rewriter = _Rewriter(model)
        while caches := read_caches(model):
            pasts = {present or past: past for past, present in caches.items()}
            matcher = _Matcher(model, pasts, folds_queries=self._folds_queries, in_place=self._in_place)
            fused, refused = _fuse(model, matcher, rewriter)
            matches += fused
            if not fused or all(refusal.code is not RefusalCode.UNKNOWN_SHAPE for refusal in refused):
                break  # else layers behind the fused ones may have known shapes now
        extending, reading = (tuple(m.name for m in matches if (m.past is not None) == case) for case in (True, False))
        recorded = self._in_place and IN_PLACE not in model.metadata_props and is_in_place(model)
        if recorded:
            model.metadata_props[IN_PLACE] = "1"
        is_modified = bool(matches) or counted or recorded
        return ReportedResult(model, is_modified, FusedCachedAttention(extending, reading, tuple(refused)))


def is_in_place(model: ir.Model) -> bool:
    """Whether every cache that a graph reads and returns may have room for further positions."""
    caches = [(past, present) for past, present in read_caches(model).items() if present is not None]
    return bool(caches) and all(
        (node.op_type == _GROUPED and node is present.producer())
        or (node.op_type == "Shape" and not reads_free_size(node))
        for past, present in caches
        for node, _ in past.uses()
    )


def _fuse(model: ir.Model, matcher: _Matcher, rewriter: _Rewriter) -> tuple[list[_Match], list[Refusal]]:
    """Fuse the attentions whose shapes are known; returns them, and why others stay."""
    matches, refused, read = list[_Match](), list[Refusal](), set[ir.Value]()
    for node in model.graph:
        if sources := matcher.caches_behind(node):
            read.update(sources)
            try:
                matches.append(matcher.match(node))
            except NoMatchError as error:
                refused.append(error.refusal(site_name(node, node.outputs[0]) or node.name or ""))
    refused += [_unread(past) for cache, past in matcher.pasts.items() if cache not in read and not _is_fused(past)]
    for match in matches:
        rewriter.rewrite(match)
    if matches:
        model.graph.opset_imports[DOMAIN] = 1
        model.graph.sort()
        RemoveUnusedNodesPass()(model)
    return matches, refused


def _is_fused(past: ir.Value) -> bool:
    """Whether an operator of a whole attention reads a cache already."""
    return any(reader.op_type in ("Attention", _GROUPED, "MultiHeadAttention") for reader, _ in past.uses())


def _unread(past: ir.Value) -> Refusal:
    why = "is read by no attention between two matmuls"
    return Refusal(frozenset(), "graph input", past.name or "", why, RefusalCode.UNMATCHED_ATTENTION)


@dataclasses.dataclass(frozen=True, eq=False)
class _Match:
    """One attention over a cache.

    Attributes:
        name: name of its site.
        softmax: the node that computes its probabilities.
        operands: its operands; addends that are zero are left out.
        heads: number of query heads.
        kv_heads: number of heads of `key` and `value`.
        widths: widths of a query and of a value.
        key: keys of all positions, `[batch, kv_head, key, width]`.
        value: values of all positions.
        past: keys and values of earlier positions and of new ones, if the operator concatenates them.
        rank: number of axes of the sum of the addends.
        repeats_rows: whether that sum has one row for all queries.
        spans_heads: whether that sum differs between heads.
        sources: the key/value head that each query head reads, if the operator is `GroupQueryAttention`.
        hides_padding: whether the sum hides padding and later keys alone, as far as that is known.
    """

    name: str
    softmax: ir.Node
    operands: Operands
    heads: int
    kv_heads: int
    widths: tuple[int, int]
    key: ir.Value
    value: ir.Value
    past: tuple[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]] | None
    rank: int
    repeats_rows: bool
    spans_heads: bool
    sources: tuple[int, ...] | None = None
    hides_padding: bool = False

    @property
    def readers(self) -> int:
        """The number of query heads that read each key/value head."""
        return len(self.groups[0])

    @property
    def groups(self) -> list[list[int]]:
        """The query heads that read each key/value head, of which each has equally many: the last is repeated."""
        assert self.sources is not None
        readers = [[query for query, key in enumerate(self.sources) if key == head] for head in range(self.kv_heads)]
        most = max(map(len, readers))
        return [(heads or [0]) + (heads or [0])[-1:] * (most - max(len(heads), 1)) for heads in readers]


class _Sources(NamedTuple):
    """What `GroupQueryAttention` reads of a cache.

    Attributes:
        caches: keys and values of all positions.
        parts: keys and values of earlier positions and of new ones.
        kv_heads: number of their heads.
        heads: the one of these that each query head reads.
    """

    caches: tuple[ir.Value, ir.Value]
    parts: tuple[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]]
    kv_heads: int
    heads: tuple[int, ...]


class _Matcher:
    """Matches the attentions of one graph.

    `pasts`: tensor that holds all positions of a cache -> the graph's input of the cache.
    """

    def __init__(
        self, model: ir.Model, pasts: dict[ir.Value, ir.Value], *, folds_queries: bool, in_place: bool
    ) -> None:
        self.pasts, self._folds_queries = pasts, folds_queries
        self._probe = Probe(model)
        self._inputs = {value.name: value for value in model.graph.inputs}
        self._in_place = in_place and {MASK, IDS} <= self._inputs.keys()
        self._hiding: dict[ir.Value, bool] = {}

    def caches_behind(self, softmax: ir.Node) -> list[ir.Value]:
        """The caches that hold the keys and values of an attention; empty if the node belongs to none over a cache."""
        if softmax.op_type != "Softmax":
            return []
        products = product_behind(softmax.inputs[0]), product_ahead(softmax.outputs[0])
        caches = [self._cache_behind(product.inputs[1]) for product in products if product is not None]
        return [cache for cache in caches if cache is not None] if len(caches) == 2 else []

    def _cache_behind(self, value: ir.Value | None) -> ir.Value | None:
        """The cache whose heads a tensor holds, repeated, selected, scaled or moved; None: it is computed otherwise."""
        while value is not None and value not in self.pasts:
            node = value.producer()
            value = node.inputs[0] if node is not None and node.op_type in _SELECTS | {"Div", "Mul"} else None
        return value

    def match(self, softmax: ir.Node) -> _Match:
        """The attention of a softmax.

        Raises:
            NoMatchError: the operator does not compute what it computes.
        """
        operands = operands_of_softmax(softmax, self._probe)
        query, key, value = (self._heads(operand, softmax) for operand in operands[:3])
        addends = [addend for addend in operands.addends if not self._probe.is_zero(addend)]
        operands = operands._replace(addends=addends)
        rank, (_, spans_heads, spans_queries, _) = self._spans(operands, softmax)
        name = site_name(softmax, operands.output) or softmax.name or ""
        tensors, kv_heads, past = (operands.key, operands.value), key[1], None
        sources = self._sources_in_place(operands, softmax)
        if sources is not None:
            tensors, past, kv_heads = sources.caches, sources.parts, sources.kv_heads
        else:
            caches = self._shared_caches(operands, softmax)
            folds = self._folds_queries and not spans_heads
            if caches is not None and (folds or caches[1] == query[1]):
                tensors, kv_heads = caches
                past = self._concatenated(tensors, operands)
            if query[1] % kv_heads or self._heads(tensors[1], softmax)[1] != kv_heads:
                raise unmatched(softmax, "belongs to heads that share keys and values unevenly")
            if spans_heads and query[1] != kv_heads:
                raise unmatched(softmax, "belongs to heads with biases of their own that share keys and values")
        return _Match(
            name,
            softmax,
            operands,
            query[1],
            kv_heads,
            (query[3], value[3]),
            *tensors,
            past,
            rank,
            repeats_rows=not spans_queries,
            spans_heads=spans_heads,
            sources=None if sources is None else sources.heads,
            hides_padding=sources is not None and self._hides_padding(operands),
        )

    def _hides_padding(self, operands: Operands) -> bool:
        """Whether the only addend hides padding and later keys alone."""
        mask, ids = (self._inputs[name] for name in (MASK, IDS))
        addend = operands.addends[0]
        if addend not in self._hiding:
            self._hiding[addend] = hides_padding(addend, mask, ids)
        return len(operands.addends) == 1 and self._hiding[addend]

    def _sources_in_place(self, operands: Operands, softmax: ir.Node) -> _Sources | None:
        """What `GroupQueryAttention` reads instead of the keys and values of an attention; None: it cannot."""
        query, *tensors = (self._heads(operand, softmax) for operand in operands[:3])
        key, value = self._cache_behind(operands.key), self._cache_behind(operands.value)
        widths = {query[3], *(shape[3] for shape in tensors)}
        if not self._in_place or not operands.addends or len(widths) > 1 or query[3] % _WIDTHS:
            return None
        if key is None or value is None or (parts := self._concatenated((key, value), operands)) is None:
            return None
        pairs = ((operands.key, key), (operands.value, value))
        heads, *value_heads = (self._sources(operand, cache, query[1]) for operand, cache in pairs)
        kv_heads, *sizes = (self._heads(cache, softmax)[1] for cache in (key, value))
        if heads is None or [heads] != value_heads or [kv_heads] != sizes:
            return None
        return _Sources((key, value), parts, kv_heads, heads)

    def _shared_caches(self, operands: Operands, softmax: ir.Node) -> tuple[tuple[ir.Value, ir.Value], int] | None:
        """The caches of keys and of values, and the number of their heads, each of which equally many queries read."""
        key, value = self._cache_behind(operands.key), self._cache_behind(operands.value)
        if key is None or value is None:
            return None
        heads, kv_heads = (self._heads(tensor, softmax)[1] for tensor in (operands.query, key))
        pairs = ((operands.key, key), (operands.value, value))
        return ((key, value), kv_heads) if all(self._repeats(*pair, heads, kv_heads) for pair in pairs) else None

    def _heads(self, value: ir.Value, softmax: ir.Node) -> tuple[int, ...]:
        """Shape of queries, keys or values, whose heads and width are fixed."""
        shape, probe = self._probe.shape(value), self._probe
        if shape is None:
            raise NoMatchError(RefusalCode.UNKNOWN_SHAPE, "has operands of unknown shape", softmax)
        if len(shape) != 4 or not (probe.fixed(value, 1) and probe.fixed(value, 3)):
            raise unmatched(softmax, "has operands whose axes are not batch, head, position, width")
        if probe.dtype(value) != ir.DataType.FLOAT:
            raise unmatched(softmax, "has operands that are not in single precision")
        return tuple(shape)

    def _spans(self, operands: Operands, softmax: ir.Node) -> tuple[int, tuple[bool, ...]]:
        """Rank of the sum of the addends, and whether it differs between rows, heads, queries and keys."""
        total: tuple[bool, ...] = ()
        for addend in operands.addends:
            spans = _spans_of(addend, self._probe)
            if spans is None or len(spans) > 4:
                raise NoMatchError(RefusalCode.UNKNOWN_SHAPE, "adds tensors of unknown shape to the scores", softmax)
            total = _broadcast(total, spans)
        if operands.addends and not any(total[-1:]):
            raise unmatched(softmax, "adds the same number to the scores of all keys")
        return len(total), _broadcast((False,) * 4, total)

    def _repeats(self, value: ir.Value, cache: ir.Value, heads: int, kv_heads: int) -> bool:
        """Whether a tensor holds every head of a cache equally often, its copies side by side."""
        if heads % kv_heads:
            return False
        return self._sources(value, cache, heads) == tuple(np.repeat(range(kv_heads), heads // kv_heads).tolist())

    def _sources(self, value: ir.Value, cache: ir.Value, heads: int) -> tuple[int, ...] | None:
        """The head of a cache that each of some heads of a tensor is; None: one is another. Computes samples."""
        rng, sources = np.random.default_rng(0), set[tuple[int, ...]]()
        for probe in (self._probe, self._probe.exchanged()):
            shape, nodes = probe.shape(cache), nodes_behind(value, {cache, *probe.known})
            if shape is None or nodes is None:
                return None
            feeds = {cache: rng.standard_normal(shape, np.float32)}
            for source in (source for node in nodes for source in node.inputs if source is not None):
                if (known := probe.contents(source)[0]) is not None:
                    feeds[source] = known
            content = evaluate(value, nodes, feeds, shape=(shape[0], heads, *shape[2:]))
            if content is None:
                return None
            equal = (content[:, :, None] == feeds[cache][:, None]).all((0, 3, 4))
            if not equal.any(1).all():
                return None
            sources.add(tuple(equal.argmax(1).tolist()))
        return sources.pop() if len(sources) == 1 else None

    def _concatenated(
        self, tensors: Sequence[ir.Value], operands: Operands
    ) -> tuple[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]] | None:
        """Earlier and new keys, earlier and new values, if caches are their concatenation and nothing needs it before.

        A mask may be computed from the shape of the cache: then the operator cannot return it.
        """
        pairs = []
        for cache in tensors:
            node, past = cache.producer(), self.pasts[cache]
            if node is None or node.op_type != "Concat" or len(node.inputs) != 2 or node.inputs[0] is not past:
                return None
            if node.attributes.get_int("axis", 0) not in (2, -2) or node.inputs[1] is None:
                return None
            pairs.append((past, node.inputs[1]))
        new = [operands.query, *operands.addends, *(pair[1] for pair in pairs)]
        return None if ancestors(new) & set(tensors) else (pairs[0], pairs[1])


class _Rewriter:
    """Replaces matched attentions of one graph; layers that add the same numbers to their scores share them."""

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        self._biases: dict[tuple[object, ...], ir.Value] = {}
        self._hidden: ir.Value | None = None  # what hides padding, which all layers share
        self._counts: tuple[ir.Value, ir.Value] | None = None
        self._op = Tape()

    def rewrite(self, match: _Match) -> None:
        """Compute an attention by one operator, and insert it before the product of probabilities and values."""
        operands = match.operands
        view, caches = self._separate(match) if match.sources is None else self._grouped(match)
        for reader, position in list(operands.output.uses()):
            if swaps(reader) and not reader.outputs[0].is_graph_output():
                reader.outputs[0].replace_all_uses_with(view)
            else:
                reader.replace_input_with(position, self._op("Transpose", view, perm=SWAP))
        last = operands.output.producer()
        assert last is not None
        self._op.insert_before(last)
        self._op = Tape()
        for cache, value in zip((match.key, match.value), caches, strict=False):
            take_over(cache, value)

    def _separate(self, match: _Match) -> tuple[ir.Value, Sequence[ir.Value]]:
        """`MultiHeadAttention`: its output `[batch, position, head, width]`, and the caches that it extends."""
        repeats = match.heads // match.kv_heads
        query = self._query(match, repeats)
        bias = self._bias(match, query, repeats) if match.operands.addends else None
        if match.past is None:
            inputs = [query, match.key, match.value, None, None, bias]
        else:
            inputs = [query, *self._new(match), None, None, bias, match.past[0][0], match.past[1][0]]
        output, *caches = self._attention("MultiHeadAttention", match, inputs, {"num_heads": match.kv_heads})
        return self._output(match, output, repeats), caches

    def _grouped(self, match: _Match) -> tuple[ir.Value, Sequence[ir.Value]]:
        """`GroupQueryAttention`: its output `[batch, position, head, width]`, and the caches that it extends."""
        assert match.past is not None
        width, order = match.widths[0], [head for heads in match.groups for head in heads]
        is_ordered = order == list(range(match.heads))
        if is_ordered:
            query = self._merged(match.operands.query, match.heads, width)
        else:
            view = before_swap(match.operands.query) or self._op("Transpose", match.operands.query, perm=SWAP)
            query = self._reshape(self._op("Gather", view, self._op.ints(order), axis=2), 0, 0, len(order) * width)
        bias = self._padding() if match.hides_padding else self._bias(match, query, 1)
        if match.spans_heads and not is_ordered:
            bias = self._op("Gather", bias, self._op.ints(order), axis=1)
        earlier = (pair[0] for pair in match.past)
        inputs = [query, *self._new(match), *earlier, *self._lengths(), None, None, None, bias]
        heads = {"num_heads": len(order), "kv_num_heads": match.kv_heads}
        output, *caches = self._attention(_GROUPED, match, inputs, heads)
        view = self._reshape(output, 0, 0, len(order), width)
        if not is_ordered:
            positions = [order.index(head, key * match.readers) for head, key in enumerate(match.sources or ())]
            view = self._op("Gather", view, self._op.ints(positions), axis=2)
        return view, caches

    def _attention(
        self, op_type: str, match: _Match, inputs: Sequence[ir.Value | None], heads: Mapping[str, int]
    ) -> Sequence[ir.Value]:
        """The outputs of an operator."""
        return self._op.op_multi_out(
            op_type,
            inputs,
            {**heads, "scale": float(match.operands.scale)},
            domain=DOMAIN,
            num_outputs=1 if match.past is None else 3,
            name=match.softmax.name,
            metadata_props=dict(match.softmax.metadata_props),
        )

    def _new(self, match: _Match) -> list[ir.Value]:
        """New keys and values `[batch, position, kv_head * width]`."""
        assert match.past is not None
        return [
            self._merged(pair[1], match.kv_heads, width) for pair, width in zip(match.past, match.widths, strict=True)
        ]

    def _lengths(self) -> tuple[ir.Value, ir.Value]:
        """The last position of each text `[batch]`, and the number of all positions."""
        if self._counts is None:
            mask = next(value for value in self._graph.inputs if value.name == MASK)
            op = Tape()
            total = op("Cast", op("Squeeze", op.size(mask, 1)), to=ir.DataType.INT32)
            last = op("Sub", total, op.constant(np.array(1, np.int32)))
            self._counts = op("Expand", last, op.size(mask, 0)), total
            op.insert_before(self._graph[0])
        return self._counts

    def _padding(self) -> ir.Value:
        """What hides padding, `[batch, 1, position, key]`."""
        mask, ids = (next(value for value in self._graph.inputs if value.name == name) for name in (MASK, IDS))
        if self._hidden is None:
            op = Tape()
            read = op("Sub", op("Cast", mask, to=ir.DataType.FLOAT), op.constant(np.array(1, np.float32)))
            hidden = op("Mul", read, op.constant(np.array(np.finfo(np.float32).max)))
            single = op.ints([1])
            sizes = op("Concat", single, single, op.size(ids, 1), single, axis=0)
            self._hidden = op("Expand", op("Unsqueeze", hidden, op.ints([1, 2])), sizes)
            op.insert_before(self._graph[0])
        return self._hidden

    def _reshape(self, value: ir.Value, *sizes: int) -> ir.Value:
        return self._op("Reshape", value, self._op.ints(sizes))

    def _query(self, match: _Match, repeats: int) -> ir.Value:
        """The queries `[batch, repeat * position, kv_head * width]`."""
        query, kv_heads, width = match.operands.query, match.kv_heads, match.widths[0]
        if repeats == 1:
            return self._merged(query, kv_heads, width)
        view = before_swap(query)
        if view is None:
            split = self._reshape(query, 0, kv_heads, repeats, -1, width)
            rows = self._op("Transpose", split, perm=(0, 2, 3, 1, 4))
        else:
            split = self._reshape(view, 0, 0, kv_heads, repeats, width)
            rows = self._op("Transpose", split, perm=(0, 3, 1, 2, 4))
        return self._reshape(rows, 0, -1, kv_heads * width)

    def _merged(self, value: ir.Value, heads: int, width: int) -> ir.Value:
        """A tensor `[batch, head, position, width]` as `[batch, position, head * width]`."""
        view = before_swap(value)
        return self._reshape(view or self._op("Transpose", value, perm=SWAP), 0, 0, heads * width)

    def _output(self, match: _Match, rows: ir.Value, repeats: int) -> ir.Value:
        """The output `[batch, position, head, width]` of queries `[batch, repeat * position, kv_head * width]`."""
        width = match.widths[1]
        if repeats > 1:
            split = self._reshape(rows, 0, repeats, -1, match.kv_heads, width)
            rows = self._op("Transpose", split, perm=(0, 2, 3, 1, 4))
        return self._reshape(rows, 0, 0, match.heads, width)

    def _bias(self, match: _Match, query: ir.Value, repeats: int) -> ir.Value:
        """The sum of the addends, `[batch or 1, head or 1, repeat * position, key]`."""
        key = (*match.operands.addends, repeats)
        if key not in self._biases:
            total = match.operands.addends[0]
            for addend in match.operands.addends[1:]:
                total = self._op("Add", total, addend)
            if match.rank < 4:
                total = self._op("Unsqueeze", total, self._op.ints(range(4 - match.rank)))
            if match.repeats_rows:
                rows = self._op("Gather", self._op("Shape", query), self._op.ints([1]), axis=0)
                sizes = self._op("Concat", self._op.ints([1, 1]), rows, self._op.ints([1]), axis=0)
                total = self._op("Expand", total, sizes)
            elif repeats > 1:
                total = self._op("Concat", *[total] * repeats, axis=2)
            self._biases[key] = total
        return self._biases[key]


def _spans_of(value: ir.Value | None, probe: Probe) -> tuple[bool, ...] | None:
    """Whether the size of each axis of a tensor differs from one; None if it is unknown.

    A mask in which an input meets computed positions has no known shape if the file gives their lengths two names.
    """
    shape = probe.shape(value)
    if shape is not None:
        return tuple(size != 1 for size in shape)
    node = producer_of(value)
    if node is None or node.op_type not in _ELEMENTWISE:
        return None
    total: tuple[bool, ...] = ()
    for source in node.inputs:
        spans = _spans_of(source, probe)
        if spans is None:
            return None
        total = _broadcast(total, spans)
    return total


def _broadcast(first: tuple[bool, ...], second: tuple[bool, ...]) -> tuple[bool, ...]:
    """The axes of two tensors, counted from the last, that have another size than one in either of them."""
    pairs = itertools.zip_longest(reversed(first), reversed(second), fillvalue=False)
    return tuple(a or b for a, b in pairs)[::-1]
