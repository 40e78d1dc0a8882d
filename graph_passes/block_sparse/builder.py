"""The body of block-sparse attention (`block_sparse`), built from plain operators.

Rows of all heads go into a few buckets by how many key blocks they keep, and a bucket is one product: gather query, key
and value blocks, multiply, mask, softmax, multiply. Heads that keep every block are dense together, in one product of
all positions. One gather at the end puts the results in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graph_passes.block_sparse.masks import BlockMask
from graph_passes.block_sparse.row_buckets import Bucket, buckets, computed, whole

_OFTEN = 2
"""Uses of a key block, on average, from which on it pays to copy all blocks out first."""


class GraphBuilder:
    """Nodes of the function as they are made, and its constants."""

    def __init__(self, dtype: ir.DataType) -> None:
        self.nodes: list[ir.Node] = []
        self.dtype = dtype
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def __call__(self, op_type: str, *inputs: ir.Value | None, outputs: int = 1, **attributes: Any) -> Any:
        node = ir.node(op_type, inputs, attributes, num_outputs=outputs)
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else list(node.outputs)

    def ints(self, content: Any) -> ir.Value:
        return self._constant(np.asarray(content, np.int64))

    def floats(self, content: Any) -> ir.Value:
        return self._constant(np.asarray(content, self.dtype.numpy()))

    def _constant(self, content: np.ndarray) -> ir.Value:
        key = (str(content.dtype), content.shape, content.tobytes())
        if key not in self._constants:
            self._constants[key] = self("Constant", value=ir.tensor(content))
        return self._constants[key]


class Attention:
    """The function's body, built piece by piece.

    Positions are gathered one by one and clipped to those that there are, so nothing is padded and no layout changes:
    a tensor `[batch, position, head, dim]` is read as `[batch, position * head, dim]`.
    """

    def __init__(
        self,
        body: GraphBuilder,
        mask: BlockMask,
        dims: tuple[int, int],
        scale: float,
        causal: bool,
        persistent: int,
        full: int,
        given: dict[str, ir.Value],
    ) -> None:
        self.op, self.mask, self.dims, self.scale = body, mask, dims, scale
        self.causal, self.persistent, self.full, self.given = causal, persistent, full, given
        self.kept = computed(mask, causal=causal)
        self.heads, self.rows, self.columns = mask.kept.shape
        self.buckets = buckets(mask, dims[0], causal=causal, every=bool(persistent))
        self.whole = np.flatnonzero(whole(mask, causal=causal))
        # A quarter, so that several of them add up to a number still.
        self.hidden = float(np.finfo(body.dtype.numpy()).min) / 4

    def build(self) -> ir.Value:
        op, block = self.op, self.mask.block
        self.inside = op.ints(np.arange(block))
        self.queries = op("Shape", self.given["query"], start=1, end=2)
        self.keys = op("Shape", self.given["key"], start=1, end=2)
        if self.persistent:
            self.keys = op("Sub", self.keys, op.ints([self.persistent]))
        self.missing = None
        if self.mask.memory:
            remembered = op("Sub", self.keys, self.queries)
            self.missing = op("Sub", op.ints([self.mask.memory]), remembered)
        reached = self.keys if self.missing is None else op("Add", self.keys, self.missing)
        self.query_blocks, self.key_blocks = self._blocks(self.queries), self._blocks(reached)
        self.query_tokens = op("Reshape", self.given["query"], op.ints([0, -1, self.dims[0]]))
        if self.buckets:
            self._lay_out()
        counts = np.array(
            [[max(1, np.searchsorted(b.rows, rows)) for b in self.buckets] for rows in range(self.rows + 1)], np.int64
        ).reshape(self.rows + 1, -1)
        return self._ordered(self._parts(counts), self._dense() if len(self.whole) else None, counts)

    def _parts(self, counts: np.ndarray) -> list[ir.Value]:
        """Each bucket's output, `[batch, row, position in block, value_dim]`."""
        if not self.buckets:
            return []
        op, block = self.op, self.mask.block
        widths = np.array([[_reach(b, columns) for b in self.buckets] for columns in range(self.columns + 1)])
        count, width = (
            op("Gather", op.ints(table), place, axis=0)
            for table, place in ((counts, self.query_blocks), (widths, self.key_blocks))
        )
        pairs = op("Transpose", op("Reshape", op("Concat", count, width, axis=0), op.ints([2, -1])), perm=[1, 0])
        number = len(self.buckets)
        reached = zip(
            self._split_up(op("Reshape", count, op.ints([-1])), [1] * number),
            self._split_up(op("Reshape", pairs, op.ints([-1])), [2] * number),
            strict=True,
        )
        heads, rows = (np.concatenate([getattr(bucket, name) for bucket in self.buckets]) for name in ("heads", "rows"))
        last = op("Mul", op("Sub", self.queries, op.ints([1])), op.ints([self.heads]))
        token = op.ints((rows * block * self.heads + heads)[:, None])
        token = op("Add", token, op.ints(np.arange(block) * self.heads))
        token = op("Min", token, op("Add", op.ints(heads[:, None]), last))
        tokens = self._split_up(token, [len(bucket.rows) for bucket in self.buckets])
        return [
            self._compute(bucket, some, *sizes)
            for bucket, some, sizes in zip(self.buckets, tokens, reached, strict=True)
        ]

    def _split_up(self, value: ir.Value, sizes: Sequence[int]) -> list[ir.Value]:
        """Pieces along the first axis."""
        if len(sizes) == 1:
            return [value]
        found: list[ir.Value] = self.op("Split", value, self.op.ints(list(sizes)), axis=0, outputs=len(sizes))
        return found

    def _blocks(self, size: ir.Value) -> ir.Value:
        """How many blocks hold so many positions, `[1]`."""
        block = self.mask.block
        return self.op("Div", self.op("Add", size, self.op.ints([block - 1])), self.op.ints([block]))

    def _lay_out(self) -> None:
        """Where to find the keys and values of each block and head, and what is added to their scores, `[batch or 1,
        block * head + 1, position in block]`; the last one of these hides, for rows to be filled up."""
        op, block = self.op, self.mask.block
        first = op("Mul", op("Range", op.ints(0), self._scalar(self.key_blocks), op.ints(1)), op.ints(block))
        position = op("Add", op("Unsqueeze", first, op.ints([1])), self.inside)
        if self.missing is not None:
            position = op("Sub", position, self.missing)
            position = op("Where", op("Less", position, op.ints([0])), self.keys, position)
        position = op("Unsqueeze", op("Min", position, self.keys), op.ints([1]))
        token = op("Mul", op("Min", position, op("Sub", self.keys, op.ints([1]))), op.ints(self.heads))
        token = op("Reshape", op("Add", token, op.ints(np.arange(self.heads)[:, None])), op.ints([-1, block]))
        token = op("Concat", token, op.ints(np.zeros((1, block))), axis=0)
        # Gathered from all keys by blocks once, if blocks are used often enough; else by each bucket from all keys.
        often = int(np.delete(self.kept, self.whole, axis=0).sum()) > _OFTEN * self.heads * self.columns
        self.blocks, self.vectors = [], []
        for name, dim in zip(("key", "value"), self.dims, strict=True):
            tokens = op("Reshape", self.given[name], op.ints([0, -1, dim]))
            self.blocks.append((op("Gather", tokens, token, axis=1), None) if often else (tokens, token))
            if self.persistent:
                vectors = self._split(self.given[name], 1)[1]
                self.vectors.append(op("Transpose", vectors, perm=[0, 2, 1, 3]))
        row, rest = self._split(self.given.get("row"), 3)
        if row is None:
            row = op("Expand", op.floats([[0.0]]), op("Concat", op.ints([1]), self.keys, axis=0))
        else:
            row = op("Max", op("Reshape", row, op.ints([0, -1])), op.floats(self.hidden))
        row = op("Pad", row, op.ints([0, 0, 0, 1]), op.floats(self.hidden))
        each = op("Reshape", op("Expand", position, op.ints([1, self.heads, 1])), op.ints([-1, block]))
        filler = op("Expand", self.keys, op.ints([1, block]))
        self.added = op("Gather", row, op("Concat", each, filler, axis=0), axis=1)
        self.added_rest = op.floats(np.zeros((1, 1, 1, self.persistent))) if rest is None else rest
        self.filler = op("Mul", self.key_blocks, op.ints([self.heads]))
        full, self.full_rest = self._split(self.given.get("full"), 3)
        if full is not None:
            before = op.ints([0]) if self.missing is None else self.missing
            after = op("Sub", op("Mul", self.key_blocks, op.ints([block])), op("Add", self.keys, before))
            zeros = op.ints([0, 0, 0])
            full = op("Pad", full, op("Concat", zeros, before, zeros, after, axis=0))
            # The batch's size, which may be one, is copied; rows of a block follow one another.
            self.full_table = op("Reshape", full, op.ints([0, -1, block]))
        if self.full_rest is not None:
            self.full_rest = op("Reshape", self.full_rest, op.ints([0, -1, self.persistent]))

    def _split(self, value: ir.Value | None, axis: int) -> tuple[ir.Value | None, ir.Value | None]:
        """What belongs to keys that have a position, and to those after them that have none."""
        if value is None or not self.persistent:
            return value, None
        op, start, end, along = self.op, self.op.ints([0]), self.op.ints([-self.persistent]), self.op.ints([axis])
        last = op.ints([np.iinfo(np.int64).max])
        return op("Slice", value, start, end, along), op("Slice", value, end, last, along)

    def _scalar(self, value: ir.Value) -> ir.Value:
        return self.op("Squeeze", value, self.op.ints([0]))

    def _compute(self, bucket: Bucket, tokens: ir.Value, count: ir.Value, pair: ir.Value) -> ir.Value:
        """One bucket's output, `[batch, row * position in block, value_dim]`, of the first `count` rows and, by `pair`,
        as many columns as hold keys."""
        op, block, zero = self.op, self.mask.block, self.op.ints([0])
        none = bucket.columns < 0
        at = np.where(none, self.columns * self.heads, bucket.columns * self.heads + bucket.heads[:, None])
        keys_at = op("Min", op("Slice", op.ints(at), op.ints([0, 0]), pair), self.filler)
        query = op("Gather", self.query_tokens, op("Slice", tokens, zero, count), axis=1)
        key, value = (
            op("Reshape", op("Gather", table, self._tokens(token, keys_at), axis=1), op.ints([0, 0, -1, dim]))
            for (table, token), dim in zip(self.blocks, self.dims, strict=True)
        )
        added = op("Reshape", op("Gather", self.added, keys_at, axis=1), op.ints([0, 0, 1, -1]))
        if self.persistent:
            heads = op("Slice", op.ints(bucket.heads), zero, count)
            own = [op("Gather", vectors, heads, axis=1) for vectors in self.vectors]
            key, value = op("Concat", key, own[0], axis=2), op("Concat", value, own[1], axis=2)
            rest = op("Expand", self.added_rest, op("Concat", op.ints([1]), count, op.ints([1, 1]), axis=0))
            added = op("Concat", added, rest, axis=3)
        if bucket.diagonal:
            hidden = np.zeros((block, bucket.width * block), self.op.dtype.numpy())
            hidden[:, -block:] = np.triu(np.full((block, block), self.hidden), 1)
            added = op("Add", added, op.floats(hidden))
        scores = op("Mul", op("MatMul", query, op("Transpose", key, perm=[0, 1, 3, 2])), op.floats(self.scale))
        scores = op("Add", scores, added)
        if self.full:
            scores = op("Add", scores, self._full(bucket, count, pair))
        output = op("MatMul", op("Softmax", scores, axis=-1), value)
        if self.full or self.mask.memory or "row" in self.given:
            # A row of keys hidden alike gives their mean, which means nothing.
            seen = scores if self.full or bucket.diagonal else added
            most = op("ReduceMax", seen, op.ints([-1]), keepdims=1)
            output = op("Where", op("Greater", most, op.floats(self.hidden / 2)), output, op.floats(0.0))
        return op("Reshape", output, op.ints([0, -1, self.dims[1]]))

    def _dense(self) -> ir.Value:
        """The heads that keep every block, `[batch, head * query, value_dim]`."""
        op = self.op
        query, key, value = (
            op("Transpose", op("Gather", self.given[name], op.ints(self.whole), axis=2), perm=perm)
            for name, perm in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3]))
        )
        scores = op("Mul", op("MatMul", query, key), op.floats(self.scale))
        if "full" in self.given:
            heads = op.ints(self.whole if self.full > 1 else [0])
            pairs = op("Gather", self.given["full"], heads, axis=1)
            scores = op("Add", scores, op("Max", pairs, op.floats(self.hidden)))
        if "row" in self.given:
            scores = op("Add", scores, op("Max", self.given["row"], op.floats(self.hidden)))
        if self.causal:
            places = (op("Range", op.ints(0), self._scalar(size), op.ints(1)) for size in (self.keys, self.queries))
            key_at, query_at = next(places), op("Unsqueeze", next(places), op.ints([1]))
            later = op("Greater", key_at, query_at)
            scores = op("Add", scores, op("Where", later, op.floats(self.hidden), op.floats(0.0)))
        output = op("MatMul", op("Softmax", scores, axis=-1), value)
        if "full" in self.given or "row" in self.given:
            most = op("ReduceMax", scores, op.ints([-1]), keepdims=1)
            output = op("Where", op("Greater", most, op.floats(self.hidden / 2)), output, op.floats(0.0))
        return op("Reshape", output, op.ints([0, -1, self.dims[1]]))

    def _tokens(self, token: ir.Value | None, blocks: ir.Value) -> ir.Value:
        """Places of keys in what they are gathered from: blocks, or the tokens of blocks."""
        return blocks if token is None else self.op("Gather", token, blocks, axis=0)

    def _full(self, bucket: Bucket, count: ir.Value, pair: ir.Value) -> ir.Value:
        """What the full mask adds, `[batch or 1, row, position in block, key]`."""
        op, block = self.op, self.mask.block
        row = op("Add", op.ints(bucket.rows[:, None] * block), self.inside)
        row = op("Min", op("Slice", row, op.ints([0]), count), op("Sub", self.queries, op.ints([1])))
        if self.full > 1:
            heads = op("Slice", op.ints(bucket.heads[:, None]), op.ints([0]), count)
            row = op("Add", op("Mul", heads, self.queries), row)
        columns = op("Slice", op.ints(np.maximum(bucket.columns, 0)), op.ints([0, 0]), pair)
        columns = op("Min", columns, op("Sub", self.key_blocks, op.ints([1])))
        start = op("Mul", op("Unsqueeze", row, op.ints([2])), self.key_blocks)
        found = op("Gather", self.full_table, op("Add", start, op("Unsqueeze", columns, op.ints([1]))), axis=1)
        found = op("Reshape", found, op.ints([0, 0, block, -1]))
        if self.full_rest is not None:
            found = op("Concat", found, op("Gather", self.full_rest, row, axis=1), axis=3)
        return op("Max", found, op.floats(self.hidden))

    def _ordered(self, parts: list[ir.Value], dense: ir.Value | None, counts: np.ndarray) -> ir.Value:
        """The rows of all buckets, and the dense heads, at their places; zero where a head's row has no key."""
        op, block = self.op, self.mask.block
        group = np.full((self.heads, self.rows), len(self.buckets))
        rank = np.zeros((self.heads, self.rows), np.int64)
        for number, bucket in enumerate(self.buckets):
            group[bucket.heads, bucket.rows] = number
            rank[bucket.heads, bucket.rows] = np.arange(len(bucket.rows))
        offsets = np.concatenate([np.zeros((self.rows + 1, 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
        offset = op("Gather", op.ints(offsets), self._scalar(self.query_blocks), axis=0)
        here = (op.ints([0]), self.query_blocks, op.ints([1]))
        place = op(
            "Add", op("Gather", offset, op("Slice", op.ints(group), *here), axis=0), op("Slice", op.ints(rank), *here)
        )
        place = op("Mul", op("Unsqueeze", place, op.ints([2])), op.ints(block))
        place = op("Add", place, self.inside)
        nowhere = op("Mul", op("Gather", offset, op.ints(len(self.buckets)), axis=0), op.ints(block))
        # A row has a key if its first block holds one; the rest are zero.
        first = np.where(self.kept.any(2), self.kept.argmax(2), 2 * self.columns)[..., None]
        some = op(
            "Less", op("Slice", op.ints(np.zeros_like(first) if self.persistent else first), *here), self.key_blocks
        )
        place = op("Reshape", op("Where", some, place, nowhere), op.ints([self.heads, -1]))
        place = op("Slice", place, op.ints([0]), self.queries, op.ints([1]))
        if dense is not None:  # behind the buckets and their zero
            inside = op("Range", op.ints(0), self._scalar(self.queries), op.ints(1))
            start = op("Add", op("Mul", op.ints(np.arange(len(self.whole))[:, None]), self.queries), nowhere)
            behind = op("Add", op("Add", start, op.ints([1])), inside)
            order = np.arange(self.heads)
            order[self.whole] = self.heads + np.arange(len(self.whole))
            place = op("Gather", op("Concat", place, behind, axis=0), op.ints(order), axis=0)
        place = op("Transpose", place, perm=[1, 0])
        shape = op("Concat", op("Shape", self.given["query"], start=0, end=1), op.ints([1, self.dims[1]]), axis=0)
        nothing = op("Expand", op.floats(0.0), shape)
        found = [*parts, nothing, *([] if dense is None else [dense])]
        return op("Gather", op("Concat", *found, axis=1), place, axis=1)


def _reach(bucket: Bucket, columns: int) -> int:
    """How many columns of a bucket hold all key blocks before `columns`, at least one; of diagonal ones all of them, as
    the last one is the row's own."""
    if bucket.diagonal:
        return bucket.width
    return max(1, int(((bucket.columns >= 0) & (bucket.columns < columns)).sum(1).max()))
