"""The body of block-sparse attention, built from operators of the ONNX standard.

Rows of all heads are sorted into a few buckets by the number of key blocks that they keep. A bucket is one product:
gather query, key and value blocks, multiply, mask, softmax, multiply. Heads that keep every block are computed together
as one dense product of all positions. One gather at the end orders the results.

Keys are found by tables of blocks and heads. Positions are gathered one by one and clipped to those that exist, so
nothing is padded and no layout changes: a tensor `[batch, position, head, dim]` is read as
`[batch, position * head, dim]`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from graph_passes.block_sparse.row_buckets import Bucket
from graph_passes.block_sparse.spec import AttentionInputs, AttentionSpec, GraphBuilder, Sizes, read_sizes

_REUSED = 2
"""Average number of uses of a key block above which it is faster to gather all blocks first."""


def build_body(op: GraphBuilder, spec: AttentionSpec, inputs: AttentionInputs) -> ir.Value:
    """Record the nodes of a block-sparse attention; returns its output, `[batch, query, head, value_dim]`."""
    op.ints(np.arange(spec.block))  # Recorded first, so that the order of nodes does not depend on the mask.
    body = _Body(op, spec, inputs, read_sizes(op, spec, inputs))
    query_tokens = op("Reshape", inputs.query, op.ints([0, -1, spec.head_dim]))
    counts = _row_counts(spec)
    parts = body.bucket_outputs(query_tokens, counts) if spec.buckets else []
    dense = body.dense_output() if len(spec.whole_heads) else None
    return body.in_order(parts, dense, counts)


def _row_counts(spec: AttentionSpec) -> np.ndarray:
    """Rows of a bucket that hold queries, at least one, by number of query blocks: `[query blocks, bucket]`."""
    counts = [[max(1, np.searchsorted(bucket.rows, rows)) for bucket in spec.buckets] for rows in range(spec.rows + 1)]
    return np.array(counts, np.int64).reshape(spec.rows + 1, -1)


def _column_counts(spec: AttentionSpec) -> np.ndarray:
    """Columns of a bucket that hold keys, at least one, by number of key blocks: `[key blocks, bucket]`."""
    return np.array([[_width(bucket, columns) for bucket in spec.buckets] for columns in range(spec.columns + 1)])


def _width(bucket: Bucket, columns: int) -> int:
    """Number of columns of a bucket that hold its key blocks before `columns`.

    A diagonal bucket needs all of its columns, because the last one is the row's own block.
    """
    if bucket.diagonal:
        return bucket.width
    return max(1, int(((bucket.columns >= 0) & (bucket.columns < columns)).sum(1).max()))


@dataclasses.dataclass(frozen=True)
class _Body:
    """The nodes of one block-sparse attention, recorded on the tape of the function."""

    op: GraphBuilder
    spec: AttentionSpec
    inputs: AttentionInputs
    sizes: Sizes

    def bucket_outputs(self, query_tokens: ir.Value, row_counts: np.ndarray) -> list[ir.Value]:
        """The output of each bucket, `[batch, row * position in block, value_dim]`.

        Args:
            query_tokens: `[batch, query * head, head_dim]`.
            row_counts: see `_row_counts`.
        """
        op, spec, sizes = self.op, self.spec, self.sizes
        tables = _key_tables(op, spec, self.inputs, sizes)
        column_counts = _column_counts(spec)
        count, width = (
            op("Gather", op.ints(table), blocks, axis=0)
            for table, blocks in ((row_counts, sizes.query_blocks), (column_counts, sizes.key_blocks))
        )
        extents = op("Transpose", op("Reshape", op("Concat", count, width, axis=0), op.ints([2, -1])), perm=[1, 0])
        number = len(spec.buckets)
        counts = op.split(op("Reshape", count, op.ints([-1])), [1] * number)
        extents_of = op.split(op("Reshape", extents, op.ints([-1])), [2] * number)
        heads, rows = (np.concatenate([getattr(bucket, name) for bucket in spec.buckets]) for name in ("heads", "rows"))
        last = op("Mul", op("Sub", sizes.queries, op.ints([1])), op.ints([spec.heads]))
        token = op.ints((rows * spec.block * spec.heads + heads)[:, None])
        token = op("Add", token, op.ints(np.arange(spec.block) * spec.heads))
        token = op("Min", token, op("Add", op.ints(heads[:, None]), last))
        tokens = op.split(token, [len(bucket.rows) for bucket in spec.buckets])
        return [
            self._bucket_output(tables, query_tokens, *of_bucket)
            for of_bucket in zip(spec.buckets, tokens, counts, extents_of, strict=True)
        ]

    def _bucket_output(
        self,
        tables: _KeyTables,
        query_tokens: ir.Value,
        bucket: Bucket,
        tokens: ir.Value,
        count: ir.Value,
        extent: ir.Value,
    ) -> ir.Value:
        """The output of one bucket, `[batch, row * position in block, value_dim]`.

        Args:
            tables: tables of keys.
            query_tokens: `[batch, query * head, head_dim]`.
            bucket: the rows.
            tokens: index of each row's tokens, `[row, position in block]`.
            count: number of rows that hold queries, `[1]`.
            extent: the same number of rows, and the number of columns that hold keys, `[2]`.
        """
        op, spec = self.op, self.spec
        filler = spec.columns * spec.heads
        index = np.where(bucket.columns < 0, filler, bucket.columns * spec.heads + bucket.heads[:, None])
        blocks = op("Min", op("Slice", op.ints(index), op.ints([0, 0]), extent), tables.hidden_block)
        query = op("Gather", query_tokens, op("Slice", tokens, op.ints([0]), count), axis=1)
        key, value = (operand.gather(op, blocks) for operand in (tables.key, tables.value))
        added = op("Reshape", op("Gather", tables.added, blocks, axis=1), op.ints([0, 0, 1, -1]))
        if spec.persistent:
            key, value, added = self._with_persistent(tables, bucket, count, key, value, added)
        if bucket.diagonal:
            triangle = np.zeros((spec.block, bucket.width * spec.block), spec.dtype.numpy())
            triangle[:, -spec.block :] = np.triu(np.full((spec.block, spec.block), spec.hidden), 1)
            added = op("Add", added, op.floats(triangle))
        scores = op("Mul", op("MatMul", query, op("Transpose", key, perm=[0, 1, 3, 2])), op.floats(spec.scale))
        scores = op("Add", scores, added)
        if tables.full is not None:
            scores = op("Add", scores, self._pairs(tables, bucket, count, extent))
        output = op("MatMul", op("Softmax", scores, axis=-1), value)
        if spec.full_heads or spec.mask.memory or self.inputs.row is not None:
            mask_scores = scores if spec.full_heads or bucket.diagonal else added
            output = self._zero_where_hidden(mask_scores, output)
        return op("Reshape", output, op.ints([0, -1, spec.value_dim]))

    def _with_persistent(
        self, tables: _KeyTables, bucket: Bucket, count: ir.Value, key: ir.Value, value: ir.Value, added: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Keys, values and addends of the scores, followed by those of the persistent vectors of each row's head."""
        op = self.op
        heads = op("Slice", op.ints(bucket.heads), op.ints([0]), count)
        vectors = [op("Gather", operand.vectors, heads, axis=1) for operand in (tables.key, tables.value)]
        key, value = op("Concat", key, vectors[0], axis=2), op("Concat", value, vectors[1], axis=2)
        shape = op("Concat", op.ints([1]), count, op.ints([1, 1]), axis=0)
        return key, value, op("Concat", added, op("Expand", tables.added_persistent, shape), axis=3)

    def _pairs(self, tables: _KeyTables, bucket: Bucket, count: ir.Value, extent: ir.Value) -> ir.Value:
        """The addends of the mask of pairs, `[batch or 1, row, position in block, key]`."""
        op, spec, sizes = self.op, self.spec, self.sizes
        row = op("Add", op.ints(bucket.rows[:, None] * spec.block), op.ints(np.arange(spec.block)))
        row = op("Min", op("Slice", row, op.ints([0]), count), op("Sub", sizes.queries, op.ints([1])))
        if spec.full_heads > 1:
            heads = op("Slice", op.ints(bucket.heads[:, None]), op.ints([0]), count)
            row = op("Add", op("Mul", heads, sizes.queries), row)
        columns = op("Slice", op.ints(np.maximum(bucket.columns, 0)), op.ints([0, 0]), extent)
        columns = op("Min", columns, op("Sub", sizes.key_blocks, op.ints([1])))
        start = op("Mul", op("Unsqueeze", row, op.ints([2])), sizes.key_blocks)
        pairs = op("Gather", tables.full, op("Add", start, op("Unsqueeze", columns, op.ints([1]))), axis=1)
        pairs = op("Reshape", pairs, op.ints([0, 0, spec.block, -1]))
        if tables.full_persistent is not None:
            pairs = op("Concat", pairs, op("Gather", tables.full_persistent, row, axis=1), axis=3)
        return op("Max", pairs, op.floats(spec.hidden))

    def _zero_where_hidden(self, scores: ir.Value, output: ir.Value) -> ir.Value:
        """The output, zero for queries whose keys are all hidden: softmax gives them the mean of hidden values."""
        op, spec = self.op, self.spec
        highest = op("ReduceMax", scores, op.ints([-1]), keepdims=1)
        return op("Where", op("Greater", highest, op.floats(spec.hidden / 2)), output, op.floats(0.0))

    def dense_output(self) -> ir.Value:
        """The output of the heads that keep every block, `[batch, head * query, value_dim]`."""
        op, spec, inputs, sizes = self.op, self.spec, self.inputs, self.sizes
        operands = ((inputs.query, [0, 2, 1, 3]), (inputs.key, [0, 2, 3, 1]), (inputs.value, [0, 2, 1, 3]))
        query, key, value = (
            op("Transpose", op("Gather", operand, op.ints(spec.whole_heads), axis=2), perm=perm)
            for operand, perm in operands
        )
        scores = op("Mul", op("MatMul", query, key), op.floats(spec.scale))
        if inputs.full is not None:
            heads = op.ints(spec.whole_heads if spec.full_heads > 1 else [0])
            pairs = op("Gather", inputs.full, heads, axis=1)
            scores = op("Add", scores, op("Max", pairs, op.floats(spec.hidden)))
        if inputs.row is not None:
            scores = op("Add", scores, op("Max", inputs.row, op.floats(spec.hidden)))
        if spec.causal:
            key_position = op("Range", op.ints(0), op.scalar(sizes.keys), op.ints(1))
            query_position = op("Range", op.ints(0), op.scalar(sizes.queries), op.ints(1))
            later = op("Greater", key_position, op("Unsqueeze", query_position, op.ints([1])))
            scores = op("Add", scores, op("Where", later, op.floats(spec.hidden), op.floats(0.0)))
        output = op("MatMul", op("Softmax", scores, axis=-1), value)
        if inputs.full is not None or inputs.row is not None:
            output = self._zero_where_hidden(scores, output)
        return op("Reshape", output, op.ints([0, -1, spec.value_dim]))

    def in_order(self, parts: list[ir.Value], dense: ir.Value | None, counts: np.ndarray) -> ir.Value:
        """The outputs of buckets and dense heads, by query and head; zero where a row of a head keeps no key."""
        op, spec, sizes = self.op, self.spec, self.sizes
        bucket_of = np.full((spec.heads, spec.rows), len(spec.buckets))
        rank = np.zeros((spec.heads, spec.rows), np.int64)
        for number, bucket in enumerate(spec.buckets):
            bucket_of[bucket.heads, bucket.rows] = number
            rank[bucket.heads, bucket.rows] = np.arange(len(bucket.rows))
        offsets = np.concatenate([np.zeros((spec.rows + 1, 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
        offset = op("Gather", op.ints(offsets), op.scalar(sizes.query_blocks), axis=0)
        existing = (op.ints([0]), sizes.query_blocks, op.ints([1]))
        start = op("Gather", offset, op("Slice", op.ints(bucket_of), *existing), axis=0)
        index = op("Add", start, op("Slice", op.ints(rank), *existing))
        index = op("Mul", op("Unsqueeze", index, op.ints([2])), op.ints(spec.block))
        index = op("Add", index, op.ints(np.arange(spec.block)))
        zero_index = op("Mul", op("Gather", offset, op.ints(len(spec.buckets)), axis=0), op.ints(spec.block))
        # A row keeps a key if its first kept block holds a key; the outputs of all other rows are zero.
        first = np.where(spec.kept.any(2), spec.kept.argmax(2), 2 * spec.columns)[..., None]
        first = np.zeros_like(first) if spec.persistent else first
        has_key = op("Less", op("Slice", op.ints(first), *existing), sizes.key_blocks)
        index = op("Reshape", op("Where", has_key, index, zero_index), op.ints([spec.heads, -1]))
        index = op("Slice", index, op.ints([0]), sizes.queries, op.ints([1]))
        if dense is not None:
            index = self._with_dense_heads(index, zero_index)
        index = op("Transpose", index, perm=[1, 0])
        shape = op("Concat", op("Shape", self.inputs.query, start=0, end=1), op.ints([1, spec.value_dim]), axis=0)
        zero = op("Expand", op.floats(0.0), shape)
        outputs = [*parts, zero, *([] if dense is None else [dense])]
        return op("Gather", op("Concat", *outputs, axis=1), index, axis=1)

    def _with_dense_heads(self, index: ir.Value, zero_index: ir.Value) -> ir.Value:
        """The index `[head, query]` with the rows of dense heads, whose outputs follow the buckets and the zero."""
        op, spec, sizes = self.op, self.spec, self.sizes
        position = op("Range", op.ints(0), op.scalar(sizes.queries), op.ints(1))
        number = op.ints(np.arange(len(spec.whole_heads))[:, None])
        start = op("Add", op("Mul", number, sizes.queries), zero_index)
        dense_index = op("Add", op("Add", start, op.ints([1])), position)
        order = np.arange(spec.heads)
        order[spec.whole_heads] = spec.heads + np.arange(len(spec.whole_heads))
        return op("Gather", op("Concat", index, dense_index, axis=0), op.ints(order), axis=0)


@dataclasses.dataclass(frozen=True)
class _Operand:
    """Keys or values.

    Attributes:
        table: blocks `[batch, key block * head + 1, position in block, dim]`, or tokens `[batch, key * head, dim]`.
        tokens: index of each block's tokens, `[key block * head + 1, position in block]`; None: the table has blocks.
        dim: width of one vector.
        vectors: the persistent vectors, `[batch, head, persistent, dim]`; None: there are no persistent vectors.
    """

    table: ir.Value
    tokens: ir.Value | None
    dim: int
    vectors: ir.Value | None

    def gather(self, op: GraphBuilder, blocks: ir.Value) -> ir.Value:
        """The vectors of blocks `[row, column]`: `[batch, row, column * position in block, dim]`."""
        index = blocks if self.tokens is None else op("Gather", self.tokens, blocks, axis=0)
        return op("Reshape", op("Gather", self.table, index, axis=1), op.ints([0, 0, -1, self.dim]))


@dataclasses.dataclass(frozen=True)
class _KeyTables:
    """The tables that buckets gather from, by block and head. The last entry of each is hidden, and pads rows.

    Attributes:
        key, value: keys and values.
        added: addends of the scores, `[batch or 1, key block * head + 1, position in block]`.
        added_persistent: addends of the scores of persistent keys, `[batch or 1, 1, 1, persistent]`.
        hidden_block: index of the last entry, `[1]`.
        full: the mask of pairs, `[batch or 1, query (and head) * key block, position in block]`; None: there is none.
        full_persistent: the mask of pairs with persistent keys, `[batch or 1, query (and head), persistent]`; None:
            there is none.
    """

    key: _Operand
    value: _Operand
    added: ir.Value
    added_persistent: ir.Value
    hidden_block: ir.Value
    full: ir.Value | None
    full_persistent: ir.Value | None


def _key_tables(op: GraphBuilder, spec: AttentionSpec, inputs: AttentionInputs, sizes: Sizes) -> _KeyTables:
    """Record the nodes that build the tables."""
    position = _key_positions(op, spec, sizes)
    token = op("Mul", op("Min", position, op("Sub", sizes.keys, op.ints([1]))), op.ints(spec.heads))
    token = op("Reshape", op("Add", token, op.ints(np.arange(spec.heads)[:, None])), op.ints([-1, spec.block]))
    token = op("Concat", token, op.ints(np.zeros((1, spec.block))), axis=0)
    uses = int(np.delete(spec.kept, spec.whole_heads, axis=0).sum())
    gather_first = uses > _REUSED * spec.heads * spec.columns
    key, value = (
        _operand(op, spec, operand, dim, token, gather_first=gather_first)
        for operand, dim in ((inputs.key, spec.head_dim), (inputs.value, spec.value_dim))
    )
    added, added_persistent = _added(op, spec, inputs.row, position, sizes)
    hidden_block = op("Mul", sizes.key_blocks, op.ints([spec.heads]))
    full, full_persistent = _full_tables(op, spec, inputs.full, sizes)
    return _KeyTables(key, value, added, added_persistent, hidden_block, full, full_persistent)


def _key_positions(op: GraphBuilder, spec: AttentionSpec, sizes: Sizes) -> ir.Value:
    """Index of each block's keys, `[key block, 1, position in block]`; the number of keys where a key is missing."""
    first = op("Mul", op("Range", op.ints(0), op.scalar(sizes.key_blocks), op.ints(1)), op.ints(spec.block))
    position = op("Add", op("Unsqueeze", first, op.ints([1])), op.ints(np.arange(spec.block)))
    if sizes.missing is not None:
        position = op("Sub", position, sizes.missing)
        position = op("Where", op("Less", position, op.ints([0])), sizes.keys, position)
    return op("Unsqueeze", op("Min", position, sizes.keys), op.ints([1]))


def _operand(
    op: GraphBuilder, spec: AttentionSpec, operand: ir.Value, dim: int, token: ir.Value, *, gather_first: bool
) -> _Operand:
    """The table of keys or values `[batch, key, head, dim]`, of which each bucket or one node before gathers blocks."""
    tokens = op("Reshape", operand, op.ints([0, -1, dim]))
    table, index = (op("Gather", tokens, token, axis=1), None) if gather_first else (tokens, token)
    vectors = _split_persistent(op, spec, operand, 1)[1]
    if vectors is not None:
        vectors = op("Transpose", vectors, perm=[0, 2, 1, 3])
    return _Operand(table, index, dim, vectors)


def _added(
    op: GraphBuilder, spec: AttentionSpec, row: ir.Value | None, position: ir.Value, sizes: Sizes
) -> tuple[ir.Value, ir.Value]:
    """The addends of the scores for each block and head, and for persistent keys; see `_KeyTables`."""
    row, persistent = _split_persistent(op, spec, row, 3)
    if row is None:
        row = op("Expand", op.floats([[0.0]]), op("Concat", op.ints([1]), sizes.keys, axis=0))
    else:
        row = op("Max", op("Reshape", row, op.ints([0, -1])), op.floats(spec.hidden))
    row = op("Pad", row, op.ints([0, 0, 0, 1]), op.floats(spec.hidden))
    per_head = op("Reshape", op("Expand", position, op.ints([1, spec.heads, 1])), op.ints([-1, spec.block]))
    filler = op("Expand", sizes.keys, op.ints([1, spec.block]))
    added = op("Gather", row, op("Concat", per_head, filler, axis=0), axis=1)
    if persistent is None:
        persistent = op.floats(np.zeros((1, 1, 1, spec.persistent)))
    return added, persistent


def _full_tables(
    op: GraphBuilder, spec: AttentionSpec, full: ir.Value | None, sizes: Sizes
) -> tuple[ir.Value | None, ir.Value | None]:
    """The mask of pairs by key block, and for persistent keys; see `_KeyTables`."""
    full, persistent = _split_persistent(op, spec, full, 3)
    if full is not None:
        before = op.ints([0]) if sizes.missing is None else sizes.missing
        after = op("Sub", op("Mul", sizes.key_blocks, op.ints([spec.block])), op("Add", sizes.keys, before))
        zeros = op.ints([0, 0, 0])
        full = op("Pad", full, op("Concat", zeros, before, zeros, after, axis=0))
        # 0 copies the size of the batch, which may be one; the key blocks of one query are consecutive.
        full = op("Reshape", full, op.ints([0, -1, spec.block]))
    if persistent is not None:
        persistent = op("Reshape", persistent, op.ints([0, -1, spec.persistent]))
    return full, persistent


def _split_persistent(
    op: GraphBuilder, spec: AttentionSpec, value: ir.Value | None, axis: int
) -> tuple[ir.Value | None, ir.Value | None]:
    """The parts of a tensor for keys that have a position, and for the persistent keys after them."""
    if value is None or not spec.persistent:
        return value, None
    start, end, along = op.ints([0]), op.ints([-spec.persistent]), op.ints([axis])
    last = op.ints([np.iinfo(np.int64).max])
    return op("Slice", value, start, end, along), op("Slice", value, end, last, along)
