"""Which blocks of the attention maps are dropped."""

from __future__ import annotations

from compressor.config.fields import Config, config_field
from compressor.config.sections.headings import BLOCKS
from compressor.config.values import BlockSize, Count, MapsFile, Share, ShareByKind


class BlocksConfig(Config):
    """Which blocks of the attention maps to drop."""

    drop_blocks: Share | None = config_field(
        BLOCKS,
        "share of the blocks of every attention layer to drop (0.9), least attention first, over all heads",
        decides_plan=True,
        is_basic=True,
    )
    drop_blocks_by_kind: ShareByKind = config_field(
        BLOCKS,
        "share by kind of attention, which overrides --drop-blocks: bidirectional=0.9,causal=0.9,cross=0",
        {},
        decides_plan=True,
    )
    block_size: BlockSize = config_field(
        BLOCKS, "tokens along the side of a block: a multiple of 8, or 1 for single entries", 64, decides_plan=True
    )
    maps: MapsFile | None = config_field(
        BLOCKS,
        "attention maps to derive masks from, or the folder of a run that has them; default: computed from"
        " training examples",
        decides_plan=True,
        is_path=True,
    )
    map_rows: Count = config_field(
        BLOCKS, "maximum number of training examples that attention maps are averaged over", 2000, decides_plan=True
    )
    random_blocks: bool = config_field(BLOCKS, "drop random blocks, as a baseline", False, decides_plan=True)
    count_causal_zeros: bool = config_field(
        BLOCKS,
        "count entries that causality or a window hides as dropped, as the code of the attention-pruning paper does",
        False,
        decides_plan=True,
    )
    weight_by_count: bool = config_field(
        BLOCKS,
        "weight pairs of positions by the number of examples that have them, so that short examples keep more",
        False,
        decides_plan=True,
    )
    allow_empty_rows: bool = config_field(
        BLOCKS,
        "allow a row of blocks to lose every block, so that its queries attend to nothing in that head",
        False,
        decides_plan=True,
    )
    mask_all_sites: bool = config_field(
        BLOCKS, "mask every site, even where this is not faster on this machine", False, decides_plan=True
    )
    entmax: bool = config_field(
        BLOCKS,
        "derive masks from the sharper maps of a model trained with entmax instead of softmax",
        False,
        decides_plan=True,
    )
    from_original_weights: bool = config_field(
        BLOCKS,
        "train with masks from the weights of MODEL, even where heads were selected first; default: from the"
        " weights of the selection",
        False,
        decides_plan=True,
    )

    @property
    def drops_any(self) -> bool:
        """Whether any block is to be dropped."""
        return bool(self.drop_blocks) or any(self.drop_blocks_by_kind.values())

    @property
    def requested(self) -> bool:
        """Whether a share of blocks to drop is set, even if it is zero."""
        return self.drop_blocks is not None or bool(self.drop_blocks_by_kind)
