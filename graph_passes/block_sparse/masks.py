"""Block masks: which blocks of a site's attention map are computed, head by head.

Rows of the map are query positions, columns key positions. Position 0 of both is that of the segment: a memory before
it has negative key positions, and columns of keys that have no position (persistent vectors) are outside every mask.
"""

from __future__ import annotations

import dataclasses

import numpy as np

REACH = "compressor.reach"
"""Metadata of a masked graph: most positions by name of input, JSON; of more its masks say nothing."""
MASK = "block_mask"
"""What a mask is called on its module, and so behind the site's name in a graph."""
SUFFIX = f".{MASK}"


@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """The mask of one site.

    Attributes:
        kept: bool `[head, query block, key block]`, heads of the untouched model; True is computed.
        block: positions along each side of a block; 1 masks single entries.
        memory: key positions before position 0: the first key block begins at `-memory`.
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

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BlockMask)
            and (self.block, self.memory) == (other.block, other.memory)
            and np.array_equal(self.kept, other.kept)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def queries(self) -> int:
        """Query positions that the mask reaches over."""
        return int(self.kept.shape[1]) * self.block

    @property
    def keys(self) -> int:
        """Key positions from 0 on that the mask reaches over."""
        return int(self.kept.shape[2]) * self.block - self.memory

    @property
    def density(self) -> float:
        """Share of the blocks that are computed; of a causal site's, those of the future count as left out."""
        return float(self.kept.mean())

    def entries(self, queries: int, keys: int, *, past: int = 0, memory: int = 0) -> np.ndarray:
        """Bool `[head, query, key]` for so many queries after `past` positions and keys of which `memory` lie before
        position 0."""
        rows = (past + np.arange(queries)) // self.block
        columns = (self.memory - memory + np.arange(keys)) // self.block
        found: np.ndarray = self.kept[:, rows][:, :, columns]
        return found


def mask_name(site: str) -> str:
    """Name of the initializer that masks a site."""
    return site + SUFFIX
