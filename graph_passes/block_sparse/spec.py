"""The specification of a block-sparse attention, the tensors that it reads, and the tape that records its nodes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graph_passes.block_sparse.masks import BlockMask
from graph_passes.block_sparse.row_buckets import Bucket, buckets, dense_heads, visible_blocks
from graph_passes.tape import Tape


class GraphBuilder(Tape):
    """Records the nodes of an ONNX function. Equal constants share one node, because functions have no initializers."""

    def __init__(self, dtype: ir.DataType) -> None:
        super().__init__()
        self.dtype = dtype
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def split(self, value: ir.Value, sizes: Sequence[int]) -> list[ir.Value]:
        """Parts of a tensor along its first axis; the tensor itself where it has one part."""
        if len(sizes) == 1:
            return [value]
        return list(self.op_multi_out("Split", [value, self.ints(list(sizes))], {"axis": 0}, num_outputs=len(sizes)))

    def scalar(self, value: ir.Value) -> ir.Value:
        """A tensor `[1]` as a tensor without axes."""
        return self("Squeeze", value, self.ints([0]))

    def floats(self, content: Any) -> ir.Value:
        """A constant of the builder's type."""
        return self.constant(np.asarray(content, self.dtype.numpy()))

    def constant(self, content: np.ndarray) -> ir.Value:
        key = (str(content.dtype), content.shape, content.tobytes())
        if key not in self._constants:
            self._constants[key] = super().constant(content)
        return self._constants[key]


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionSpec:
    """The constants of one block-sparse attention.

    Attributes:
        mask: blocks to compute, for the heads of the inputs.
        head_dim: width of a query and a key.
        value_dim: width of a value.
        scale: factor of the scores.
        causal: whether keys after the query are hidden.
        persistent: number of last keys, which every query of a head attends to, independently of the mask.
        full_heads: heads of the mask of pairs: 0 where there is none, 1, or all.
        dtype: type of queries, keys, values and scores.

    Raises:
        ValueError: `causal` is set with a memory or persistent vectors; then the mask of pairs must contain causality.
    """

    mask: BlockMask
    head_dim: int
    value_dim: int
    scale: float
    causal: bool = False
    persistent: int = 0
    full_heads: int = 0
    dtype: ir.DataType = ir.DataType.FLOAT

    def __post_init__(self) -> None:
        if self.causal and (self.mask.memory or self.persistent):
            raise ValueError(
                "causal block-sparse attention has no memory and no persistent vectors; pass causality as the mask"
                " `full`"
            )

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """Blocks to compute, without those that causality hides entirely: bool `[head, query block, key block]`."""
        return visible_blocks(self.mask, causal=self.causal)

    @functools.cached_property
    def buckets(self) -> list[Bucket]:
        """Rows of the heads that are not whole."""
        return buckets(self.mask, self.head_dim, causal=self.causal, every=bool(self.persistent))

    @functools.cached_property
    def whole_heads(self) -> np.ndarray:
        """Heads that keep every block, which are computed densely, `[head]`."""
        return np.flatnonzero(dense_heads(self.mask, causal=self.causal))

    @property
    def block(self) -> int:
        """Positions along a side of a block."""
        return self.mask.block

    @property
    def heads(self) -> int:
        """Number of heads."""
        return int(self.mask.kept.shape[0])

    @property
    def rows(self) -> int:
        """Number of query blocks."""
        return int(self.mask.kept.shape[1])

    @property
    def columns(self) -> int:
        """Number of key blocks."""
        return int(self.mask.kept.shape[2])

    @property
    def hidden(self) -> float:
        """The score of a hidden key: a quarter of the lowest number, so that the sum of several is still finite."""
        return float(np.finfo(self.dtype.numpy()).min) / 4


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """The inputs of the function, see `block_sparse_attention`."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    row: ir.Value | None = None
    full: ir.Value | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the inputs, as tensors `[1]`.

    Attributes:
        queries: number of query positions.
        keys: number of keys with a position, that is without persistent keys.
        missing: number of the mask's memory positions that have no key; None: the mask has no memory.
        query_blocks: number of blocks that hold the queries.
        key_blocks: number of blocks that hold the keys and the missing memory.
    """

    queries: ir.Value
    keys: ir.Value
    missing: ir.Value | None
    query_blocks: ir.Value
    key_blocks: ir.Value


def read_sizes(op: GraphBuilder, spec: AttentionSpec, inputs: AttentionInputs) -> Sizes:
    """Record the nodes that read the sizes of the inputs."""
    queries = op("Shape", inputs.query, start=1, end=2)
    keys = op("Shape", inputs.key, start=1, end=2)
    if spec.persistent:
        keys = op("Sub", keys, op.ints([spec.persistent]))
    missing = None
    if spec.mask.memory:
        remembered = op("Sub", keys, queries)
        missing = op("Sub", op.ints([spec.mask.memory]), remembered)
    covered = keys if missing is None else op("Add", keys, missing)
    return Sizes(queries, keys, missing, _blocks(op, queries, spec.block), _blocks(op, covered, spec.block))


def _blocks(op: GraphBuilder, size: ir.Value, block: int) -> ir.Value:
    """The number of blocks that hold `size` positions, `[1]`."""
    return op("Div", op("Add", size, op.ints([block - 1])), op.ints([block]))
