"""Block masks: which blocks of a site's attention map are computed, head by head.

Rows of the map are query positions, columns are key positions. Position 0 of both is the first position of the segment:
a memory before it has negative key positions. Keys without a position (persistent vectors) are outside every mask.
"""

from __future__ import annotations

import dataclasses

import numpy as np

REACH = "compressor.reach"
"""Key of a masked graph's metadata: the number of positions that its masks cover, by name of the input, as JSON."""
MASK = "block_mask"
"""Name of the buffer that holds a mask in its module, and suffix of the initializer in a graph."""
SUFFIX = f".{MASK}"


@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """The mask of one site.

    Attributes:
        kept: bool `[head, query block, key block]`, for the heads of the unpruned model; True: the block is computed.
        block: positions along each side of a block; 1: the mask consists of single entries.
        memory: number of key positions before position 0, so that the first key block begins at `-memory`.

    Raises:
        ValueError: the array is not a mask, or a block or memory has an impossible size.
    """

    kept: np.ndarray
    block: int = 1
    memory: int = 0

    def __post_init__(self) -> None:
        if self.kept.dtype != np.bool_ or self.kept.ndim != 3 or 0 in self.kept.shape:
            raise ValueError(
                f"a mask of type {self.kept.dtype} and shape {list(self.kept.shape)}; give bool [head, query block,"
                " key block]"
            )
        if self.block < 1 or (self.block > 1 and self.block % 8):
            raise ValueError(f"blocks of {self.block} positions; give 1 for single entries, or a multiple of 8")
        if self.memory < 0:
            raise ValueError(f"a memory of {self.memory} positions; give 0 or more")

    def __eq__(self, value: object) -> bool:
        return (
            isinstance(value, BlockMask)
            and (self.block, self.memory) == (value.block, value.memory)
            and np.array_equal(self.kept, value.kept)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def queries(self) -> int:
        """Number of query positions that the mask covers."""
        return int(self.kept.shape[1]) * self.block

    @property
    def keys(self) -> int:
        """Number of key positions from 0 on that the mask covers."""
        return int(self.kept.shape[2]) * self.block - self.memory

    @property
    def density(self) -> float:
        """Share of the blocks that are computed; future blocks of a causal site count as dropped."""
        return float(self.kept.mean())

    def entries(self, queries: int, keys: int, *, past: int = 0, memory: int = 0) -> np.ndarray:
        """The mask of single entries, bool `[head, query, key]`.

        Args:
            queries: number of queries.
            keys: number of keys.
            past: position of the first query.
            memory: number of keys before position 0.

        Raises:
            ValueError: the mask does not cover these queries and keys.
        """
        if min(queries, keys, past, memory, self.memory - memory) < 0 or (
            past + queries > self.queries or keys - memory > self.keys
        ):
            raise ValueError(
                f"{queries} queries from position {past} on and {keys} keys, {memory} of them in memory: the mask"
                f" covers {self.queries} queries and {self.keys} keys after a memory of {self.memory}"
            )
        rows = (past + np.arange(queries)) // self.block
        columns = (self.memory - memory + np.arange(keys)) // self.block
        entries: np.ndarray = self.kept[:, rows][:, :, columns]
        return entries


def mask_name(site: str) -> str:
    """Name of the initializer that holds the mask of a site."""
    return site + SUFFIX
